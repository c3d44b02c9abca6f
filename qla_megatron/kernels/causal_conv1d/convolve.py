# mypy: disable-error-code="valid-type,no-untyped-def"
"""The forward kernel: convolution, SiLU, l2 norm of queries and keys, and the gates, out of in_proj's output."""

from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from ..rows import CUDA_TYPES, HEAD_DIM, PAIR_TYPES, THREADS, WARPS
from .problem import Problem
from .tiles import CONVOLUTION, FORWARD_RING, WIDTH

BLOCKS = 4  # of a multiprocessor
WAVES = 4  # shorter tiles cost halos and begin and end more evenly


def convolve_kernel(dtype: str, weight_dtype: str, align: int, has_bias: bool, is_silu: bool) -> Any:
    """Build the kernel for 16-bit inputs whose rows are aligned to `align` bytes (4, 8 or 16).

    Arguments of the kernel: projected [T, B, P], any strides but 1 in the end; weight [D, 4], bias [D]; A_log, dt_bias
    [HV] float32; initial_state [*, D, 3]; cu_seqlens [N + 1] int32; out: q, k [B, T, H, 128], v [B, T, HV, 128], g,
    beta [B, T, HV] float32; eps of the l2 norm; key_heads, value_heads; length: tokens of a tile; gate_tokens: tokens
    whose gates a warp makes, 0 for none; documents: N, or 0 where each row of the batch is one; has_initial_state,
    is_normalised: whether to read the state, and to normalise q and k.

    A warp takes two heads of a tile, and its share of all gates. q, k, v, g and beta are 0 past the last document.
    """
    tokens, rows, columns = T.dynamic("tokens"), T.dynamic("rows"), T.dynamic("columns")
    token_stride, row_stride = T.dynamic("token_stride", "int64"), T.dynamic("row_stride", "int64")
    channels, biases, gates = T.dynamic("channels"), T.dynamic("biases"), T.dynamic("gates")
    states, offsets = T.dynamic("states"), T.dynamic("offsets")
    q_heads, k_heads, v_heads = T.dynamic("q_heads"), T.dynamic("k_heads"), T.dynamic("v_heads")
    gate_rows, gate_length = T.dynamic("gate_rows"), T.dynamic("gate_length")
    number = CUDA_TYPES[dtype]
    types = f"{PAIR_TYPES[dtype]}, {number}, {CUDA_TYPES[weight_dtype]}, {align}"
    convolve_heads = f"qla::convolve_heads<{types}, {str(has_bias).lower()}, {str(is_silu).lower()}>"

    @T.prim_func
    def convolve(
        projected: T.StridedTensor((tokens, rows, columns), (token_stride, row_stride, 1), dtype),
        weight: T.Tensor((channels, WIDTH), weight_dtype),
        bias: T.Tensor((biases,), weight_dtype),
        A_log: T.Tensor((gates,), "float32"),
        dt_bias: T.Tensor((gates,), "float32"),
        initial_state: T.Tensor((states, channels, WIDTH - 1), dtype),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        q: T.Tensor((rows, tokens, q_heads, HEAD_DIM), dtype),
        k: T.Tensor((rows, tokens, k_heads, HEAD_DIM), dtype),
        v: T.Tensor((rows, tokens, v_heads, HEAD_DIM), dtype),
        g: T.Tensor((gate_rows, gate_length, gates), "float32"),
        beta: T.Tensor((gate_rows, gate_length, gates), "float32"),
        eps: T.float32,
        key_heads: T.int32,
        value_heads: T.int32,
        length: T.int32,
        gate_tokens: T.int32,
        documents: T.int32,
        has_initial_state: T.int32,
        is_normalised: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(T.ceildiv(2 * key_heads + value_heads, 2) * T.ceildiv(tokens, length) * rows, WARPS),
            threads=THREADS,
        ) as block:
            T.import_source(CONVOLUTION)
            ring = T.alloc_shared((FORWARD_RING, THREADS, 8), dtype)
            T.annotate_min_blocks_per_sm(BLOCKS)
            pairs, tiles, unit = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            row, first = T.alloc_var("int32"), T.alloc_var("int32")
            pairs = T.truncdiv(2 * key_heads + value_heads + 1, 2)
            tiles = T.truncdiv(tokens + length - 1, length)
            unit = block * WARPS + T.get_thread_binding() // 32
            if unit < pairs * tiles * rows:
                row = T.truncdiv(unit, pairs * tiles)
                first = (T.truncdiv(unit, pairs) - row * tiles) * length
                if gate_tokens > 0:
                    T.call_extern(
                        "handle",
                        f"qla::make_gates<{number}>",
                        T.address_of(projected[0, 0, 0]),
                        token_stride,
                        row_stride,
                        T.address_of(A_log[0]),
                        T.address_of(dt_bias[0]),
                        T.address_of(cu_seqlens[0]),
                        T.address_of(g[0, 0, 0]),
                        T.address_of(beta[0, 0, 0]),
                        key_heads,
                        value_heads,
                        documents,
                        tokens,
                        rows,
                        unit * gate_tokens,
                        T.min((unit + 1) * gate_tokens, tokens * rows),
                    )
                T.call_extern(
                    "handle",
                    convolve_heads,
                    T.address_of(projected[0, row, 0]),
                    token_stride,
                    T.address_of(weight[0, 0]),
                    T.address_of(bias[0]),
                    T.address_of(initial_state[0, 0, 0]),
                    T.address_of(cu_seqlens[0]),
                    T.address_of(q[row, 0, 0, 0]),
                    T.address_of(k[row, 0, 0, 0]),
                    T.address_of(v[row, 0, 0, 0]),
                    T.access_ptr(ring[0, 0, 0], "rw"),
                    eps,
                    2 * (unit - T.truncdiv(unit, pairs) * pairs),
                    key_heads,
                    value_heads,
                    first,
                    T.min(first + length, tokens),
                    tokens,
                    row,
                    documents,
                    has_initial_state,
                    is_normalised,
                )

    return convolve


def convolve(p: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k [B, T, H, 128], v [B, T, HV, 128]; g and beta [B, T, HV] float32, of no elements without gates."""
    tokens, rows, _ = p.projected.shape
    q, k, v = (p.projected.new_empty(rows, tokens, n, HEAD_DIM) for n in (p.key_heads, p.key_heads, p.value_heads))
    g, beta = (q.new_empty(rows, tokens, p.gate_heads, dtype=torch.float32) for _ in range(2))
    if v.numel() == 0:
        return q, k, v, g, beta
    length, _, warps = p.tile(BLOCKS, WAVES)
    gates = g if p.gate_heads else g.new_empty(1, 1, 1)
    p.kernel(convolve_kernel)(
        *p.inputs(),
        q if p.key_heads else v,
        k if p.key_heads else v,
        v,
        gates,
        beta if p.gate_heads else gates,
        p.l2norm_eps or 0.0,
        p.key_heads,
        p.value_heads,
        length,
        p.gate_tokens(warps),
        p.packed_documents,
        int(p.initial_state is not None),
        int(p.l2norm_eps is not None),
    )
    return q, k, v, g, beta
