"""The serial pass of the backward: the gradient of the state from chunk to chunk, and that of the values.

Per chunk, from the last to the first, with dS [K, V] the gradient of the state at the chunk's end, A and the gates of
`prepare_chunks`, and P = scale Q K^T * G with its columns times beta:

    dX = diag(beta exp(g_C - g)) K dS + P^T dO
    dV = A^T dX                                    the gradient of V, and of W = V - diag(exp(g)) K S
    dS <- exp(g_C) dS + Q^T diag(scale exp(g)) dO - K^T diag(exp(g)) dV

Neither the states nor V are needed. Everything is kept transposed as in `state_output`: dS^T [V, K] in the registers of
the state warpgroups, 64 rows each. dS at every chunk's end is written in 16 bits for `chunk_gradients`, as it enters
the first product. Long documents are worked on in segments of slots; between them dS rests in `carry`.

Warpgroups and barriers are those of `state_output`, by the place n in the order of work: the scores warpgroup zeroes
the tails of Q, K and dO, then makes P; warp 3 of the copy warpgroup takes the exponentials. Two buffers leave shared
memory, dV and dS, each behind its own pair of barriers (`wrote`, `stored` with one index a warpgroup and buffer).
"""

from typing import Any

import tilelang
import tilelang.language as T
from torch import Tensor

from ..compiled import compiled
from ..device import architecture, multiprocessors
from .backward_tiles import BACKWARD_MOVES
from .tiles import CHUNK, DTYPES, HEAD_DIM, PAIR_TYPES

STAGES = {64: 3, 128: 2}
REGISTERS = {64: (232, 120, 40), 128: (208, 72, 24)}  # of a thread of the state, score and copy warpgroups, by block_v


