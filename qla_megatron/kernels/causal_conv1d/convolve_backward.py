# mypy: disable-error-code="valid-type,no-untyped-def"
"""The backward kernels: the gradient of in_proj's output in place, and of what the forward kernel reads besides.

Nothing is saved by the forward pass: convolution, activation and lengths are made again from in_proj's output.
"""

from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from ..row_sums import sum_rows
from ..rows import CUDA_TYPES, HEAD_DIM, PAIR_TYPES, THREADS, WARPS
from .problem import Problem
from .tiles import BACKWARD_RING, CONVOLUTION, WIDTH

BLOCKS = 2  # of a multiprocessor: with all registers that a thread can have, four tokens run side by side
WAVES = 1


def convolve_backward_kernel(dtype: str, weight_dtype: str, align: int, has_bias: bool, is_silu: bool) -> Any:
    """Build the kernel; the choices and most arguments are those of `convolve_kernel`.

    Arguments besides: dq, dk, dv, dg, dbeta as q, k, v, g, beta; dfinal [*, D, 3], gradient of the final states, read
    if has_dfinal; out: dprojected [T, B, P], of which the columns of q, k, v and the gates are written, 0 past the last
    document; dweight [B tiles, D, 4], dbias [B tiles, D] and dgates [warps, 2, HV], of A_log and dt_bias, float32: to
    be summed over their first dimension.
    """
    tokens, rows, columns = T.dynamic("tokens"), T.dynamic("rows"), T.dynamic("columns")
    token_stride, row_stride = T.dynamic("token_stride", "int64"), T.dynamic("row_stride", "int64")
    dtoken_stride, drow_stride = T.dynamic("dtoken_stride", "int64"), T.dynamic("drow_stride", "int64")
    channels, biases, gates = T.dynamic("channels"), T.dynamic("biases"), T.dynamic("gates")
    states, dstates, offsets = T.dynamic("states"), T.dynamic("dstates"), T.dynamic("offsets")
    q_heads, k_heads, v_heads = T.dynamic("q_heads"), T.dynamic("k_heads"), T.dynamic("v_heads")
    gate_rows, gate_length = T.dynamic("gate_rows"), T.dynamic("gate_length")
    parts, bias_parts, gate_parts = T.dynamic("parts"), T.dynamic("bias_parts"), T.dynamic("gate_parts")
    number = CUDA_TYPES[dtype]
    types = f"{PAIR_TYPES[dtype]}, {number}, {CUDA_TYPES[weight_dtype]}, {align}"
    convolve_heads = f"qla::convolve_heads_backward<{types}, {str(has_bias).lower()}, {str(is_silu).lower()}>"

    @T.prim_func
    def convolve_backward(
        projected: T.StridedTensor((tokens, rows, columns), (token_stride, row_stride, 1), dtype),
        weight: T.Tensor((channels, WIDTH), weight_dtype),
        bias: T.Tensor((biases,), weight_dtype),
        A_log: T.Tensor((gates,), "float32"),
        dt_bias: T.Tensor((gates,), "float32"),
        initial_state: T.Tensor((states, channels, WIDTH - 1), dtype),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        dq: T.Tensor((rows, tokens, q_heads, HEAD_DIM), dtype),
        dk: T.Tensor((rows, tokens, k_heads, HEAD_DIM), dtype),
        dv: T.Tensor((rows, tokens, v_heads, HEAD_DIM), dtype),
        dg: T.Tensor((gate_rows, gate_length, gates), "float32"),
        dbeta: T.Tensor((gate_rows, gate_length, gates), "float32"),
        dfinal: T.Tensor((dstates, channels, WIDTH - 1), dtype),
        dprojected: T.StridedTensor((tokens, rows, columns), (dtoken_stride, drow_stride, 1), dtype),
        dweight: T.Tensor((parts, channels, WIDTH), "float32"),
        dbias: T.Tensor((bias_parts, biases), "float32"),
        dgates: T.Tensor((gate_parts, 2, gates), "float32"),
        eps: T.float32,
        key_heads: T.int32,
        value_heads: T.int32,
        length: T.int32,
        gate_tokens: T.int32,
        documents: T.int32,
        has_initial_state: T.int32,
        has_dfinal: T.int32,
        is_normalised: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(T.ceildiv(2 * key_heads + value_heads, 2) * T.ceildiv(tokens, length) * rows, WARPS),
            threads=THREADS,
        ) as block:
            T.import_source(CONVOLUTION)
            ring = T.alloc_shared((2 * BACKWARD_RING, THREADS, 8), dtype)
            T.annotate_min_blocks_per_sm(BLOCKS)
            pairs, tiles, unit = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            tile, row, first = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            pairs = T.truncdiv(2 * key_heads + value_heads + 1, 2)
            tiles = T.truncdiv(tokens + length - 1, length)
            unit = block * WARPS + T.get_thread_binding() // 32
            if unit < pairs * tiles * rows:
                tile = T.truncdiv(unit, pairs)
                row = T.truncdiv(tile, tiles)
                first = (tile - row * tiles) * length
                if gate_tokens > 0:
                    T.call_extern(
                        "handle",
                        f"qla::differentiate_gates<{number}>",
                        T.address_of(projected[0, 0, 0]),
                        token_stride,
                        row_stride,
                        T.address_of(A_log[0]),
                        T.address_of(dt_bias[0]),
                        T.address_of(cu_seqlens[0]),
                        T.address_of(dg[0, 0, 0]),
                        T.address_of(dbeta[0, 0, 0]),
                        T.address_of(dprojected[0, 0, 0]),
                        dtoken_stride,
                        drow_stride,
                        T.address_of(dgates[unit, 0, 0]),
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
                    T.address_of(dq[row, 0, 0, 0]),
                    T.address_of(dk[row, 0, 0, 0]),
                    T.address_of(dv[row, 0, 0, 0]),
                    T.address_of(dfinal[0, 0, 0]),
                    T.address_of(dprojected[0, row, 0]),
                    dtoken_stride,
                    T.address_of(dweight[tile, 0, 0]),
                    T.address_of(dbias[tile, 0]),
                    T.access_ptr(ring[0, 0, 0], "rw"),
                    eps,
                    2 * (unit - tile * pairs),
                    key_heads,
                    value_heads,
                    first,
                    T.min(first + length, tokens),
                    tokens,
                    row,
                    documents,
                    has_initial_state,
                    has_dfinal,
                    is_normalised,
                )

    return convolve_backward


