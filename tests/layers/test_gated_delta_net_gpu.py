"""The layer on a GPU, all kernels together, against the reference in float64."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from layer_cases import RECOMPUTE, alone, assert_close, make_config, make_layer, packed
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from qla_megatron.layers import GatedDeltaNet

pytestmark = pytest.mark.gpu

TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 3e-3}  # relative L2 errors, through five roundings and two products
HIDDEN, TOKENS = 256, 150
SIZES = {
    "hidden_size": HIDDEN,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
LENGTHS = {"dense": None, "packed": (70, 1, 2, 77)}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """Megatron's groups, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def build(dtype: torch.dtype, backend: str, **changes: object) -> GatedDeltaNet:
    layer = make_layer(make_config(**SIZES, **changes), alone(), backend=backend)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            scale = {"conv1d.weight": 0.5, "out_norm.weight": 0.5}.get(name, 1.0 if parameter.dim() == 1 else 0.1)
            # As exact in 16 bits as in 64
            parameter.copy_((torch.randn(parameter.shape, generator=generator) * scale).to(dtype))
    layer.cuda()
    return layer.double() if backend == "reference" else layer.to(dtype)


def run(layer: GatedDeltaNet, x: Tensor, dy: Tensor, lengths: tuple[int, ...] | None) -> dict[str, Tensor]:
    params = None
    if lengths is not None:
        params = packed(lengths)
        for name in ("cu_seqlens_q", "cu_seqlens_kv"):
            setattr(params, name, getattr(params, name).cuda())
    x = x.clone().requires_grad_()
    y, _ = layer(x, None, packed_seq_params=params)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}


def inputs(dtype: torch.dtype, batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(TOKENS, batch, HIDDEN, generator=generator).to("cuda", dtype) for _ in range(2))
    return x, dy


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("layout", LENGTHS)
def test_layer_equals_the_reference(layout: str, dtype: torch.dtype) -> None:
    lengths = LENGTHS[layout]
    x, dy = inputs(dtype, 1 if lengths else 2)
    have = run(build(dtype, "auto"), x, dy, lengths)
    want = run(build(dtype, "reference"), x.double(), dy.double(), lengths)
    for name, expected in want.items():
        assert_close(have[name], expected, TOLERANCES[dtype], name)


def test_recomputing_the_norm_changes_no_bit() -> None:
    x, dy = inputs(torch.bfloat16, 1)
    plain, again = (run(build(torch.bfloat16, "auto", **c), x, dy, LENGTHS["packed"]) for c in ({}, RECOMPUTE))
    for name, expected in plain.items():
        assert torch.equal(again[name], expected), name


def test_nothing_is_saved_twice() -> None:
    """in_proj's output, what the rule takes, makes and saves, and out_proj's input: no copy besides."""
    layer, (x, _) = build(torch.bfloat16, "auto"), inputs(torch.bfloat16, 1)
    storages: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer(x.requires_grad_(), None)
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()} | {x.untyped_storage().data_ptr()}
    sizes = sorted(size for place, size in storages.items() if place not in own)
    columns = layer.sizes_local
    projected = 2 * TOKENS * sum(columns.projection)
    wide = 2 * TOKENS * columns.value_width
    assert sizes.count(projected) == 1
    assert sum(size == wide for size in sizes) == 3  # v, the rule's output, the norm's output
    assert sum(size == 2 * TOKENS * columns.query_key_width for size in sizes) == 2  # q, k
