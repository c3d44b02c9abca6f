"""The fused forward against the float64 reference, on a GPU: gates, layouts, groups, tails, repetition."""

import math
from itertools import pairwise

import pytest
import torch

from qla_megatron.kernels.gated_delta_rule import chunk_gated_delta_rule, chunked
from qla_megatron.testing.inputs import GATES, LAYOUTS, RuleInputs, make_rule_inputs
from qla_megatron.testing.numerics import assert_close

pytestmark = pytest.mark.gpu

# Relative L2 errors. Products of 16-bit operands with float32 sums: a few units in the last place of bfloat16 (2^-9)
# or float16 (2^-12).
TOLERANCES = {torch.bfloat16: 6e-3, torch.float16: 9e-4}
SCALE = 128**-0.5


def make(layout, gate="logsigmoid", *, heads=(2, 4), batch=1, dtype=torch.bfloat16, seed=0) -> RuleInputs:
    return make_rule_inputs(
        layout,
        gate,
        batch=batch,
        key_heads=heads[0],
        value_heads=heads[1],
        key_dim=128,
        value_dim=128,
        dtype=dtype,
        device="cuda",
        seed=seed,
    )


def fused(x: RuleInputs, block_v=None, initial_state=True, output_final_state=True):
    return fused_and_saved(x, block_v, initial_state, output_final_state, save=False)[:2]


def fused_and_saved(x: RuleInputs, block_v=None, initial_state=True, output_final_state=True, save=True):
    from qla_megatron.kernels.gated_delta_rule.fused_forward import fused_forward

    state = x.initial_state if initial_state else None
    return fused_forward(x.q, x.k, x.v, x.g, x.beta, SCALE, state, output_final_state, x.cu_seqlens, block_v, save)


def reference(x: RuleInputs, initial_state=True):
    inputs = (t.double() for t in (x.q, x.k, x.v, x.g, x.beta))
    state = x.initial_state.double() if initial_state else None
    return chunked.forward(*inputs, state, x.cu_seqlens, None, SCALE, "reference", False)[:2]


def check(x: RuleInputs, block_v=None, initial_state=True) -> None:
    o, state = fused(x, block_v, initial_state)
    want_o, want_state = reference(x, initial_state)
    tolerance = TOLERANCES[x.v.dtype]
    assert_close("o", o, want_o, tolerance)
    assert_close("final_state", state, want_state, tolerance)


