"""The torch.library ops of the fused norm: nothing is saved but the inputs; which gradients exist.

Both ops have fakes, so that torch.compile passes through without a graph break. Neither is meant to be called directly.
"""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("qla_megatron::gated_rms_norm_fwd", mutates_args=())
def forward_op(
    x: Tensor, gate: Tensor, weight: Tensor, room: Tensor | None, room_column: int, eps: float, zero_centered: bool
) -> Tensor:
    """The result, [B, T, HV, 128] as x; with a room, tokens come first in memory, as there."""
    from .normalise import normalise  # TileLang takes seconds to import, which a CPU run should not spend

    y = _result_like(x, room)
    normalise(x, gate, weight, eps, zero_centered, y)
    return y


@forward_op.register_fake
def _(
    x: Tensor, gate: Tensor, weight: Tensor, room: Tensor | None, room_column: int, eps: float, zero_centered: bool
) -> Tensor:
    return _result_like(x, room)


@torch.library.custom_op("qla_megatron::gated_rms_norm_bwd", mutates_args=("dgate",))
def backward_op(
    dgate: Tensor, dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Write `dgate`; the gradients of x, and of the weight in float32."""
    from .normalise import normalise_backward

    dx = x.new_empty(x.shape)
    return dx, normalise_backward(dy, x, gate, weight, eps, zero_centered, dx, dgate)


@backward_op.register_fake
def _(
    dgate: Tensor, dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=torch.float32)


def _result_like(x: Tensor, room: Tensor | None) -> Tensor:
    B, T, heads, width = x.shape
    return x.new_empty(x.shape) if room is None else x.new_empty(T, B, heads, width).transpose(0, 1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, gate, weight, room, room_column, eps, zero_centered = inputs
    ctx.save_for_backward(x, gate, weight)
    ctx.room_shape, ctx.room_column = None if room is None else room.shape, room_column
    ctx.settings = eps, zero_centered


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, gate, weight = ctx.saved_tensors
    heads, width = x.shape[2:]
    droom = None
    if ctx.room_shape is None:
        dgate = gate.new_empty(gate.shape)
    else:
        droom = gate.new_empty(ctx.room_shape)
        column = ctx.room_column
        dgate = droom.transpose(0, 1)[..., column : column + heads * width].unflatten(-1, (heads, width))
    if dy.stride(3) != 1 or dy.stride(2) != width:
        dy = dy.contiguous()
    dx, dweight = backward_op(dgate, dy, x, gate, weight, *ctx.settings)
    return dx, dgate if droom is None else None, dweight.to(weight.dtype), droom, None, None, None


forward_op.register_autograd(_backward, setup_context=_save)
