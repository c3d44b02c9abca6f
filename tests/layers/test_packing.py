"""Packed documents: each as if it were alone."""

import pytest
import torch
from layer_cases import HIDDEN, alone, assert_close, load, make_config, make_layer, packed, random_weights
from megatron.core.packed_seq_params import PackedSeqParams

from qla_megatron.layers.gated_delta_net import GatedDeltaNet
from qla_megatron.layers.packing import document_offsets
from qla_megatron.testing.distributed import run_ranks

TOLERANCE = 1e-5  # float32
# Shorter than the convolution, around a chunk of 64, empty at the front, in the middle and at the end.
DOCUMENTS = [0, 1, 2, 3, 63, 0, 64, 65, 20, 0]
TOKENS = sum(DOCUMENTS)


def _layer(**changes: bool) -> GatedDeltaNet:
    layer = make_layer(make_config(**changes), alone())
    load(layer, random_weights())
    return layer


def _tokens(seed: int = 1, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(tokens, 1, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_equals_each_document_alone(deterministic: bool) -> None:
    run_ranks(_check_packed_equals_alone, 1, deterministic)


def _check_packed_equals_alone(deterministic: bool) -> None:
    together, apart = _layer(deterministic_mode=deterministic), _layer()
    dy = _tokens(2)
    x = _tokens().requires_grad_()
    y, _ = together(x, None, packed_seq_params=packed(DOCUMENTS))
    (y * dy).sum().backward()

    x_apart = _tokens().requires_grad_()
    documents = [d for d in x_apart.split(DOCUMENTS) if len(d)]
    y_apart = torch.cat([apart(document, None)[0] for document in documents])
    (y_apart * dy).sum().backward()

    assert_close(y.detach(), y_apart.detach(), TOLERANCE, "output")
    assert_close(x.grad, x_apart.grad, TOLERANCE, "input gradient")
    for (name, p), q in zip(together.named_parameters(), apart.parameters(), strict=True):
        assert_close(p.grad, q.grad, TOLERANCE, f"gradient of {name}")


def test_nothing_leaks_between_documents() -> None:
    run_ranks(_check_no_leak, 1)


def _check_no_leak() -> None:
    layer, params = _layer(), packed([70, 30])
    first, second = _tokens(tokens=100), _tokens(tokens=100)
    second[:70] = 1e3
    a, b = (layer(x, None, packed_seq_params=params)[0][70:] for x in (first, second))
    assert torch.equal(a, b)


def test_padded_offsets_win() -> None:
    run_ranks(_check_padded_offsets, 1)


def _check_padded_offsets() -> None:
    layer, x = _layer(), _tokens(tokens=24)
    with_padding = layer(x, None, packed_seq_params=packed([5, 10], padded=[8, 16]))[0]
    assert torch.equal(with_padding, layer(x, None, packed_seq_params=packed([8, 16]))[0])
    real = layer(x[:5], None)[0]
    assert_close(with_padding[:5].detach(), real.detach(), TOLERANCE, "tokens in front of the padding")


def test_only_thd_is_packing() -> None:
    run_ranks(_check_only_thd, 1)


def _check_only_thd() -> None:
    layer, x = _layer(), _tokens(tokens=24)
    dense = layer(x, None)[0]
    for qkv_format in ("sbhd", "bshd", None):
        params = packed([8, 16], qkv_format=qkv_format)
        assert torch.equal(layer(x, None, packed_seq_params=params)[0], dense)
    assert not torch.allclose(layer(x, None, packed_seq_params=packed([8, 16]))[0], dense)


@pytest.mark.parametrize(
    ("params", "batch", "text"),
    [
        (packed([8, 8]), 1, r"does not match the total sequence length 24, got \[0, 8, 16\]"),
        (packed([8, 16], padded=[8, 24]), 1, "does not match the total sequence length 24"),
        (packed([8, 16], cu_seqlens_kv=torch.tensor([0, 9, 24])), 1, "cu_seqlens_kv must equal cu_seqlens_q"),
        (packed([8, 16], cu_seqlens_kv=torch.tensor([0, 24])), 1, "cu_seqlens_kv must equal cu_seqlens_q"),
        (packed([8, 16], cu_seqlens_q=torch.tensor([0, 30, 24])), 1, "must start at 0 and never fall"),
        (packed([8, 16], cu_seqlens_q=torch.tensor([2, 8, 24])), 1, "must start at 0 and never fall"),
        (packed([8, 16], cu_seqlens_q=torch.tensor([24])), 1, r"cu_seqlens_q must have shape \[N \+ 1\]"),
        (packed([8, 16], cu_seqlens_q=[0, 8, 24]), 1, r"cu_seqlens_q must have shape \[N \+ 1\] .* got \[0, 8, 24\]"),
        (PackedSeqParams(qkv_format="thd"), 1, r"cu_seqlens_q must have shape \[N \+ 1\]"),
    ],
)
def test_bad_offsets_are_refused(params: PackedSeqParams, batch: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        document_offsets(params, tokens=24, batch=batch, cp_size=1)


def test_a_batch_of_packs_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="hidden_states must have batch 1 when packed, got 2"):
        document_offsets(packed([8, 16]), tokens=24, batch=2, cp_size=1)


def test_megatrons_name_for_choosing_offsets() -> None:
    padded, actual = torch.tensor([0, 8, 24]), torch.tensor([0, 5, 15])
    assert GatedDeltaNet._resolve_cu_seqlens(None, padded, actual, 24, "cu_seqlens_q") is padded
    assert GatedDeltaNet._resolve_cu_seqlens(None, None, actual, 15, "cu_seqlens_q") is actual
    with pytest.raises(ValueError, match="does not match"):
        GatedDeltaNet._resolve_cu_seqlens(None, None, actual, 1008, "cu_seqlens_q", cp_size=1)
    with pytest.raises(ValueError, match="must be divisible by cp_size"):
        GatedDeltaNet._resolve_cu_seqlens(None, None, torch.tensor([0, 505, 1008]), 1008, "cu_seqlens_q", cp_size=2)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_offsets_on_a_device_are_never_read(cp_size: int) -> None:
    """A meta tensor has no values: whatever reads one on the host, .item() or a branch, raises."""
    params = packed([8, 16], padded=[8, 16])
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        setattr(params, name, getattr(params, name).to("meta"))
    assert document_offsets(params, tokens=24, batch=1, cp_size=cp_size) is params.cu_seqlens_q_padded
    with pytest.raises(RuntimeError, match="meta"):
        params.cu_seqlens_q_padded[-1].item()


def test_changed_offsets_are_checked_again() -> None:
    params = packed([8, 16])
    for _ in range(2):
        assert document_offsets(params, tokens=24, batch=1, cp_size=1) is params.cu_seqlens_q
    params.cu_seqlens_q[1] = 30  # in place
    with pytest.raises(ValueError, match="must start at 0 and never fall"):
        document_offsets(params, tokens=24, batch=1, cp_size=1)
    params = packed([8, 16])
    document_offsets(params, tokens=24, batch=1, cp_size=1)
    params.cu_seqlens_kv = torch.tensor([0, 9, 24])
    with pytest.raises(ValueError, match="cu_seqlens_kv must equal cu_seqlens_q"):
        document_offsets(params, tokens=24, batch=1, cp_size=1)
    with torch.inference_mode():  # whose tensors count no versions
        assert document_offsets(packed([24]), tokens=24, batch=1, cp_size=1) is not None
