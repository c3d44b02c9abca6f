"""The fused backward against the float64 reference, on a GPU: gates, layouts, groups, tails, segments, repetition."""

from functools import partial

import pytest
import torch

from qla_megatron.kernels.gated_delta_rule import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    chunked,
)
from qla_megatron.testing.inputs import GATES, LAYOUTS, RuleInputs, make_rule_inputs
from qla_megatron.testing.numerics import assert_close

pytestmark = pytest.mark.gpu

# Relative L2 errors: a few units in the last place of bfloat16 (2^-9) or float16 (2^-12), through a chain of products.
TOLERANCES = {torch.bfloat16: 7e-3, torch.float16: 1.2e-3}
NAMES = ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
SCALE = 128**-0.5


def make(layout, gate="logsigmoid", *, heads=(2, 4), batch=1, dtype=torch.bfloat16) -> RuleInputs:
    sizes = {"batch": batch, "key_heads": heads[0], "value_heads": heads[1], "key_dim": 128, "value_dim": 128}
    return make_rule_inputs(layout, gate, **sizes, dtype=dtype, device="cuda")


def gradients_of_results(x: RuleInputs) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(5)
    do = torch.randn(x.v.shape, device="cuda", generator=generator).to(x.v.dtype)
    return do, torch.randn(x.initial_state.shape, device="cuda", generator=generator) / 8


def fused(x: RuleInputs, do, dht):
    _, _, saved = chunk_gated_delta_rule_fwd(
        x.q, x.k, x.v, x.g, x.beta, scale=SCALE, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens
    )
    assert saved.backend == "tilelang"
    got = chunk_gated_delta_rule_bwd(do, dht, saved)
    return [getattr(got, name) for name in NAMES]


def reference(x: RuleInputs, do, dht):
    inputs = [t.double() for t in (x.q, x.k, x.v, x.g, x.beta)]
    *_, inverses, gates, states = chunked.forward(
        *inputs, x.initial_state.double(), x.cu_seqlens, None, SCALE, "reference", True
    )
    do, dht = (None if t is None else t.double() for t in (do, dht))
    return chunked.backward(do, dht, *inputs, inverses, gates, states, x.cu_seqlens, None, SCALE, "reference")


def check(x: RuleInputs, do=None, dht=None) -> None:
    if do is None and dht is None:
        do, dht = gradients_of_results(x)
    for name, got, want in zip(NAMES, fused(x, do, dht), reference(x, do, dht), strict=True):
        assert_close(name, got, want, TOLERANCES[x.v.dtype])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    check(make(layout, batch=3 if layout == "rows" else 1))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("gate", GATES)
def test_gates(gate, dtype):
    check(make(((0, 300, 377), 377), gate, dtype=dtype))


@pytest.mark.parametrize("heads", [(16, 64), (2, 8), (1, 16), (2, 6), (4, 12), (3, 3), (1, 1)])
def test_groups(heads):
    check(make(((0, 70, 200), 200), heads=heads))


@pytest.mark.parametrize("heads", [(1, 2), (16, 64)])
def test_long_document(heads):
    # Pieces of 16 chunks, a ragged last one; with 64 heads whole tiles of the serial pass.
    check(make(((0, 2100, 2100, 4200), 4200), heads=heads))


@pytest.mark.parametrize("size", [16, 32])
def test_segments(size, monkeypatch):
    # Documents that lie in one segment, cross two, and span three; the workspace of one segment alone is there.
    from qla_megatron.kernels.gated_delta_rule import fused_backward

    monkeypatch.setattr(fused_backward, "WORKSPACE", size * 2 * 4 * 128 * (2 * 128 + 64))
    x = make(((0, 500, 1500, 1500, 4500), 4600))
    assert len(fused_backward.segments(4600 // 64 + 4, 4)) > 1
    check(x)


def test_loss_on_the_final_state_alone():
    x = make("around a chunk")
    check(x, None, gradients_of_results(x)[1])


def test_loss_on_the_outputs_alone():
    x = make("around a chunk")
    check(x, gradients_of_results(x)[0], None)


def test_strengths_of_zero():
    # dbeta is not 0 where beta is.
    x = make(((0, 150), 150), "weak")
    x.beta[:, ::3] = 0
    check(x)


def test_gradients_of_the_outputs_with_strides():
    x = make("rows", batch=2)
    do, dht = gradients_of_results(x)
    strided = do.transpose(1, 2).contiguous().transpose(1, 2)
    for a, b in zip(fused(x, strided, dht), fused(x, do, dht), strict=True):
        assert torch.equal(a, b)


def test_tail_is_zero_whatever_it_holds():
    x, clean = (make(((0, 73, 115), 300)) for _ in range(2))
    do, dht = gradients_of_results(x)
    want = fused(clean, do, dht)
    do = do.clone()
    for t in (x.q, x.k, x.v, x.g, x.beta, do):
        t[:, 115:] = float("nan")
    poison = [torch.full((1 << 24,), float("nan"), device="cuda") for _ in range(3)]
    del poison  # for the results and the workspace to be allocated on
    for a, b in zip(fused(x, do, dht), want, strict=True):
        assert torch.equal(a, b)
    assert all(bool((t[:, 115:] == 0).all()) for t in want[:5])


def test_same_bits_every_time():
    x = make(((0, 300, 1000), 1000), heads=(2, 8))
    given = gradients_of_results(x)
    first = fused(x, *given)
    for _ in range(1000):
        for a, b in zip(fused(x, *given), first, strict=True):
            assert torch.equal(a, b)


def test_graph_replay_with_other_offsets():
    x = make(((0, 100, 300), 300))
    given = gradients_of_results(x)
    fused(x, *given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fused(x, *given)
    x.cu_seqlens.copy_(torch.tensor([0, 217, 281]))
    graph.replay()
    for a, b in zip(got, fused(x, *given), strict=True):
        assert torch.equal(a, b)


def test_no_tokens():
    x = make(((0, 0, 0), 0))
    do, dht = gradients_of_results(x)
    assert torch.equal(fused(x, do, dht)[-1], dht)


def test_through_autograd():
    # Norm, sigmoid and gate in torch around the op; recomputed under checkpointing to the same bits.
    x = make("empty documents")
    A_log, dt_bias = (torch.randn(4, device="cuda", requires_grad=True) for _ in range(2))
    leaves = [*x.leaves(), A_log, dt_bias]

    def run(q, k, v, g, beta, initial_state, A_log, dt_bias, backend="auto"):
        return chunk_gated_delta_rule(
            *(q, k, v, g, beta),
            initial_state=initial_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=A_log,
            dt_bias=dt_bias,
            cu_seqlens=x.cu_seqlens,
            backend=backend,
        )

    def gradients(call, leaves):
        o, state = call(*leaves)
        return torch.autograd.grad((o.float().square().sum() + state.square().sum()), leaves)

    def checkpointed(*leaves):
        return torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=False)

    got = gradients(run, leaves)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want = gradients(partial(run, backend="reference"), wide)
    for name, a, b in zip([*NAMES, "dA_log", "ddt_bias"], got, want, strict=True):
        assert_close(name, a, b, 2e-2)
    for a, b in zip(gradients(checkpointed, leaves), got, strict=True):
        assert torch.equal(a, b)
