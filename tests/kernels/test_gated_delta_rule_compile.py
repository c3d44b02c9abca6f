"""The torch.library ops: opcheck, and torch.compile without a graph break, forward and backward."""

import torch

from qla_megatron.kernels import chunk_gated_delta_rule
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