def state_gradient_kernel(dtype: str, weight_dtype: str, align: int, has_bias: bool, is_silu: bool) -> Any:
    """Build the kernel of the initial states' gradients dstate [documents, D, 3]; see `convolve_backward_kernel`."""
    tokens, rows, columns = T.dynamic("tokens"), T.dynamic("rows"), T.dynamic("columns")
    token_stride, row_stride = T.dynamic("token_stride", "int64"), T.dynamic("row_stride", "int64")
    channels, biases, states, dstates = (T.dynamic(name) for name in ("channels", "biases", "states", "dstates"))
    offsets, q_heads, k_heads, v_heads = (T.dynamic(name) for name in ("offsets", "q_heads", "k_heads", "v_heads"))
    types = f"{PAIR_TYPES[dtype]}, {CUDA_TYPES[dtype]}, {CUDA_TYPES[weight_dtype]}, {align}"
    differentiate = f"qla::differentiate_state<{types}, {str(has_bias).lower()}, {str(is_silu).lower()}>"

    @T.prim_func
    def state_gradient(
        projected: T.StridedTensor((tokens, rows, columns), (token_stride, row_stride, 1), dtype),
        weight: T.Tensor((channels, WIDTH), weight_dtype),
        bias: T.Tensor((biases,), weight_dtype),
        initial_state: T.Tensor((states, channels, WIDTH - 1), dtype),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        dq: T.Tensor((rows, tokens, q_heads, HEAD_DIM), dtype),
        dk: T.Tensor((rows, tokens, k_heads, HEAD_DIM), dtype),
        dv: T.Tensor((rows, tokens, v_heads, HEAD_DIM), dtype),
        dfinal: T.Tensor((dstates, channels, WIDTH - 1), dtype),
        dstate: T.Tensor((states, channels, WIDTH - 1), dtype),
        eps: T.float32,
        key_heads: T.int32,
        value_heads: T.int32,
        is_packed: T.int32,
        has_dfinal: T.int32,
        is_normalised: T.int32,
    ):
        with T.Kernel(T.ceildiv(2 * key_heads + value_heads, 2), states, threads=32) as (pair, document):
            T.import_source(CONVOLUTION)
            row = T.if_then_else(is_packed != 0, 0, document)
            T.call_extern(
                "handle",
                differentiate,
                T.address_of(projected[0, row, 0]),
                token_stride,
                T.address_of(weight[0, 0]),
                T.address_of(bias[0]),
                T.address_of(initial_state[0, 0, 0]),
                T.address_of(cu_seqlens[0]),
                T.address_of(dq[row, 0, 0, 0]),
                T.address_of(dk[row, 0, 0, 0]),
                T.address_of(dv[row, 0, 0, 0]),
                T.address_of(dfinal[0, 0, 0]),
                T.address_of(dstate[0, 0, 0]),
                eps,
                2 * pair,
                key_heads,
                value_heads,
                tokens,
                document,
                is_packed,
                has_dfinal,
                is_normalised,
            )

    return state_gradient


