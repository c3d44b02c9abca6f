"""The gated delta rule in torch: outputs, states and every gradient against the token recurrence in float64."""

from itertools import pairwise
from math import exp

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qla_megatron.kernels import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    recurrent_gated_delta_rule,
)
from qla_megatron.testing.inputs import GATES, LAYOUTS, RuleInputs, make_rule_inputs
from qla_megatron.testing.numerics import assert_close, tensor_bits

# float64 is bounded by how gates near -1e4 add up; 16 bits by the rounding of inputs' products, o and gradients.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")


def results(rule, leaves: list[Tensor], cu_seqlens: Tensor | None, seed: int = 1, **options) -> list[Tensor]:
    """o, the final states and the gradients of all leaves under a random loss on both."""
    q, k, v, g, beta, h0 = leaves
    o, state = rule(q, k, v, g, beta, initial_state=h0, cu_seqlens=cu_seqlens, **options)
    generator = torch.Generator().manual_seed(seed)
    do = torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype)
    dht = torch.randn(state.shape, generator=generator, dtype=torch.float64).to(state.dtype)
    # Where no document has a token, the recurrence's outputs depend on nothing.
    ends = [(x, dx) for x, dx in ((o, do), (state, dht)) if x.requires_grad]
    grads = torch.autograd.grad([x for x, _ in ends], leaves, [dx for _, dx in ends], materialize_grads=True)
    return [o, state, *grads]


def chunked(leaves: list[Tensor], cu_seqlens: Tensor | None, **options) -> list[Tensor]:
    return results(chunk_gated_delta_rule, leaves, cu_seqlens, output_final_state=True, **options)


def check_against_recurrence(inputs: RuleInputs, tolerance: float) -> None:
    have = chunked(inputs.leaves(), inputs.cu_seqlens)
    exact = [x.detach().double().requires_grad_() for x in inputs.leaves()]
    want = results(recurrent_gated_delta_rule, exact, inputs.cu_seqlens)
    for name, x, y in zip(NAMES, have, want, strict=True):
        assert_close(name, x, y, tolerance)


def test_oracle_by_hand():
    # One head, K = V = 1: S1 = e^g1 s + b1 k1 (v1 - k1 e^g1 s); decay comes before the error.
    s, k, v, b, g, q = 2.0, (0.5, -1.5), (3.0, 1.0), (0.8, 0.4), (-0.1, -0.7), (1.0, -2.0)
    outputs, state = [], s
    for t in range(2):
        state = exp(g[t]) * state
        state = state + b[t] * k[t] * (v[t] - k[t] * state)
        outputs.append(0.25 * q[t] * state)

    def column(x: tuple[float, float], dims: int) -> Tensor:
        return torch.tensor(x, dtype=torch.float64).view(1, 2, *[1] * dims)

    o, final = recurrent_gated_delta_rule(
        *(column(x, 2) for x in (q, k, v)), column(g, 1), column(b, 1), 0.25, torch.full((1, 1, 1, 1), s).double()
    )
    assert_close("o", o.flatten(), torch.tensor(outputs).double(), 1e-7)
    assert_close("state", final.flatten(), torch.tensor([state]).double(), 1e-7)


def test_oracle_keeps_the_layout_of_an_asymmetric_state():
    # With nothing written, o = scale S^T q: a [V, K] reading of the [K, V] state gives other numbers.
    state = torch.arange(6.0).view(1, 1, 2, 3)
    q = torch.tensor([[[[1.0, 10.0]]]])
    o, _ = recurrent_gated_delta_rule(q, q, torch.zeros(1, 1, 1, 3), *torch.zeros(2, 1, 1, 1), 1.0, state)
    assert o.flatten().tolist() == [30.0, 41.0, 52.0]


@pytest.mark.parametrize("gate", GATES)
def test_every_gate(gate):
    # 200 tokens: full chunks, a ragged one, and a state carried over three borders.
    check_against_recurrence(make_rule_inputs(((0, 200, 215), 220), gate, value_heads=4, key_heads=2), 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout):
    check_against_recurrence(make_rule_inputs(layout, batch=2, offset_dtype=torch.int32), 1e-12)


