"""RMSNorm against float64, its start value, and its place in Megatron's reduction of gradients."""

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from qla_megatron.layers.norms import RMSNorm
from qla_megatron.testing.distributed import run_ranks

TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}
EPS = 1e-6


def make_config(**changes) -> TransformerConfig:
    settings = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 8, "normalization": "RMSNorm"}
    return TransformerConfig(**(settings | {"use_cpu_initialization": True} | changes))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("zero_centered", [True, False])
def test_values_and_gradients(dtype: torch.dtype, zero_centered: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    width = 48
    config = make_config(layernorm_zero_centered_gamma=zero_centered, params_dtype=dtype)
    norm = RMSNorm(config=config, hidden_size=width, eps=EPS)
    assert norm.weight.dtype == dtype
    # Small weights, as zero-centred training has: 1 + w in bfloat16 would lose most of them.
    weight = torch.randn(width, generator=generator) * 1e-3 + (0 if zero_centered else 1)
    with torch.no_grad():
        norm.weight.copy_(weight)
    x, dy = (torch.randn(6, 2, width, generator=generator).to(dtype) for _ in range(2))
    x = (3 * x).requires_grad_()
    y = norm(x)
    y.backward(dy)

    x64, w64 = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    factor = 1 + w64 if zero_centered else w64
    y64 = x64 / (x64.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * factor
    y64.backward(dy.double())
    assert y.dtype == x.grad.dtype == norm.weight.grad.dtype == dtype
    assert y.shape == x.shape
    for actual, expected in ((y, y64), (x.grad, x64.grad), (norm.weight.grad, w64.grad)):
        assert relative_error(actual.detach(), expected.detach()) < TOLERANCE[dtype]


def test_small_zero_centered_weights_count() -> None:
    """A weight below half a bfloat16 step of 1 changes float32 outputs of bfloat16 weights."""
    norm = RMSNorm(make_config(layernorm_zero_centered_gamma=True, params_dtype=torch.bfloat16), 4, EPS)
    x = torch.ones(1, 4)
    before = norm(x)
    with torch.no_grad():
        norm.weight.fill_(2.0**-10)
    assert torch.allclose(norm(x) - before, torch.tensor(2.0**-10), rtol=1e-3)


@pytest.mark.parametrize("zero_centered", [True, False])
def test_starts_as_the_identity_factor(zero_centered: bool) -> None:
    norm = RMSNorm(make_config(layernorm_zero_centered_gamma=zero_centered), 64)
    assert torch.equal(norm.weight, torch.full((64,), 0.0 if zero_centered else 1.0))


def test_dtype_of_the_weight_can_be_asked_for() -> None:
    assert RMSNorm(make_config(params_dtype=torch.bfloat16), 64, dtype=torch.float32).weight.dtype == torch.float32


def test_refusals() -> None:
    with pytest.raises(NotImplementedError, match="normalization must be 'RMSNorm', got 'LayerNorm'"):
        RMSNorm(make_config(normalization="LayerNorm"), 64)
    with pytest.raises(NotImplementedError, match="does not know has_bias, got True"):
        RMSNorm(make_config(), 64, has_bias=True)


def check_sequence_parallel() -> None:
    """Each rank normalises its tokens; after Megatron's reduction all hold the gradient of all tokens."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads

    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(16, 2, 64, generator=generator) for _ in range(2))
    whole = RMSNorm(make_config(), 64)
    whole(x).backward(dy)
    config = make_config(tensor_model_parallel_size=ranks, sequence_parallel=True, use_cpu_initialization=False)
    norm = RMSNorm(config, 64)
    norm(x.chunk(ranks)[rank]).backward(dy.chunk(ranks)[rank])
    assert relative_error(norm.weight.grad, whole.weight.grad.double()) > 0.1, "the part must differ from the sum"
    norm.ddp_config = torch.nn.Module()
    norm.ddp_config.use_megatron_fsdp = False
    _allreduce_non_tensor_model_parallel_grads([norm], config, parallel_state.get_tensor_model_parallel_group())
    assert relative_error(norm.weight.grad, whole.weight.grad.double()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("ranks", [2, 8])
def test_sequence_parallel_gradients_are_summed(ranks: int) -> None:
    run_ranks(check_sequence_parallel, ranks)
