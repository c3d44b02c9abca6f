"""The torch.library ops of the fused kernels: nothing is saved but the inputs; which gradients exist.

Both ops have fakes, so that torch.compile passes through without a graph break. Neither is meant to be called directly.
"""

from typing import Any

import torch
from torch import Tensor

from ..rows import HEAD_DIM


@torch.library.custom_op("qla_megatron::convolve_projection_fwd", mutates_args=())
def forward_op(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    key_heads: int,
    value_heads: int,
    is_silu: bool,
    l2norm_eps: float | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g, beta, the final states (of no elements unless asked for), and the room for a gradient.

    `projected` is [T, B, P]. The room has its shape and no memory of its own; see op.py.
    """
    from .convolve import convolve  # TileLang takes seconds to import, which a CPU run should not spend
    from .problem import Problem, last_inputs

    p = Problem(
        projected, weight, bias, A_log, dt_bias, initial_state, cu_seqlens, key_heads, value_heads, is_silu, l2norm_eps
    )
    q, k, v, g, beta = convolve(p)
    final_state = last_inputs(p) if output_final_state else projected.new_empty(0)
    return q, k, v, g, beta, final_state, projected.new_empty(1).expand(projected.shape)


@forward_op.register_fake
def _(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    key_heads: int,
    value_heads: int,
    is_silu: bool,
    l2norm_eps: float | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    T, B, _ = projected.shape
    q, k, v = (projected.new_empty(B, T, heads, HEAD_DIM) for heads in (key_heads, key_heads, value_heads))
    gate_heads = 0 if A_log is None else value_heads
    g, beta = (projected.new_empty(B, T, gate_heads, dtype=torch.float32) for _ in range(2))
    documents = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (documents, weight.shape[0], weight.shape[1] - 1) if output_final_state else (0,)
    return q, k, v, g, beta, projected.new_empty(state), projected.new_empty(1).expand(projected.shape)


@torch.library.custom_op("qla_megatron::convolve_projection_bwd", mutates_args=("dprojected",))
def backward_op(
    dprojected: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dg: Tensor,
    dbeta: Tensor,
    dfinal: Tensor | None,
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    key_heads: int,
    value_heads: int,
    is_silu: bool,
    l2norm_eps: float | None,
    needs_dstate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write `dprojected` but for the columns of z; the gradients of weight, bias, gates and states.

    See `convolve_backward`.
    """
    from .convolve_backward import convolve_backward
    from .problem import Problem

    p = Problem(
        projected, weight, bias, A_log, dt_bias, initial_state, cu_seqlens, key_heads, value_heads, is_silu, l2norm_eps
    )
    return convolve_backward(p, dq, dk, dv, dg, dbeta, dfinal, dprojected, needs_dstate)


@backward_op.register_fake
def _(
    dprojected: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dg: Tensor,
    dbeta: Tensor,
    dfinal: Tensor | None,
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    key_heads: int,
    value_heads: int,
    is_silu: bool,
    l2norm_eps: float | None,
    needs_dstate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    D, W = weight.shape
    gate_heads = 0 if A_log is None else value_heads
    documents = dv.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    weight_dtype = weight.dtype if weight.dtype == projected.dtype else torch.float32
    dweight, dbias = (dv.new_empty(size, dtype=weight_dtype) for size in ((D, W), (0 if bias is None else D,)))
    dgates = dv.new_empty(2, gate_heads, dtype=torch.float32)
    return dweight, dbias, dgates, dv.new_empty(documents if needs_dstate else 0, D, W - 1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, settings = inputs[:7], inputs[7:11]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.settings, ctx.has_final_state = settings, inputs[11]
    ctx.shapes = [x.shape for x in output[:5]]


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    projected, weight, _, A_log, *_ = ctx.saved_tensors
    *results, dfinal, droom = grads
    dtypes = (projected.dtype,) * 3 + (torch.float32,) * 2
    results = [
        projected.new_zeros(shape, dtype=dtype) if d is None else d
        for d, shape, dtype in zip(results, ctx.shapes, dtypes, strict=True)
    ]
    dprojected = torch.empty_like(projected) if droom is None else droom.contiguous()
    if droom is None and A_log is not None:
        channels, z = weight.shape[0], ctx.settings[1] * HEAD_DIM
        dprojected[..., channels : channels + z] = 0
    dweight, dbias, dgates, dstate = backward_op(
        dprojected,
        *results,
        dfinal if ctx.has_final_state else None,
        *ctx.saved_tensors,
        *ctx.settings,
        ctx.needs_input_grad[5],
    )
    dparameters = (
        None if x is None else dx.to(x.dtype)
        for x, dx in zip(ctx.saved_tensors[1:6], (dweight, dbias, *dgates.unbind(), dstate), strict=True)
    )
    return dprojected, *dparameters, *(None,) * 6


forward_op.register_autograd(_backward, setup_context=_save)