# One head on one key head; a group of three; sizes that are no power of two.
@pytest.mark.parametrize(("H", "HV", "K", "V"), [(1, 1, 4, 4), (2, 6, 5, 3), (3, 3, 1, 7)])
def test_heads_and_sizes(H, HV, K, V):
    check_against_recurrence(
        make_rule_inputs(((0, 70, 100), 100), key_heads=H, value_heads=HV, key_dim=K, value_dim=V), 1e-12
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("gate", ["logsigmoid", "strong", "spike"])
def test_dtypes(dtype, gate):
    check_against_recurrence(make_rule_inputs(((0, 90, 140), 140), gate, dtype=dtype), TOLERANCES[dtype])


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("gate", ["zero", "logsigmoid"])
def test_equal_keys(beta, gate):
    # The worst inverse: with beta = 2 and no decay its entries don't shrink.
    inputs = make_rule_inputs("a chunk and a token", gate)
    inputs.beta.fill_(beta)
    inputs.k.copy_(inputs.k[:, :1].expand_as(inputs.k).clone())
    check_against_recurrence(inputs, 1e-12)


def test_long_keys_under_strong_decay():
    # Without the gate inside the inverse its entries would pass 1e70 before decay damps them.
    inputs = make_rule_inputs("a chunk and a token", "strong")
    inputs.k.mul_(5)
    check_against_recurrence(inputs, 1e-12)


def test_zero_vectors_and_l2_norm():
    inputs = make_rule_inputs("rows", batch=2)
    inputs.k[:, 3] = 0
    inputs.q[:, 5] = 0
    have = chunked(inputs.leaves(), None, use_qk_l2norm_in_kernel=True)

    def normalised(q: Tensor, k: Tensor, *rest: Tensor, **options) -> tuple[Tensor, Tensor]:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        return recurrent_gated_delta_rule(q, k, *rest, **options)

    for name, x, y in zip(NAMES, have, results(normalised, inputs.leaves(), None), strict=True):
        assert_close(name, x, y, 1e-12)


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_gate_and_sigmoid_inside(allow_neg_eigval):
    inputs = make_rule_inputs(((0, 70, 90), 100), "logsigmoid", value_heads=3)
    parameters = [torch.linspace(*ends, 3, dtype=torch.float64, requires_grad=True) for ends in ((-1, 2), (0.5, -1))]
    loss = torch.randn(inputs.v.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    h0, cu = inputs.initial_state, inputs.cu_seqlens
    leaves = [*inputs.leaves()[:5], *parameters]
    q, k, v, g, beta, A_log, dt_bias = leaves
    switches = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": allow_neg_eigval}
    o, none = chunk_gated_delta_rule(
        q, k, v, g, beta, None, h0, cu_seqlens=cu, A_log=A_log, dt_bias=dt_bias, **switches
    )
    assert none is None
    decay = -A_log.exp() * torch.nn.functional.softplus(g + dt_bias)
    strength = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    p, _ = recurrent_gated_delta_rule(q, k, v, decay, strength, None, h0, cu)
    assert_close("o", o, p, 1e-12)
    for x, y in zip(torch.autograd.grad(o, leaves, loss), torch.autograd.grad(p, leaves, loss), strict=True):
        assert_close("gradient", x, y, 1e-12)


@pytest.mark.parametrize("layout", ["around a chunk", "empty documents", "tail beyond a chunk"])
def test_packed_equals_each_document_alone(layout):
    inputs = make_rule_inputs(layout, "weak")
    packed = chunked(inputs.leaves(), inputs.cu_seqlens)
    offsets = inputs.cu_seqlens.tolist()
    # the same loss, cut at the documents
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(packed[0].shape, generator=generator, dtype=torch.float64)
    dht = torch.randn(packed[1].shape, generator=generator, dtype=torch.float64)
    for n, (start, end) in enumerate(pairwise(offsets)):
        q, k, v, g, beta, h0 = inputs.leaves()
        alone = [x.detach()[:, start:end].requires_grad_() for x in (q, k, v, g, beta)]
        alone.append(h0.detach()[n : n + 1].requires_grad_())
        o, state = chunk_gated_delta_rule(*alone[:5], initial_state=alone[5], output_final_state=True)
        grads = torch.autograd.grad([o, state], alone, [do[:, start:end], dht[n : n + 1]])
        for name, x, y in zip(NAMES, packed, [o, state, *grads], strict=True):
            part = x[n : n + 1] if name in ("final_state", "dinitial_state") else x[:, start:end]
            assert_close(f"{name} of document {n}", part, y, 1e-13)


@pytest.mark.parametrize("layout", ["tail beyond a chunk", "tail of one", "all empty"])
def test_nan_after_the_last_document_reaches_nothing(layout):
    inputs = make_rule_inputs(layout)
    end = int(inputs.cu_seqlens[-1])
    for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta):
        x[:, end:] = float("nan")
    A_log = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    for options in (
        {},
        {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        | {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": A_log},
    ):
        leaves = inputs.leaves()
        have = chunked(leaves, inputs.cu_seqlens, **options)
        for name, x in zip(NAMES, have, strict=True):
            assert x.isfinite().all(), name
            if name not in ("final_state", "dinitial_state"):
                assert (x[:, end:] == 0).all(), name
        o, _ = chunk_gated_delta_rule(*leaves[:5], cu_seqlens=inputs.cu_seqlens, **options)
        if options:
            assert torch.autograd.grad(o.sum(), A_log)[0].isfinite().all()


def test_no_state_is_a_state_of_zeros():
    inputs = make_rule_inputs("around a chunk")
    o, state = chunk_gated_delta_rule(*inputs.leaves()[:5], cu_seqlens=inputs.cu_seqlens, output_final_state=True)
    zeros = torch.zeros_like(inputs.initial_state)
    o0, state0 = chunk_gated_delta_rule(
        *inputs.leaves()[:5], initial_state=zeros, cu_seqlens=inputs.cu_seqlens, output_final_state=True
    )
    assert torch.equal(o, o0)
    assert torch.equal(state, state0)


def test_no_tokens_pass_the_state_on():
    inputs = make_rule_inputs((None, 0), batch=2)
    o, state, *grads = chunked(inputs.leaves(), None)
    assert o.shape == inputs.v.shape
    assert torch.equal(state, inputs.initial_state)
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(grads[-1], torch.randn(state.shape, generator=generator, dtype=torch.float64))


def test_loss_on_the_final_state_alone():
    inputs = make_rule_inputs("rows", batch=2)
    grads = []
    for rule, options in ((chunk_gated_delta_rule, {"output_final_state": True}), (recurrent_gated_delta_rule, {})):
        leaves = inputs.leaves()
        _, state = rule(*leaves[:5], initial_state=leaves[5], **options)
        grads.append(torch.autograd.grad(state.square().sum(), leaves[1:]))
    for name, x, y in zip(NAMES[3:], *grads, strict=True):
        assert_close(name, x, y, 1e-12)
        assert x.abs().sum() > 0, name


def test_a_long_document_equals_its_pieces():
    # Around 2^16 tokens and 2^11 chunks; the cut is no multiple of a chunk.
    inputs = make_rule_inputs((None, 131073), "qwen", value_heads=1, key_dim=4, value_dim=2)
    q, k, v, g, beta, h0 = leaves = inputs.leaves()
    o, state = chunk_gated_delta_rule(q, k, v, g, beta, initial_state=h0, output_final_state=True)
    pieces, carried = [], h0
    for part in (slice(65535), slice(65535, 65537), slice(65537, None)):
        x = (t[:, part] for t in (q, k, v, g, beta))
        piece, carried = chunk_gated_delta_rule(*x, initial_state=carried, output_final_state=True)
        pieces.append(piece)
    assert_close("o", torch.cat(pieces, dim=1), o, 1e-12)
    assert_close("state", carried, state, 1e-12)
    have, want = (
        torch.autograd.grad([p.sum(), s.sum()], leaves) for p, s in ((torch.cat(pieces, 1), carried), (o, state))
    )
    for name, x, y in zip(NAMES[2:], have, want, strict=True):
        assert_close(name, x, y, 1e-11)


def test_state_v_first():
    inputs = make_rule_inputs("rows")
    h0 = inputs.initial_state
    o, state = chunk_gated_delta_rule(*inputs.leaves()[:5], initial_state=h0, output_final_state=True)
    p, turned = chunk_gated_delta_rule(
        *inputs.leaves()[:5], initial_state=h0.mT.contiguous(), output_final_state=True, state_v_first=True
    )
    assert turned.shape == (1, 2, 8, 16)
    assert torch.equal(o, p)
    assert torch.equal(state, turned.mT)


def test_strided_inputs_and_expanded_gradients():
    inputs = make_rule_inputs("rows", batch=2, key_heads=2, value_dim=16)
    fused = torch.cat([inputs.q, inputs.k, inputs.v], dim=2).requires_grad_()
    q, k, v = fused.split(2, dim=2)
    assert not q.is_contiguous()
    g, beta = inputs.g.mT.contiguous().mT, inputs.beta.mT.contiguous().mT
    o, _ = chunk_gated_delta_rule(q, k, v, g, beta)
    p, _ = recurrent_gated_delta_rule(q, k, v, g, beta)
    assert_close("o", o, p, 1e-12)
    (have,), (want,) = (torch.autograd.grad(x.sum(), fused) for x in (o, p))
    assert_close("gradient", have, want, 1e-12)


def test_sixteen_bit_gates_are_summed_in_float32():
    inputs = make_rule_inputs((None, 2000), "weak", dtype=torch.bfloat16)
    g = inputs.g.bfloat16()
    o, state = chunk_gated_delta_rule(inputs.q, inputs.k, inputs.v, g, inputs.beta, output_final_state=True)
    p, exact = chunk_gated_delta_rule(inputs.q, inputs.k, inputs.v, g.float(), inputs.beta, output_final_state=True)
    assert torch.equal(o, p)
    assert torch.equal(state, exact)
    assert state.dtype == torch.float32


def test_gradcheck():
    # float64, a ragged second chunk, grouped heads.
    inputs = make_rule_inputs(((0, 3, 69), 70), key_dim=2, value_dim=2)

    def rule(*leaves: Tensor) -> tuple[Tensor, Tensor | None]:
        return chunk_gated_delta_rule(
            *leaves[:5], initial_state=leaves[5], cu_seqlens=inputs.cu_seqlens, output_final_state=True
        )

    assert torch.autograd.gradcheck(rule, inputs.leaves(), fast_mode=True)


def test_same_bits_every_time_and_under_recompute():
    inputs = make_rule_inputs("around a chunk", dtype=torch.float32)
    first = chunked(inputs.leaves(), inputs.cu_seqlens)
    for _ in range(20):
        for x, y in zip(first, chunked(inputs.leaves(), inputs.cu_seqlens), strict=True):
            assert torch.equal(tensor_bits(x), tensor_bits(y))

    def recomputed(*args: Tensor, **options) -> tuple[Tensor, Tensor]:
        return checkpoint(chunk_gated_delta_rule, *args, use_reentrant=False, output_final_state=True, **options)

    again = results(recomputed, inputs.leaves(), inputs.cu_seqlens)
    for x, y in zip(first, again, strict=True):
        assert torch.equal(tensor_bits(x), tensor_bits(y))


def test_low_level_entries():
    inputs = make_rule_inputs("empty documents", dtype=torch.float32)
    leaves = inputs.leaves()
    want = chunked(leaves, inputs.cu_seqlens)
    options = {"initial_state": leaves[5], "cu_seqlens": inputs.cu_seqlens, "cu_seqlens_cpu": inputs.cu_seqlens}
    o, state, saved = chunk_gated_delta_rule_fwd(*leaves[:5], scale=None, output_final_state=True, plan=None, **options)
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(o.shape, generator=generator, dtype=torch.float64).float()
    dht = torch.randn(state.shape, generator=generator, dtype=torch.float64).float()
    for _ in range(2):  # what was saved may be used again
        d = chunk_gated_delta_rule_bwd(do, dht, saved)
        have = [o, state, d.dq, d.dk, d.dv, d.dg, d.dbeta, d.dinitial_state]
        for x, y in zip(have, want, strict=True):
            assert torch.equal(x, y)
    assert not o.requires_grad
    nothing = chunk_gated_delta_rule_bwd(None, None, saved)
    assert nothing.dk.abs().sum() == 0


def test_autocast_leaves_the_rule_alone():
    inputs = make_rule_inputs("rows", dtype=torch.float32)
    want = chunked(inputs.leaves(), None)
    with torch.autocast("cpu", torch.bfloat16):
        have = chunked(inputs.leaves(), None)
    for x, y in zip(have, want, strict=True):
        assert torch.equal(x, y)
