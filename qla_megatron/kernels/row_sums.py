# mypy: disable-error-code="valid-type,no-untyped-def"
"""Sums over the first dimension, in one order: the second stage of weight gradients."""

from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from .compiled import compiled
from .device import architecture
from .rows import THREADS, WEIGHT_TYPES


def sum_rows_kernel(dtype: str, width: int) -> Any:
    """Build the kernel for results in `dtype`; `width` columns a block, a power of two, shared by all threads.

    Arguments of the kernel: parts [rows, columns] float32; out: sums [columns].
    """
    rows, columns = T.dynamic("rows"), T.dynamic("columns")
    groups = THREADS // width

    @T.prim_func
    def sum_rows(parts: T.Tensor((rows, columns), "float32"), sums: T.Tensor((columns,), dtype)):
        with T.Kernel(T.ceildiv(columns, width), threads=THREADS) as block:
            shared = T.alloc_shared((THREADS,), "float32", scope="shared")
            total = T.alloc_var("float32")
            thread = T.get_thread_binding()
            column = block * width + thread % width
            total = 0.0
            if column < columns:
                for n in T.serial(T.truncdiv(rows - thread // width + groups - 1, groups)):
                    total = total + parts[n * groups + thread // width, column]
            shared[thread] = total
            for level in range(groups.bit_length() - 1):
                T.sync_threads()
                if thread < THREADS >> (level + 1):
                    shared[thread] = shared[thread] + shared[thread + (THREADS >> (level + 1))]
            T.sync_threads()
            if (thread < width) & (column < columns):
                sums[column] = T.cast(shared[thread], dtype)

    return sum_rows


def sum_rows(parts: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[rows, ...] float32 -> [...] in `dtype`."""
    flat = parts.flatten(1)
    sums = torch.empty(flat.shape[1], dtype=dtype, device=parts.device)
    if flat.shape[0] == 0:
        sums.zero_()
    elif flat.shape[1] > 0:
        width = 32 if flat.shape[1] >= 4096 else 1  # many columns have few rows, and the other way round
        kernel = compiled(architecture(parts.get_device()), sum_rows_kernel, WEIGHT_TYPES[dtype], width)
        kernel(flat, sums)
    return sums.view(parts.shape[1:])
