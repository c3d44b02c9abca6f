"""RMSNorm with a gate: the public function."""

import torch
from torch import Tensor

from ..backend import BACKENDS, choose_backend
from ..checks import (
    check_bool,
    check_choice,
    check_dtype,
    check_number,
    check_same_device,
    check_same_shape,
    check_shape,
    check_shape_ending,
)
from ..rows import DTYPES, HEAD_DIM
from . import reference
from .autograd import forward_op


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    zero_centered: bool = False,
    *,
    room: Tensor | None = None,
    room_column: int = 0,
    backend: str = "auto",
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate) over the last dimension; differentiable, deterministic.

    Computes in float32 (float64 if x is float64) throughout and rounds once.

    Args:
        x: [..., V] in bfloat16, float16, float32 or float64.
        gate: as x; the dtype may differ. It may be a view into a wider tensor: the kernels read it where it lies.
        weight: [V].
        eps: added to the mean square.
        zero_centered: 1 + weight is used, added in float32.
        room: [T, B, P], from `convolve_projection`, x being [B, T, HV, V]: the gate's gradient is written into it from
            column `room_column` on, and no other gradient of the gate is returned. The result then lies in memory in
            the order [T, B, HV, V]. Only for the kernels.
        backend: "reference" (plain torch, any device), "tilelang" (kernels for Hopper: V = 128, x and gate both
            bfloat16 or both float16), or "auto": the reference for CPU tensors, the kernels for CUDA tensors. No
            backend stands in for another.

    Returns:
        [..., V] in x's dtype.

    Raises:
        ValueError: a shape, device or value doesn't fit. TypeError: a type or dtype doesn't fit.
        NotImplementedError: what the backend doesn't serve.
    """
    check_shape("weight", weight, V=None)
    check_shape_ending("x", x, V=weight.shape[0])
    check_same_shape("gate", gate, "x", x)
    for name, tensor in (("x", x), ("gate", gate), ("weight", weight)):
        check_dtype(name, tensor)
        check_same_device(name, tensor, "x", x)
    check_number("eps", eps)
    check_bool("zero_centered", zero_centered)
    check_choice("backend", backend, BACKENDS)
    if choose_backend(backend, x.device) == "reference":
        if room is not None:
            raise ValueError("room must be None for the reference, which returns the gate's gradient itself")
        return reference.gated_rms_norm(x, gate, weight, eps, zero_centered)
    _check_supported(x, gate)
    if room is not None:
        _check_room(room, room_column, x)
    rows, gates = (t if t.dim() == 4 else t.reshape(1, -1, 1, HEAD_DIM) for t in (x, gate))
    return forward_op(_dense(rows), _dense(gates), weight, room, room_column, eps, zero_centered).view(x.shape)


def _check_supported(x: Tensor, gate: Tensor) -> None:
    if x.shape[-1] != HEAD_DIM:
        raise NotImplementedError(
            f'the fused norm takes V = {HEAD_DIM}, got V = {x.shape[-1]}; backend="reference" takes any'
        )
    if x.dtype not in DTYPES or gate.dtype != x.dtype:
        raise NotImplementedError(
            "the fused norm takes x and gate both in bfloat16 or both in float16, "
            f'got {x.dtype} and {gate.dtype}; backend="reference" takes them'
        )


def _check_room(room: Tensor, column: int, x: Tensor) -> None:
    if x.dim() != 4:
        raise ValueError(f"x must have shape [B, T, HV, V] with a room, got {tuple(x.shape)}")
    B, T, heads, width = x.shape
    check_shape("room", room, T=T, B=B, P=None)
    check_dtype("room", room, (x.dtype,))
    if not 0 <= column <= room.shape[2] - heads * width:
        raise ValueError(f"room_column must leave {heads * width} of the room's {room.shape[2]} columns, got {column}")


def _dense(x: Tensor) -> Tensor:
    """[B, T, HV, 128] with whole rows of heads, copied if need be."""
    return x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous(memory_format=torch.contiguous_format)