def state_gradient_kernel(dtype: str, block_v: int) -> Any:
    """Build the kernel for 16-bit inputs; a block has `block_v` (64 or 128) rows of dS^T of a document and value head.

    Arguments of the kernel: q, k [T, H, K], do [T, HV, V], a and gates as `prepare_chunks` leaves them,
    final_gradient [*, HV, K, V] float32 (read if has_final_gradient), cu_seqlens [N + 1] int32; out: dv [T, HV, V],
    dstates [slots of the segment, HV, V, K], the transposed dS at the chunks' ends; carry [N, HV, K, V] float32, read
    where a document goes on past the segment's end, written at its start (dS of the initial state in the end); scale;
    group = HV / H; the segment is slots first_slot to last_slot.
    """
    tokens, key_heads, value_heads = T.dynamic("tokens"), T.dynamic("key_heads"), T.dynamic("value_heads")
    offsets, slots, segment = T.dynamic("offsets"), T.dynamic("slots"), T.dynamic("segment")
    final, documents = T.dynamic("final"), T.dynamic("documents")
    warpgroups = block_v // 64
    state_threads = 128 * warpgroups
    splits = HEAD_DIM // block_v
    stages = STAGES[block_v]
    state_registers, score_registers, copy_registers = REGISTERS[block_v]
    pair = PAIR_TYPES[dtype]

    @T.macro
    def store_results(
        dv_tile, ds_tile, dv, dstates, wrote, stored, w, count, end_chunk, start, length, slot, head, v0, value_heads
    ):
        for n in T.serial(count):
            i = end_chunk - 1 - n
            left = start + i * CHUNK
            T.barrier_wait(wrote[2 * w], n % 2)
            for c in T.unroll(2):
                T.tma_copy(
                    ds_tile[2 * w + c, :, :],
                    dstates[slot + i, head, v0 + 64 * w : v0 + 64 * w + 64, 64 * c : 64 * c + 64],
                )
            T.tma_store_wait(0)
            T.barrier_arrive(stored[2 * w])
            T.barrier_wait(wrote[2 * w + 1], n % 2)
            if length - i * CHUNK >= CHUNK:
                T.tma_copy(dv_tile[w, :, :], dv[left : left + CHUNK, head, v0 + 64 * w : v0 + 64 * w + 64])
                T.tma_store_wait(0)
            else:
                T.call_extern(
                    "handle",
                    "qla::store_rows",
                    T.address_of(dv[0, 0, 0]),
                    T.access_ptr(dv_tile[w, 0, 0], "r"),
                    left,
                    head,
                    v0 + 64 * w,
                    value_heads,
                    length - i * CHUNK,
                )
            T.barrier_arrive(stored[2 * w + 1])

    @T.prim_func
    def state_gradient(
        q: T.Tensor((tokens, key_heads, HEAD_DIM), dtype),
        k: T.Tensor((tokens, key_heads, HEAD_DIM), dtype),
        do: T.Tensor((tokens, value_heads, HEAD_DIM), dtype),
        a: T.Tensor((slots, value_heads, CHUNK, CHUNK), dtype),
        gates: T.Tensor((slots, value_heads, 2, CHUNK), "float32"),
        final_gradient: T.Tensor((final, value_heads, HEAD_DIM, HEAD_DIM), "float32"),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        dv: T.Tensor((tokens, value_heads, HEAD_DIM), dtype),
        dstates: T.Tensor((segment, value_heads, HEAD_DIM, HEAD_DIM), dtype),
        carry: T.Tensor((documents, value_heads, HEAD_DIM, HEAD_DIM), "float32"),
        scale: T.float32,
        group: T.int32,
        has_final_gradient: T.int32,
        first_slot: T.int32,
        last_slot: T.int32,
    ):
        with T.Kernel((offsets - 1) * value_heads * splits, threads=state_threads + 256) as block:
            T.import_source(BACKWARD_MOVES)
            q_tile = T.alloc_shared((stages, CHUNK, HEAD_DIM), dtype)
            k_tile = T.alloc_shared((stages, CHUNK, HEAD_DIM), dtype)
            do_tile = T.alloc_shared((stages, CHUNK, block_v), dtype)
            a_tile = T.alloc_shared((stages, CHUNK, CHUNK), dtype)
            gate_tile = T.alloc_shared((stages, 2, CHUNK), "float32")
            p_tile = T.alloc_shared((2, CHUNK, CHUNK), dtype)
            dv_tile = T.alloc_shared((warpgroups, CHUNK, 64), dtype)
            ds_tile = T.alloc_shared((2 * warpgroups, 64, 64), dtype)
            # exp(g), scale exp(g), beta exp(g_C - g)
            decay = T.alloc_shared((2, CHUNK), "float32", scope="shared")
            scaled_decay = T.alloc_shared((2, CHUNK), "float32", scope="shared")
            rest = T.alloc_shared((2, CHUNK), "float32", scope="shared")
            T.annotate_layout(
                {
                    do_tile: tilelang.layout.make_swizzled_layout(do_tile),
                    dv_tile: tilelang.layout.make_swizzled_layout(dv_tile),
                    ds_tile: tilelang.layout.make_swizzled_layout(ds_tile),
                    p_tile: tilelang.layout.make_swizzled_layout(p_tile),
                }
            )
            full, empty = T.alloc_barrier([32] * stages), T.alloc_barrier([state_threads + 160] * stages)
            scored, unscored = T.alloc_barrier([160] * 2), T.alloc_barrier([state_threads] * 2)
            wrote, stored = T.alloc_barrier([128] * 2 * warpgroups), T.alloc_barrier([32] * 2 * warpgroups)

            state = T.alloc_fragment((block_v, HEAD_DIM), "float32")
            state16 = T.alloc_fragment((block_v, HEAD_DIM), dtype)
            x = T.alloc_fragment((block_v, CHUNK), "float32")
            x16 = T.alloc_fragment((block_v, CHUNK), dtype)
            y = T.alloc_fragment((block_v, CHUNK), "float32")
            do16 = T.alloc_fragment((block_v, CHUNK), dtype)
            scaled16 = T.alloc_fragment((block_v, CHUNK), dtype)
            dw = T.alloc_fragment((block_v, CHUNK), "float32")
            dw16 = T.alloc_fragment((block_v, CHUNK), dtype)
            out16 = T.alloc_fragment((block_v, CHUNK), dtype)
            p = T.alloc_fragment((CHUNK, CHUNK), "float32")

            thread = T.get_thread_binding()
            document, head, v0 = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            start, length, slot0 = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            chunks, end_chunk, count = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            key = T.alloc_var("int32")
            document = T.truncdiv(block, value_heads * splits)
            head = T.truncdiv(block, splits) - document * value_heads
            key = T.truncdiv(head, group)
            v0 = block % splits * block_v
            start = cu_seqlens[document]
            length = cu_seqlens[document + 1] - start
            slot0 = T.truncdiv(start, CHUNK) + document
            chunks = T.truncdiv(length + CHUNK - 1, CHUNK)
            # The document's chunks in the segment: `count` of them, before `end_chunk`.
            end_chunk = T.min(chunks, last_slot - slot0)
            count = end_chunk - T.max(0, first_slot - slot0)

            if thread < state_threads:
                T.set_max_nreg(state_registers, 1)
                warpgroup = thread // 128
                if (count > 0) & (end_chunk < chunks):
                    for r, c in T.Parallel(block_v, HEAD_DIM):
                        state[r, c] = carry[document, head, c, v0 + r]
                elif has_final_gradient != 0:
                    for r, c in T.Parallel(block_v, HEAD_DIM):
                        state[r, c] = final_gradient[document, head, c, v0 + r]
                else:
                    T.clear(state)
                if count > 0:
                    T.barrier_wait(full[0], 0)
                    T.barrier_wait(scored[0], 0)
                    T.copy(state, state16)
                    T.wgmma_gemm(
                        state16,
                        k_tile[0, :, :],
                        x,
                        transpose_B=True,
                        clear_accum=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )
                    T.call_extern(
                        "handle", "qla::load_transposed", do16.data, T.access_ptr(do_tile[0, 0, warpgroup * 64], "r")
                    )
                    T.wgmma_gemm(do16, p_tile[0, :, :], y, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(x)
                    T.warpgroup_fence_operand(y)
                for n in T.serial(count):
                    # dS leaves as it entered the product.
                    T.barrier_wait(stored[2 * warpgroup], (n + 1) % 2)
                    T.call_extern(
                        "handle", "qla::store_columns", T.access_ptr(ds_tile[2 * warpgroup, 0, 0], "w"), state16.data
                    )
                    T.fence_proxy_async()
                    T.barrier_arrive(wrote[2 * warpgroup])
                    for r, c in T.Parallel(block_v, CHUNK):
                        x[r, c] = x[r, c] * rest[n % 2, c] + y[r, c]
                    T.copy(x, x16)
                    T.wgmma_gemm(x16, a_tile[n % stages, :, :], dw, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                    for r, c in T.Parallel(block_v, CHUNK):
                        y[r, c] = do16[r, c] * scaled_decay[n % 2, c]
                    T.copy(y, scaled16)
                    for r, c in T.Parallel(block_v, HEAD_DIM):
                        state[r, c] *= decay[n % 2, CHUNK - 1]
                    T.wgmma_gemm(scaled16, q_tile[n % stages, :, :], state, policy=T.GemmWarpPolicy.FullRow)
                    T.wait_wgmma(1)
                    T.warpgroup_fence_operand(dw)
                    T.copy(dw, out16)
                    for r, c in T.Parallel(block_v, CHUNK):
                        dw[r, c] *= -decay[n % 2, c]
                    T.copy(dw, dw16)
                    T.wgmma_gemm(dw16, k_tile[n % stages, :, :], state, policy=T.GemmWarpPolicy.FullRow)
                    T.barrier_wait(stored[2 * warpgroup + 1], (n + 1) % 2)
                    T.call_extern(
                        "handle", "qla::store_transposed", T.access_ptr(dv_tile[warpgroup, 0, 0], "w"), out16.data
                    )
                    T.fence_proxy_async()
                    T.barrier_arrive(wrote[2 * warpgroup + 1])
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(state)
                    T.barrier_arrive(empty[n % stages])
                    T.barrier_arrive(unscored[n % 2])
                    # The next chunk's first products (of no effect after the last chunk).
                    T.copy(state, state16)
                    if n + 1 < count:
                        T.barrier_wait(full[(n + 1) % stages], (n + 1) // stages % 2)
                        T.barrier_wait(scored[(n + 1) % 2], (n + 1) // 2 % 2)
                    T.wgmma_gemm(
                        state16,
                        k_tile[(n + 1) % stages, :, :],
                        x,
                        transpose_B=True,
                        clear_accum=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )
                    T.call_extern(
                        "handle",
                        "qla::load_transposed",
                        do16.data,
                        T.access_ptr(do_tile[(n + 1) % stages, 0, warpgroup * 64], "r"),
                    )
                    T.wgmma_gemm(do16, p_tile[(n + 1) % 2, :, :], y, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(x)
                    T.warpgroup_fence_operand(y)
                if (count > 0) | (chunks == 0):
                    for r, c in T.Parallel(block_v, HEAD_DIM):
                        carry[document, head, c, v0 + r] = state[r, c]

            elif thread < state_threads + 128:
                T.set_max_nreg(score_registers, 0)
                for n in T.serial(count):
                    rows = length - (end_chunk - 1 - n) * CHUNK
                    T.barrier_wait(full[n % stages], n // stages % 2)
                    if rows < CHUNK:
                        for r, c in T.Parallel(CHUNK, HEAD_DIM):
                            if r >= rows:
                                q_tile[n % stages, r, c] = 0
                                k_tile[n % stages, r, c] = 0
                        for r, c in T.Parallel(CHUNK, block_v):
                            if r >= rows:
                                do_tile[n % stages, r, c] = 0
                        T.fence_proxy_async()
                        T.sync_threads(1, 128)
                    T.gemm(q_tile[n % stages, :, :], k_tile[n % stages, :, :], p, transpose_B=True, clear_accum=True)
                    T.barrier_wait(unscored[n % 2], (n // 2 + 1) % 2)
                    T.call_extern(
                        "handle",
                        f"qla::gate_scores<{pair}>",
                        T.access_ptr(p_tile[n % 2, 0, 0], "w"),
                        p.data,
                        T.access_ptr(gate_tile[n % stages, 0, 0], "r"),
                        scale,
                    )
                    T.fence_proxy_async()
                    T.barrier_arrive(scored[n % 2])
                    T.barrier_arrive(empty[n % stages])

            else:
                T.set_max_nreg(copy_registers, 0)
                if thread < state_threads + 160:
                    for n in T.serial(count):
                        i = end_chunk - 1 - n
                        left = start + i * CHUNK
                        T.barrier_wait(empty[n % stages], (n // stages + 1) % 2)
                        T.tma_copy(
                            k[left : left + CHUNK, key, 0:HEAD_DIM], k_tile[n % stages, :, :], barrier=full[n % stages]
                        )
                        T.tma_copy(
                            q[left : left + CHUNK, key, 0:HEAD_DIM], q_tile[n % stages, :, :], barrier=full[n % stages]
                        )
                        T.tma_copy(
                            gates[slot0 + i, head, 0:2, 0:CHUNK], gate_tile[n % stages, :, :], barrier=full[n % stages]
                        )
                        T.tma_copy(
                            do[left : left + CHUNK, head, v0 : v0 + block_v],
                            do_tile[n % stages, :, :],
                            barrier=full[n % stages],
                        )
                        T.tma_copy(
                            a[slot0 + i, head, 0:CHUNK, 0:CHUNK], a_tile[n % stages, :, :], barrier=full[n % stages]
                        )
                        T.barrier_arrive(full[n % stages])
                elif thread < state_threads + 192:
                    store_results(
                        dv_tile,
                        ds_tile,
                        dv,
                        dstates,
                        wrote,
                        stored,
                        0,
                        count,
                        end_chunk,
                        start,
                        length,
                        slot0 - first_slot,
                        head,
                        v0,
                        value_heads,
                    )
                elif thread < state_threads + 224:
                    if warpgroups == 2:
                        store_results(
                            dv_tile,
                            ds_tile,
                            dv,
                            dstates,
                            wrote,
                            stored,
                            1,
                            count,
                            end_chunk,
                            start,
                            length,
                            slot0 - first_slot,
                            head,
                            v0,
                            value_heads,
                        )
                else:
                    for n in T.serial(count):
                        T.barrier_wait(full[n % stages], n // stages % 2)
                        T.barrier_wait(unscored[n % 2], (n // 2 + 1) % 2)
                        for c in T.Parallel(CHUNK):
                            decay[n % 2, c] = T.exp2(gate_tile[n % stages, 0, c])
                            scaled_decay[n % 2, c] = scale * T.exp2(gate_tile[n % stages, 0, c])
                            rest[n % 2, c] = gate_tile[n % stages, 1, c] * T.exp2(
                                gate_tile[n % stages, 0, CHUNK - 1] - gate_tile[n % stages, 0, c]
                            )
                        T.barrier_arrive(scored[n % 2])
                        T.barrier_arrive(empty[n % stages])
                    # Rows past the last document, a row a block.
                    first_row = cu_seqlens[offsets - 1] + block
                    row_step = (offsets - 1) * value_heads * splits
                    rows = T.truncdiv(tokens - first_row + row_step - 1, row_step)
                    for row in T.serial(rows):
                        for h in T.serial(value_heads):
                            for c in T.Parallel(HEAD_DIM):
                                dv[first_row + row * row_step, h, c] = 0

    return state_gradient


def compute_state_gradient(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    a: Tensor,
    gates: Tensor,
    final_gradient: Tensor | None,
    cu_seqlens: Tensor,
    dv: Tensor,
    dstates: Tensor,
    carry: Tensor,
    scale: float,
    segment: tuple[int, int],
    block_v: int | None = None,
) -> None:
    """Fill dv, dstates and carry for the slots of `segment`; see `state_gradient_kernel` for the arguments."""
    index, value_heads, documents = do.get_device(), do.shape[1], cu_seqlens.shape[0] - 1
    if block_v is None:
        # Half tiles shorten the chain of a document; worth it while whole ones would leave multiprocessors idle.
        block_v = 128 if 2 * documents * value_heads > multiprocessors(index) else 64
    kernel = compiled(architecture(index), state_gradient_kernel, DTYPES[do.dtype], block_v)
    kernel(
        q,
        k,
        do,
        a,
        gates,
        carry if final_gradient is None else final_gradient,
        cu_seqlens,
        dv,
        dstates,
        carry,
        scale,
        value_heads // k.shape[1],
        int(final_gradient is not None),
        *segment,
    )
