"""How far a result is from its reference, and where it first leaves it."""

import torch
from torch import Tensor


def relative_error(result: Tensor, reference: Tensor) -> float:
    """|result - reference| / |reference| in the L2 norm, in float64; NaN where the result has one.

    Where the reference is 0 everywhere, the norm of the result.
    """
    if result.shape != reference.shape:
        raise ValueError(
            f"result must have the shape of reference, {tuple(reference.shape)}, got {tuple(result.shape)}"
        )
    wide = reference.detach().double().cpu()
    distance = (result.detach().double().cpu() - wide).norm()
    norm = wide.norm()
    return (distance / norm if norm > 0 else distance).item()


def first_wrong(result: Tensor, reference: Tensor, tolerance: float) -> str:
    """The first element that is off by more than `tolerance` times the reference's largest, or an empty string."""
    have, want = result.detach().double().cpu(), reference.detach().double().cpu()
    if want.numel() == 0:
        return ""
    is_right = (have - want).abs() <= tolerance * want.abs().max()  # false for NaN too
    if bool(is_right.all()):
        return ""
    place = tuple((~is_right).nonzero()[0].tolist())
    count = int((~is_right).sum())
    return f"{count} of {want.numel()} elements, first at {place}: got {have[place]:.6g}, expected {want[place]:.6g}"


def assert_close(name: str, result: Tensor, reference: Tensor, tolerance: float) -> None:
    """Demand a relative L2 error of at most `tolerance`."""
    error = relative_error(result, reference)
    if not error <= tolerance:
        raise AssertionError(
            f"{name}: relative error {error:.3g} > {tolerance:.3g}; {first_wrong(result, reference, tolerance)}"
        )


def tensor_bits(x: Tensor) -> Tensor:
    """The memory of a tensor as bytes, for bitwise comparison."""
    return x.detach().contiguous().view(torch.uint8)