def convolve_backward(
    p: Problem,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dg: Tensor,
    dbeta: Tensor,
    dfinal: Tensor | None,
    dprojected: Tensor,
    needs_dstate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write dprojected [T, B, P] but for the columns of z; the gradients of weight, bias, gates [2, HV] and states.

    The gates' are those of A_log and dt_bias, float32; weight's and bias's are in `p.weight_dtype`. Sums of fixed
    order: the same bits every time. What is absent has a gradient of no elements.
    """
    dstate = dv.new_empty(p.documents if needs_dstate else 0, p.channels, WIDTH - 1)
    if dv.numel() == 0:  # no tokens
        dstate.copy_(dfinal) if dfinal is not None and needs_dstate else dstate.zero_()
        length, tiles, warps = 0, 0, 0
    else:
        length, tiles, warps = p.tile(BLOCKS, WAVES)
    dweight = dv.new_empty(tiles, p.channels, WIDTH, dtype=torch.float32)
    dbias = dv.new_empty(tiles, 0 if p.bias is None else p.channels, dtype=torch.float32)
    dgates = dv.new_empty(warps, 2, p.gate_heads, dtype=torch.float32)
    if tiles > 0:
        _launch(p, (dq, dk, dv), (dg, dbeta), dfinal, dprojected, (dweight, dbias, dgates), dstate, length)
    return sum_rows(dweight, p.weight_dtype), sum_rows(dbias, p.weight_dtype), sum_rows(dgates), dstate


def _launch(
    p: Problem,
    grads: tuple[Tensor, Tensor, Tensor],
    gate_grads: tuple[Tensor, Tensor],
    dfinal: Tensor | None,
    dprojected: Tensor,
    parts: tuple[Tensor, Tensor, Tensor],
    dstate: Tensor,
    length: int,
) -> None:
    dweight, dbias, dgates = parts
    inputs, nothing = p.inputs(), dweight.view(-1)  # stands in for what is neither read nor written
    dv = grads[2].contiguous()
    dqkv = (grads[0].contiguous(), grads[1].contiguous(), dv) if p.key_heads else (dv, dv, dv)
    has_gates = p.gate_heads > 0
    dg, dbeta = (x.contiguous() if has_gates else nothing[:1].view(1, 1, 1) for x in gate_grads)
    dfinal_or_not = inputs[5] if dfinal is None else dfinal.to(dv.dtype).contiguous()
    eps, has_dfinal, is_normalised = p.l2norm_eps or 0.0, int(dfinal is not None), int(p.l2norm_eps is not None)
    p.kernel(convolve_backward_kernel, dprojected)(
        *inputs,
        *dqkv,
        dg,
        dbeta,
        dfinal_or_not,
        dprojected,
        dweight,
        nothing[:1].view(1, 1) if p.bias is None else dbias,
        dgates if has_gates else nothing[:2].view(1, 2, 1),
        eps,
        p.key_heads,
        p.value_heads,
        length,
        p.gate_tokens(dgates.shape[0]),
        p.packed_documents,
        int(p.initial_state is not None),
        has_dfinal,
        is_normalised,
    )
    if dstate.numel() > 0:
        p.kernel(state_gradient_kernel)(
            *(inputs[n] for n in (0, 1, 2, 5, 6)),
            *dqkv,
            dfinal_or_not,
            dstate,
            eps,
            p.key_heads,
            p.value_heads,
            int(p.cu_seqlens is not None),
            has_dfinal,
            is_normalised,
        )
