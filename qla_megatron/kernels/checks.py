"""Argument errors of every op: what is named, what was expected, what came.

ValueError for a shape or a value, TypeError for a type or dtype; NotImplementedError, for what is valid but
unsupported, is raised where the support ends.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OFFSET_DTYPES = (torch.int32, torch.int64)


def check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def check_shape(name: str, x: Any, **sizes: int | None) -> None:
    """Demand a tensor of as many dimensions as `sizes` has, in that order; a size of None may be anything."""
    check_tensor(name, x)
    fits = x.dim() == len(sizes) and all(
        want is None or have == want for have, want in zip(x.shape, sizes.values(), strict=True)
    )
    if not fits:
        known = ", ".join(f"{letter}={size}" for letter, size in sizes.items() if size is not None)
        raise ValueError(
            f"{name} must have shape [{', '.join(sizes)}]{' with ' + known if known else ''}, got {tuple(x.shape)}"
        )


def check_shape_ending(name: str, x: Any, **sizes: int) -> None:
    """Demand a tensor whose last dimensions have these sizes, whatever goes before."""
    check_tensor(name, x)
    if tuple(x.shape[x.dim() - len(sizes) :]) != tuple(sizes.values()) or x.dim() < len(sizes):
        known = ", ".join(f"{letter}={size}" for letter, size in sizes.items())
        raise ValueError(f"{name} must have shape [..., {', '.join(sizes)}] with {known}, got {tuple(x.shape)}")


def check_same_shape(name: str, x: Any, other_name: str, other: Tensor) -> None:
    check_tensor(name, x)
    if x.shape != other.shape:
        raise ValueError(f"{name} must have the shape of {other_name}, {tuple(other.shape)}, got {tuple(x.shape)}")


def check_dtype(name: str, x: Tensor, allowed: Sequence[torch.dtype] = FLOAT_DTYPES) -> None:
    if x.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name} must be {names}, got {str(x.dtype).removeprefix('torch.')}")


def check_same_dtype(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.dtype != other.dtype:
        raise TypeError(f"{name} must have the dtype of {other_name}, {other.dtype}, got {x.dtype}")


def check_same_device(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.device != other.device:
        raise ValueError(f"{name} must be on the device of {other_name}, {other.device}, got {x.device}")


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")


def check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")


def check_heads(key_heads: int, value_heads: int) -> None:
    if key_heads == 0 or value_heads == 0 or value_heads % key_heads:
        raise ValueError(
            f"v's heads must be a positive multiple of the heads of q and k, got HV={value_heads} and H={key_heads}"
        )


def check_offsets(cu_seqlens: Any, batch: int, near_name: str, near: Tensor, cu_seqlens_cpu: Any = None) -> None:
    """What can be told about document offsets without reading them; `check_offset_values` does the rest."""
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            raise ValueError("cu_seqlens_cpu is the host copy of cu_seqlens and must come with it, got cu_seqlens=None")
        return
    check_shape("cu_seqlens", cu_seqlens, **{"N+1": None})
    check_dtype("cu_seqlens", cu_seqlens, OFFSET_DTYPES)
    check_same_device("cu_seqlens", cu_seqlens, near_name, near)
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must hold N+1 offsets of N >= 1 documents, got {cu_seqlens.shape[0]}")
    if batch != 1:
        raise ValueError(f"cu_seqlens needs documents packed into one row: {near_name} must have B=1, got B={batch}")
    if cu_seqlens_cpu is not None:
        check_shape("cu_seqlens_cpu", cu_seqlens_cpu, **{"N+1": cu_seqlens.shape[0]})
        check_dtype("cu_seqlens_cpu", cu_seqlens_cpu, OFFSET_DTYPES)
        if cu_seqlens_cpu.device.type != "cpu":
            raise ValueError(f"cu_seqlens_cpu must be on the CPU, got {cu_seqlens_cpu.device}")


def check_offset_values(offsets: Sequence[int], tokens: int) -> None:
    """Demand offsets that start at 0, never decrease and end within the tokens that there are."""
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {offsets[0]}")
    for n, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            raise ValueError(f"cu_seqlens must not decrease, got {start} then {end} at document {n}")
    if offsets[-1] > tokens:
        raise ValueError(f"cu_seqlens must end at or before T={tokens}, got {offsets[-1]}")
