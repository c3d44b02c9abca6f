"""Output layer and cross entropy in chunks: against torch in float64, against Megatron's own path in whole models.

A model with everything that uses the output layer's weight (tied to the embedding, multi-token prediction) has every
gradient compared, so that one counted twice or lost shows.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layer_cases import assert_close, packed
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from test_spec import TOKENS, VOCABULARY, four_layers, gpt, hybrid, randomise
from torch.utils._python_dispatch import TorchDispatchMode

from qla_megatron.layers import spec
from qla_megatron.layers.chunked_loss import IGNORED, chunked_cross_entropy, use_chunked_loss
from qla_megatron.testing.distributed import run_ranks

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
T, B, D, V = 24, 3, 16, 48  # 72 tokens; 48 rows divide by 4 ranks
DOCUMENTS = [24, 40]


def case(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    """hidden [T, B, D], weight [V, D], labels [B, T] with every fifth ignored, gradients of the losses [B, T]."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((T, B, D), (V, D)))
    labels = torch.randint(V, (B, T), generator=generator)
    labels.view(-1)[::5] = IGNORED
    return (scale * hidden).to(dtype), weight.to(dtype), labels, torch.randn(B, T, generator=generator)


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, g: torch.Tensor | float
) -> tuple[torch.Tensor, ...]:
    """Losses [B, T], dhidden and dweight in float64."""
    h, w = (t.double().requires_grad_() for t in (hidden, weight))
    losses = F.cross_entropy((h @ w.t()).permute(1, 2, 0), labels, ignore_index=IGNORED, reduction="none")
    (losses * g).sum().backward()
    return losses.detach(), h.grad, w.grad


def run(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, g: Any, **how: Any) -> tuple[Any, ...]:
    """The same by the function under test; `g` None: the losses are summed."""
    h, w = (t.detach().clone().requires_grad_() for t in (hidden, weight))
    losses = chunked_cross_entropy(h, w, labels, is_summed=g is None, **how)
    (0.7 * losses.sum() if g is None else (losses * g).sum()).backward()
    return losses.detach(), h.grad, w.grad


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("tokens_a_chunk", [1, 7, 72, 1000])  # one, a remainder, exactly all, more than there are
def test_equals_float64(dtype: torch.dtype, tokens_a_chunk: int) -> None:
    hidden, weight, labels, g = case(dtype)
    for gradient, factor in ((g, g), (None, 0.7)):
        limit = tokens_a_chunk * V * hidden.element_size()
        found = run(hidden, weight, labels, gradient, chunk_bytes=limit)
        for what, a, b in zip(("losses", "dh", "dw"), found, reference(hidden, weight, labels, factor), strict=True):
            assert_close(a, b, TOLERANCES[dtype], what)
        again = run(hidden, weight, labels, gradient, chunk_bytes=limit)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_the_gradients_factor_is_not_rounded() -> None:
    hidden, weight, labels, g = case(torch.bfloat16)
    found, expected = run(hidden, weight, labels, None)[1], run(hidden, weight, labels, torch.ones_like(g))[1]
    share = (found.double() * expected.double()).sum() / expected.double().square().sum()
    assert abs(share / 0.7 - 1) < 2e-4  # 0.7 in bfloat16 is off by 1.1e-3, for all elements alike


@pytest.mark.gpu
def test_on_a_gpu_with_the_whole_vocabulary() -> None:
    """bfloat16 through the fused functions: against float64 for some tokens, and no more memory than said."""
    tokens, width, rows, limit = 4096, 256, 248_320, 64 << 20
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, 1, width, device="cuda", generator=generator).bfloat16()
    weight = (torch.randn(rows, width, device="cuda", generator=generator) * 0.05).bfloat16()
    labels = torch.randint(rows, (1, tokens), device="cuda", generator=generator)
    labels[:, ::5] = IGNORED
    for gradient in (None, torch.full((1, tokens), 0.7, device="cuda")):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses, dh, dw = run(hidden, weight, labels, gradient, chunk_bytes=limit)
        held = 4 * hidden.numel() * 2 + 3 * weight.numel() * 4
        assert torch.cuda.max_memory_allocated() - before < held + 4 * limit  # whole logits would be 2 GiB
        again = run(hidden, weight, labels, gradient, chunk_bytes=limit)
        assert all(torch.equal(a, b) for a, b in zip((losses, dh, dw), again, strict=True))
        expected = 0.0
        for part in range(0, tokens, 512):
            here = slice(part, part + 512)
            loss, some, more = reference(hidden[here], weight, labels[:, here], 0.7)
            assert_close(losses[:, here], loss, 1e-3, "losses")
            assert_close(dh[here], some, TOLERANCES[torch.bfloat16], "dh")
            expected = expected + more
        assert_close(dw, expected, TOLERANCES[torch.bfloat16], "dw")