@pytest.mark.parametrize("block_v", [64, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, block_v):
    check(make(layout, batch=3 if layout == "rows" else 1), block_v)


@pytest.mark.parametrize("block_v", [64, 128])
@pytest.mark.parametrize("gate", GATES)
def test_gates(gate, block_v):
    check(make(((0, 300, 377), 377), gate), block_v)


# Groups of 4 and 16, uneven against the four heads of a preparation block (3), one head a key, fewer heads than a
# block.
@pytest.mark.parametrize("heads", [(16, 64), (2, 8), (1, 16), (2, 6), (4, 12), (3, 3), (5, 5), (1, 1)])
def test_groups(heads):
    check(make(((0, 70, 200), 200), heads=heads))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_long_document(dtype):
    # Longer than the stages of the pipeline many times over; no initial state.
    check(make(((0, 4000, 4096), 4096), heads=(1, 2), dtype=dtype), initial_state=False)


@pytest.mark.parametrize("block_v", [64, 128])
def test_what_is_saved(block_v):
    # Documents of 2, 17 and 34 chunks: none, one and two kept states beyond the initial one; strengths of exactly 0.
    x = make(((0, 65, 65, 1145, 3300), 3300), heads=(1, 3))
    x.beta[:, ::7] = 0
    o, state, (a, gates, checkpoints) = fused_and_saved(x, block_v)
    want_o, want_state = fused(x, block_v)
    assert torch.equal(o, want_o)
    assert torch.equal(state, want_state)
    offsets = x.cu_seqlens.tolist()
    for n, (start, end) in enumerate(pairwise(offsets)):
        slot0 = start // 64 + n
        for i, first in enumerate(range(start, end, 64)):
            part = slice(first, min(first + 64, end))
            length = part.stop - part.start
            k = x.k[0, part].double().repeat_interleave(3, 1).transpose(0, 1)
            beta, sums = (t.T for t in (x.beta[0, part].double(), x.g[0, part].double().cumsum(0)))
            L = ((k @ k.mT) * (sums[:, :, None] - sums[:, None]).tril().exp()).tril(-1) * beta[:, None]
            inverse = torch.linalg.inv(torch.eye(length, device="cuda", dtype=torch.float64) + L)
            assert_close("a", a[slot0 + i, :, :length, :length], inverse, TOLERANCES[torch.bfloat16])
            assert_close("sums", gates[slot0 + i, :, 0, :length], sums / math.log(2), 1e-6)
            assert torch.equal(gates[slot0 + i, :, 1, :length], x.beta[0, part].T)
            assert bool((gates[slot0 + i, :, 1, length:] == 0).all())
            if i % 16 == 0:
                kept = checkpoints[slot0 // 16 + n + i // 16].mT
                tensors = (t[:, start:first] for t in (x.q, x.k, x.v, x.g, x.beta))
                before = RuleInputs(*tensors, x.initial_state[n : n + 1], cu_seqlens=None)
                want = reference(before)[1] if i else before.initial_state
                assert_close("checkpoint", kept, want[0], TOLERANCES[torch.bfloat16] if i else 0)


def test_keys_that_are_not_normalised():
    x = make(((0, 150), 150), "strong")
    x.k.mul_(8)
    x.q.mul_(8)
    check(x)


def test_equal_keys():
    # The worst triangle: with beta near 1 its inverse alternates in sign.
    x = make(((0, 150), 150), "zero")
    x.k.copy_(x.k[:, :1].expand_as(x.k))
    x.beta.fill_(1)
    check(x)


def test_tail_is_zero_whatever_it_holds():
    x = make(((0, 73, 115), 300))
    for t in (x.q, x.k, x.v, x.g, x.beta):
        t[:, 115:] = float("nan")
    clean = make(((0, 73, 115), 300))
    torch.full_like(x.v, float("nan"))  # poison for the output to be allocated on
    o, state = fused(x)
    assert bool((o[:, 115:] == 0).all())
    want_o, want_state = fused(clean)
    assert torch.equal(o, want_o)
    assert torch.equal(state, want_state)


def test_documents_are_independent():
    x = make(((0, 70, 70, 333), 333))
    o, state = fused(x, 128)
    for n, (start, end) in enumerate([(0, 70), (70, 70), (70, 333)]):
        part = slice(start, end)
        if start == end:
            assert torch.equal(state[n], x.initial_state[n])
            continue
        alone = RuleInputs(
            *(t[:, part] for t in (x.q, x.k, x.v, x.g, x.beta)), x.initial_state[n : n + 1], cu_seqlens=None
        )
        want_o, want_state = fused(alone, 128)
        assert torch.equal(o[:, part], want_o)
        assert torch.equal(state[n : n + 1], want_state)


def test_same_bits_every_time():
    x = make(((0, 300, 1000), 1000), heads=(2, 8))
    o, state = fused(x)
    for _ in range(1000):
        again_o, again_state = fused(x)
        assert torch.equal(o, again_o)
        assert torch.equal(state, again_state)


def test_two_streams():
    # Nothing is shared between calls: the same bits beside another call as alone.
    xs = [make(((0, 900, 3000), 3000), heads=(2, 8), seed=seed) for seed in (0, 1)]
    want = [fused(x) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    for _ in range(20):
        got = []
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(fused(x))
        torch.cuda.synchronize()
        for (o, state), (want_o, want_state) in zip(got, want, strict=True):
            assert torch.equal(o, want_o)
            assert torch.equal(state, want_state)


def test_offsets_beyond_32_bits():
    # v has 2^31 elements: the last document, which lies past them, as it is alone.
    tokens, heads, start = 2**18, (2, 64), 2**18 - 300
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", dtype=dtype, generator=generator)

    q, k = (torch.nn.functional.normalize(normal(1, tokens, heads[0], 128), dim=-1) for _ in range(2))
    v, g = normal(1, tokens, heads[1], 128), -normal(1, tokens, heads[1], dtype=torch.float32).abs()
    beta = normal(1, tokens, heads[1], dtype=torch.float32).sigmoid()
    h0 = normal(2, heads[1], 128, 128, dtype=torch.float32)
    x = RuleInputs(q, k, v, g, beta, h0, torch.tensor([0, start, tokens], device="cuda"))
    o, state = fused(x, 128)
    alone = RuleInputs(*(t[:, start:] for t in (q, k, v, g, beta)), h0[1:], cu_seqlens=None)
    want_o, want_state = fused(alone, 128)
    assert torch.equal(o[:, start:], want_o)
    assert torch.equal(state[1:], want_state)


def test_graph_replay_with_other_offsets():
    x = make(((0, 100, 300), 300))
    fused(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = fused(x)
    x.cu_seqlens.copy_(torch.tensor([0, 217, 281]))
    graph.replay()
    want_o, want_state = reference(x)
    assert_close("o", o, want_o, TOLERANCES[torch.bfloat16])
    assert_close("final_state", state, want_state, TOLERANCES[torch.bfloat16])


def test_no_tokens():
    x = make(((0, 0, 0), 0))
    o, state = fused(x)
    assert o.shape == x.v.shape
    assert torch.equal(state, x.initial_state)


def test_refuses_what_it_does_not_serve():
    x = make("rows")
    with pytest.raises(NotImplementedError, match="K = V = 128"):
        fused(RuleInputs(x.q, x.k, x.v[..., :64], x.g, x.beta, x.initial_state[..., :64], None))
    with pytest.raises(NotImplementedError, match="bfloat16 or float16"):
        fused(RuleInputs(x.q.float(), x.k.float(), x.v.float(), x.g, x.beta, x.initial_state, None))


def test_the_public_op_takes_the_kernels():
    x = make("empty documents")
    arguments = (x.q, x.k, x.v, x.g, x.beta, SCALE, x.initial_state, True)
    with torch.no_grad():
        o, state = chunk_gated_delta_rule(*arguments, cu_seqlens=x.cu_seqlens)
    want_o, want_state = fused(x)
    assert torch.equal(o, want_o)
    assert torch.equal(state, want_state)
