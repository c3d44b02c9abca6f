"""The torch.library ops: opcheck, and torch.compile without a graph break, forward and backward."""

import pytest
import torch

from qla_megatron.kernels import chunk_gated_delta_rule
from qla_megatron.kernels.gated_delta_rule import chunked
from qla_megatron.kernels.gated_delta_rule.autograd import backward_op, forward_op
from qla_megatron.testing.inputs import make_rule_inputs
from qla_megatron.testing.numerics import assert_close

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")


def test_opcheck():
    inputs = make_rule_inputs("empty documents", dtype=torch.float32, key_dim=4, value_dim=2)
    cu = inputs.cu_seqlens
    leaves = inputs.leaves()
    torch.library.opcheck(forward_op, (*leaves, cu, None, 0.3, "reference", True), test_utils=OPCHECKS)
    with torch.no_grad():
        o, state, *saved = forward_op(*leaves, cu, None, 0.3, "reference", True)
    tensors = [x.detach() for x in leaves[:5]]
    torch.library.opcheck(backward_op, (o, state, *tensors, *saved, cu, None, 0.3, "reference"), test_utils=OPCHECKS)
    torch.library.opcheck(backward_op, (None, state, *tensors, *saved, cu, None, 0.3, "reference"), test_utils=OPCHECKS)


def test_compiles_without_a_graph_break():
    # aot_eager traces forward and backward as every compiler does, and spends no time on code generation.
    A_log, dt_bias = torch.tensor([0.0, 1.0], requires_grad=True), torch.tensor([0.5, -0.5], requires_grad=True)

    def loss(q, k, v, g, beta, h0, cu_seqlens):
        o, state = chunk_gated_delta_rule(
            *(q, k, v, g, beta),
            initial_state=h0,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=A_log,
            dt_bias=dt_bias,
            cu_seqlens=cu_seqlens,
        )
        return o.square().sum() + state.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for layout in (((0, 7, 90), 90), ((0, 50, 70), 90)):  # other offsets of the same size need no other graph
        inputs = make_rule_inputs(layout, dtype=torch.float32)
        grads = []
        for f in (loss, compiled):
            leaves = inputs.leaves()
            grads.append(torch.autograd.grad(f(*leaves, inputs.cu_seqlens), [*leaves, A_log, dt_bias]))
        for x, y in zip(*grads, strict=True):
            assert_close("gradient", x, y, 1e-5)


@pytest.mark.parametrize("layout", ["rows", "empty documents"])
def test_the_way_to_the_kernels_and_back(layout, monkeypatch):
    """With the launchers replaced: shapes, dtypes, contiguity of what they get; fakes agree with results."""
    from qla_megatron.kernels.gated_delta_rule import fused_backward, fused_forward

    batch = 3 if layout == "rows" else 1
    sizes = {"batch": batch, "key_heads": 2, "value_heads": 4, "key_dim": 128, "value_dim": 128}
    x = make_rule_inputs(layout, dtype=torch.bfloat16, **sizes)
    x.g.clamp_(min=-1)
    T, N = x.q.shape[1], len(x.initial_state)

    def forward(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, save):
        assert (q.shape, output_final_state) == (x.q.shape, True)
        kept = chunked.saved_like(k, v, cu_seqlens, "tilelang", True) if save else None
        return torch.zeros_like(v), initial_state.float().clone(), kept

    def backward(do, dht, q, k, v, a, gates, checkpoints, cu_seqlens, scale):
        assert do.shape == v.shape == (batch * T, 4, 128)
        assert q.shape == k.shape == (batch * T, 2, 128)
        assert dht is None or (dht.shape, dht.dtype) == ((N, 4, 128, 128), torch.float32)
        assert a.shape[0] == gates.shape[0] == batch * T // 64 + N
        assert (a.dtype, gates.dtype, checkpoints.dtype) == (torch.bfloat16, torch.float32, torch.float32)
        assert checkpoints.shape[0] == len(a) // 16 + N
        assert (cu_seqlens.dtype, cu_seqlens[0], len(cu_seqlens)) == (torch.int32, 0, N + 1)
        assert all(t.is_contiguous() for t in (do, q, k, v, a, gates, checkpoints, cu_seqlens))
        dg, dbeta = (torch.zeros(batch * T, 4) for _ in range(2))
        state = torch.zeros(N, 4, 128, 128) if dht is None else dht.clone()
        return torch.ones_like(q), torch.ones_like(k), do.clone(), dg, dbeta, state

    monkeypatch.setattr(fused_forward, "fused_forward", forward)
    monkeypatch.setattr(fused_backward, "fused_backward", backward)
    leaves = x.leaves()
    arguments = (*leaves, x.cu_seqlens, None, 0.3, "tilelang", True)
    torch.library.opcheck(forward_op, arguments, test_utils=OPCHECKS[:3])
    o, state, *_ = forward_op(*arguments)
    weights = torch.randn_like(o).transpose(1, 2).contiguous().transpose(1, 2)
    grads = torch.autograd.grad([o, state], leaves, [weights, torch.ones_like(state)])
    assert [(g.shape, g.dtype) for g in grads] == [(leaf.shape, leaf.dtype) for leaf in leaves]
    assert torch.equal(grads[2], weights)
    with torch.no_grad():
        assert [len(t) for t in forward_op(*leaves, x.cu_seqlens, None, 0.3, "tilelang", False)[2:]] == [0, 0, 0]
