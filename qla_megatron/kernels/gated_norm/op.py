"""RMSNorm with a gate: the public function."""

from torch import Tensor

from ..checks import (
    check_bool,
    check_dtype,
    check_number,
    check_same_device,
    check_same_shape,
    check_shape,
    check_shape_ending,
)
from . import reference


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate) over the last dimension; differentiable.

    Computes in float32 (float64 if x is float64) throughout and rounds once. Plain torch on every device.

    Args:
        x: [..., V] in bfloat16, float16, float32 or float64.
        gate: as x; the dtype may differ.
        weight: [V].
        eps: added to the mean square.
        zero_centered: 1 + weight is used, added in float32.

    Returns:
        [..., V] in x's dtype.
    """
    check_shape("weight", weight, V=None)
    check_shape_ending("x", x, V=weight.shape[0])
    check_same_shape("gate", gate, "x", x)
    for name, tensor in (("x", x), ("gate", gate), ("weight", weight)):
        check_dtype(name, tensor)
        check_same_device(name, tensor, "x", x)
    check_number("eps", eps)
    check_bool("zero_centered", zero_centered)
    return reference.gated_rms_norm(x, gate, weight, eps, zero_centered)