def test_large_logits_neither_overflow_nor_lose_the_loss() -> None:
    hidden, weight, labels, g = case(scale=1000.0)
    for gradient, factor in ((g, g), (None, 0.7)):
        found = run(hidden, weight, labels, gradient)
        for a, b in zip(found, reference(hidden, weight, labels, factor), strict=True):
            assert_close(a, b, 1e-5, "large logits")


def test_parts_that_need_no_gradient() -> None:
    hidden, weight, labels, _ = case()
    _, dh, dw = reference(hidden, weight, labels, 1.0)
    for is_summed, (h, w) in itertools.product((True, False), ((True, False), (False, True), (False, False))):
        x, y = hidden.clone().requires_grad_(h), weight.clone().requires_grad_(w)
        total = chunked_cross_entropy(x, y, labels, is_summed=is_summed).sum()
        assert total.requires_grad == (h or w)
        if h or w:
            total.backward()
        for tensor, expected, has in ((x, dh, h), (y, dw, w)):
            assert (tensor.grad is not None) == has
            if has:
                assert_close(tensor.grad, expected, 1e-6, "gradient")


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_logits_are_never_whole() -> None:
    tokens, width, rows = 4096, 8, 1000
    hidden, weight = torch.randn(tokens, 1, width), torch.randn(rows, width)
    labels = torch.zeros(1, tokens, dtype=torch.int64)
    limit = 200_000
    for gradient in (torch.ones(1, tokens), None):
        with Largest() as largest:
            run(hidden, weight, labels, gradient, chunk_bytes=limit)
        assert largest.elements <= max(limit // 4, tokens * width, rows * width)
        with Largest() as whole:
            run(hidden, weight, labels, gradient, chunk_bytes=1 << 30)
        assert whole.elements == tokens * rows


def test_bad_input_is_refused() -> None:
    hidden, weight, labels, g = case()
    with pytest.raises(NotImplementedError, match="is_summed=True takes the gradient of a sum"):
        (chunked_cross_entropy(hidden, weight.requires_grad_(), labels, is_summed=True) * g).sum().backward()
    with pytest.raises(ValueError, match=r"labels must have shape \[B, T\] = \(3, 24\), got \(24, 3\)"):
        chunked_cross_entropy(hidden, weight, labels.t())
    with pytest.raises(ValueError, match=r"hidden must have shape \[T, B, D\]"):
        chunked_cross_entropy(hidden, weight.t(), labels)
    with pytest.raises(TypeError, match=r"same floating dtype, got torch.float64 and torch.float32"):
        chunked_cross_entropy(hidden.double(), weight, labels)
    with pytest.raises(TypeError, match=r"labels must be int64, got torch.int32"):
        chunked_cross_entropy(hidden, weight, labels.int())
    with pytest.raises(ValueError, match="chunk_bytes must be at least 1, got 0"):
        chunked_cross_entropy(hidden, weight, labels, chunk_bytes=0)


@pytest.mark.parametrize("wrong", [V, -1])
def test_a_label_outside_the_vocabulary_has_no_finite_loss(wrong: int) -> None:
    hidden, weight, labels, _ = case()
    labels[1, 2] = wrong
    losses = chunked_cross_entropy(hidden, weight, labels)
    assert losses[1, 2].isnan()
    assert losses.isnan().sum() == 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_split_over_ranks(ranks: int) -> None:
    run_ranks(_check_split, ranks)


def _check_split() -> None:
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), parallel_state.get_tensor_model_parallel_group()
    for scale, sequence_parallel in itertools.product((1.0, 1000.0), (False, True)):
        hidden, weight, labels, g = case(scale=scale)
        part = hidden.chunk(ranks)[rank] if sequence_parallel else hidden
        rows = weight.chunk(ranks)[rank]
        for gradient, factor in ((g, g), (None, 0.7)):
            how = {"group": group, "sequence_parallel": sequence_parallel, "chunk_bytes": 7 * V * 4 // ranks}
            losses, dh, dw = run(part, rows, labels, gradient, **how)
            expected, whole_dh, whole_dw = reference(hidden, weight, labels, factor)
            tolerance = 1e-6 if scale == 1.0 else 1e-5
            assert_close(losses, expected, tolerance, "losses")
            assert_close(dh, whole_dh.chunk(ranks)[rank] if sequence_parallel else whole_dh, tolerance, "dh")
            assert_close(dw, whole_dw.chunk(ranks)[rank], tolerance, "dw")
            everyone = [torch.empty_like(losses) for _ in range(ranks)]
            dist.all_gather(everyone, losses.contiguous())
            assert all(torch.equal(losses, other) for other in everyone)


# --- in models ---


def results(model: Any, *, chunked: bool, is_summed: bool = True) -> dict[str, torch.Tensor]:
    """Losses, what multi-token prediction logs, and every gradient, after two micro-batches of packed documents."""
    randomise(model)
    model.train()
    if chunked:
        use_chunked_loss(model, is_summed=is_summed, chunk_bytes=7 * VOCABULARY * 4)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    wrapped = DistributedDataParallel(model.config, ddp, model)
    wrapped.zero_grad_buffer()
    MTPLossLoggingHelper.tracker.clear()
    MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(0.5)
    found = {}
    for number in range(2):
        tokens = torch.randint(VOCABULARY, (1, TOKENS + 1), generator=torch.Generator().manual_seed(number))
        mask = torch.ones(1, TOKENS)
        mask[:, 10:20] = 0
        labels = tokens[:, 1:].masked_fill(mask == 0, IGNORED) if chunked else tokens[:, 1:]
        losses = wrapped(
            tokens[:, :-1], torch.arange(TOKENS)[None], None, labels=labels, loss_mask=mask,
            packed_seq_params=packed(DOCUMENTS),
        )  # fmt: skip
        found[f"losses {number}"] = losses.detach() * mask
        (0.5 * (losses.sum() if chunked and is_summed else (losses * mask).sum())).backward()
    found |= {name: value.clone() for name, value in MTPLossLoggingHelper.tracker.items() if torch.is_tensor(value)}
    return found | {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_models_equal_the_plain_path(ranks: int, sequence_parallel: bool) -> None:
    run_ranks(_check_models, ranks, sequence_parallel)


def _check_models(sequence_parallel: bool) -> None:
    layout = {"tensor_model_parallel_size": dist.get_world_size(), "sequence_parallel": sequence_parallel}
    for tied, predicts in ((True, True), (False, True), (True, False)):
        config = four_layers(
            num_layers=2, linear_attention_freq=2, **({"mtp_num_layers": 1} if predicts else {}), **layout
        )

        def make(config: Any = config, tied: bool = tied) -> Any:
            arguments = {"share_embeddings_and_output_weights": tied, "mtp_block_spec": spec.mtp_block_spec(config)}
            return gpt(config, parallel_output=True, **arguments)

        plain = results(make(), chunked=False)
        assert ("loss_values" in plain) == predicts
        for is_summed in (True, False):
            chunked = results(make(), chunked=True, is_summed=is_summed)
            assert chunked.keys() == plain.keys()
            for name, value in plain.items():
                assert_close(chunked[name], value, 1e-5, f"{name} (tied={tied}, is_summed={is_summed})")


def test_hybrid_model_logits_and_evaluation() -> None:
    run_ranks(_check_hybrid, 1)


def _check_hybrid() -> None:
    model, plain = (hybrid(four_layers(mtp_num_layers=1), "G-G-G-*-/*-") for _ in range(2))
    for each in (model, plain):
        randomise(each)
    use_chunked_loss(model, chunk_bytes=1000)
    tokens = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    arguments = tokens, torch.arange(TOKENS)[None], None
    assert torch.equal(model(*arguments), plain(*arguments))  # no labels: logits
    for labels in (tokens, None, tokens):
        with torch.no_grad():
            assert_close(model.eval()(*arguments, labels=labels), plain.eval()(*arguments, labels=labels), 1e-6, "eval")
    for each in (model, plain):
        each.train()(*arguments, labels=tokens).mean().backward()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close(parameter.grad, other.grad, 1e-5, name)


def test_other_output_layers_are_refused() -> None:
    run_ranks(_check_refusals, 1)


def _check_refusals() -> None:
    with pytest.raises(NotImplementedError, match=r"output_layer\.gather_output must be False"):
        use_chunked_loss(gpt(four_layers(), parallel_output=False))
    stage = gpt(four_layers(), parallel_output=True)
    stage.post_process = False
    use_chunked_loss(stage)
    assert "forward" not in vars(stage.output_layer)
