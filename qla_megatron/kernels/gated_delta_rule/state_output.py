"""The serial pass: the state from chunk to chunk, and the output.

Per chunk, with the state S [K, V], A and G of `prepare_chunks`, and g_s, g_C the summed gates at s and at its end:

    W  = V - diag(exp(g)) K S           X = A W
    O  = scale diag(exp(g)) Q S + P X   P = scale (Q K^T * G) diag(beta)
    S <- exp(g_C) S + K^T diag(beta exp(g_C - g)) X

The registers hold S' with S = 2^carry S'; carry enters the factors of the products, and S' is scaled only when carry
leaves its range, at the end of the document and before a checkpoint.

Everything is kept transposed: S^T [V, K] stays in the registers of the state warpgroups, 64 rows each, and is the
register operand of every product, as are W^T and X^T; shared memory holds only Q, K, V, A, P, and O on its way out.

Warpgroups: one or two of state; one of scores, which runs ahead (P, zeroed tails of K and V); one of copies: warp 0
loads, warps 1 and 2 store O, warp 3 takes the exponentials, ahead too, and in the end clears the rows of no document.
Barriers, for chunk i, s = i % stages, b = i % 2:

    barrier      says of chunk i                   arrivals                       waited for by          parity
    full[s]      its loads have landed             32 of the loading warp, bytes  scores, state, warp 3  i / stages
    empty[s]     it was read                       warps of state, scores; 32 of  loading warp           i / stages + 1
                                                   warp 3
    scored[b]    P, exponentials, tails are there  warps of scores, 32 of warp 3  state                  i / 2
    unscored[b]  P and exponentials were read      warps of state                 scores, warp 3         i / 2 + 1
    wrote[w]     O of warpgroup w lies ready       128 of the warpgroup           its store warp         i
    stored[w]    O was copied out                  32 of its store warp           the warpgroup          i + 1

Every wait is for an event of the same or of an earlier chunk, and no event of a chunk waits for one of a later chunk;
state waits for full and scored of i + 1 at the end of i, when it has released all of i but P, which is double. So no
cycle.
"""

from typing import Any

import tilelang
import tilelang.language as T
import torch
from torch import Tensor

from ..compiled import compiled
from ..device import architecture, multiprocessors
from .tiles import CHECKPOINT, CHUNK, DTYPES, HEAD_DIM, PAIR_TYPES, TILE_MOVES, checkpoint_count

STAGES = 3
REGISTERS = {64: (232, 120, 40), 128: (208, 72, 24)}  # of a thread of the state, score and copy warpgroups, by block_v
RANGE = {"bfloat16": 60.0, "float16": 0.0}  # of the carry; float16 has no room for a scaled state


def state_output_kernel(dtype: str, block_v: int) -> Any:
    """Build the kernel for 16-bit inputs; a block has `block_v` (64 or 128) rows of S^T of one document and value head.

    Arguments of the kernel: q, k [T, H, K], v [T, HV, V], a and gates as `prepare_chunks` leaves them, initial_state
    [*, HV, K, V] float32 (read if has_initial_state), cu_seqlens [N + 1] int32; out: o [T, HV, V], final_state
    [*, HV, K, V] float32 (written if has_final_state), checkpoints [*, HV, V, K] float32 (written if has_checkpoints;
    `checkpoint_count` says where); scale; group = HV / H.
    """
    tokens, key_heads, value_heads = T.dynamic("tokens"), T.dynamic("key_heads"), T.dynamic("value_heads")
    offsets, slots = T.dynamic("offsets"), T.dynamic("slots")
    initial, final, marks = T.dynamic("initial"), T.dynamic("final"), T.dynamic("marks")
    warpgroups = block_v // 64
    state_threads, state_warps = 128 * warpgroups, 4 * warpgroups
    splits = HEAD_DIM // block_v
    state_registers, score_registers, copy_registers = REGISTERS[block_v]
    gate_scores = f"qla::gate_scores<{PAIR_TYPES[dtype]}>"

    @T.macro
    def store_output(o_tile, o, wrote, stored, n, chunks, start, length, head, v0, value_heads):
        for i in T.serial(chunks):
            left = start + i * CHUNK
            T.barrier_wait(wrote[n], i % 2)
            if length - i * CHUNK >= CHUNK:
                T.tma_copy(o_tile[n, :, :], o[left : left + CHUNK, head, v0 + 64 * n : v0 + 64 * n + 64])
                T.tma_store_wait(0)
            else:
                T.call_extern(
                    "handle",
                    "qla::store_rows",
                    T.address_of(o[0, 0, 0]),
                    T.access_ptr(o_tile[n, 0, 0], "r"),
                    left,
                    head,
                    v0 + 64 * n,
                    value_heads,
                    length - i * CHUNK,
                )
            T.barrier_arrive(stored[n])

    @T.prim_func
    def state_output(
        q: T.Tensor((tokens, key_heads, HEAD_DIM), dtype),
        k: T.Tensor((tokens, key_heads, HEAD_DIM), dtype),
        v: T.Tensor((tokens, value_heads, HEAD_DIM), dtype),
        a: T.Tensor((slots, value_heads, CHUNK, CHUNK), dtype),
        gates: T.Tensor((slots, value_heads, 2 * CHUNK), "float32"),
        initial_state: T.Tensor((initial, value_heads, HEAD_DIM, HEAD_DIM), "float32"),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        o: T.Tensor((tokens, value_heads, HEAD_DIM), dtype),
        final_state: T.Tensor((final, value_heads, HEAD_DIM, HEAD_DIM), "float32"),
        checkpoints: T.Tensor((marks, value_heads, HEAD_DIM, HEAD_DIM), "float32"),
        scale: T.float32,
        group: T.int32,
        has_initial_state: T.int32,
        has_final_state: T.int32,
        has_checkpoints: T.int32,
    ):
        with T.Kernel((offsets - 1) * value_heads * splits, threads=state_threads + 256) as block:
            T.import_source(TILE_MOVES)
            q_tile = T.alloc_shared((STAGES, CHUNK, HEAD_DIM), dtype)
            k_tile = T.alloc_shared((STAGES, CHUNK, HEAD_DIM), dtype)
            v_tile = T.alloc_shared((STAGES, CHUNK, block_v), dtype)
            a_tile = T.alloc_shared((STAGES, CHUNK, CHUNK), dtype)
            g_tile = T.alloc_shared((STAGES, 2 * CHUNK), "float32")
            p_tile = T.alloc_shared((2, CHUNK, CHUNK), dtype)
            o_tile = T.alloc_shared((warpgroups, CHUNK, 64), dtype)
            # 2^carry exp(g), scale times that, beta exp(g_C - g) / 2^(next carry), what the state is scaled by
            decay = T.alloc_shared((2, CHUNK), "float32", scope="shared")
            scaled_decay = T.alloc_shared((2, CHUNK), "float32", scope="shared")
            rest = T.alloc_shared((2, CHUNK), "float32", scope="shared")
            factor = T.alloc_shared((2,), "float32", scope="shared")
            T.annotate_layout(
                {
                    v_tile: tilelang.layout.make_swizzled_layout(v_tile),
                    o_tile: tilelang.layout.make_swizzled_layout(o_tile),
                    p_tile: tilelang.layout.make_swizzled_layout(p_tile),
                }
            )
            full, empty = T.alloc_barrier([32] * STAGES), T.alloc_barrier([state_warps + 36] * STAGES)
            scored, unscored = T.alloc_barrier([36] * 2), T.alloc_barrier([state_warps] * 2)
            wrote, stored = T.alloc_barrier([128] * warpgroups), T.alloc_barrier([32] * warpgroups)

            state = T.alloc_fragment((block_v, HEAD_DIM), "float32")
            state16 = T.alloc_fragment((block_v, HEAD_DIM), dtype)
            w = T.alloc_fragment((block_v, CHUNK), "float32")
            v16 = T.alloc_fragment((block_v, CHUNK), dtype)
            w16 = T.alloc_fragment((block_v, CHUNK), dtype)
            d = T.alloc_fragment((block_v, CHUNK), "float32")
            d16 = T.alloc_fragment((block_v, CHUNK), dtype)
            rest16 = T.alloc_fragment((block_v, CHUNK), dtype)
            out = T.alloc_fragment((block_v, CHUNK), "float32")
            out16 = T.alloc_fragment((block_v, CHUNK), dtype)
            p = T.alloc_fragment((CHUNK, CHUNK), "float32")

            thread = T.get_thread_binding()
            lane = thread % 32
            carry, total, following = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
            rows, first_row, row_step = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            document, head, v0 = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            start, length, slot0 = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            chunks, key = T.alloc_var("int32"), T.alloc_var("int32")
            document = T.truncdiv(block, value_heads * splits)
            head = T.truncdiv(block, splits) - document * value_heads
            key = T.truncdiv(head, group)
            v0 = block % splits * block_v
            start = cu_seqlens[document]
            length = cu_seqlens[document + 1] - start
            slot0 = T.truncdiv(start, CHUNK) + document
            chunks = T.truncdiv(length + CHUNK - 1, CHUNK)

            if thread < state_threads:
                T.set_max_nreg(state_registers, 1)
                warpgroup = thread // 128
                if has_initial_state != 0:
                    for x, y in T.Parallel(block_v, HEAD_DIM):
                        state[x, y] = initial_state[document, head, y, v0 + x]
                else:
                    T.clear(state)
                if chunks > 0:
                    T.barrier_wait(full[0], 0)
                    T.barrier_wait(scored[0], 0)
                    T.copy(state, state16)
                    T.wgmma_gemm(
                        state16,
                        k_tile[0, :, :],
                        w,
                        transpose_B=True,
                        clear_accum=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )
                    T.call_extern(
                        "handle", "qla::load_transposed", v16.data, T.access_ptr(v_tile[0, 0, warpgroup * 64], "r")
                    )
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(w)
                for i in T.serial(chunks):
                    if (has_checkpoints != 0) & (i % CHECKPOINT == 0):
                        mark = T.truncdiv(slot0, CHECKPOINT) + document + T.truncdiv(i, CHECKPOINT)
                        for x, y in T.Parallel(block_v, HEAD_DIM):
                            checkpoints[mark, head, v0 + x, y] = state[x, y]
                    T.wgmma_gemm(
                        state16,
                        q_tile[i % STAGES, :, :],
                        out,
                        transpose_B=True,
                        clear_accum=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )
                    for x, y in T.Parallel(block_v, CHUNK):
                        w[x, y] = v16[x, y] - w[x, y] * decay[i % 2, y]
                    T.copy(w, w16)
                    T.wgmma_gemm(
                        w16,
                        a_tile[i % STAGES, :, :],
                        d,
                        transpose_B=True,
                        clear_accum=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )
                    # In a block of its own, as the assembler would move it behind the wait, into the chain.
                    if factor[i % 2] != 1.0:
                        for x, y in T.Parallel(block_v, HEAD_DIM):
                            state[x, y] *= factor[i % 2]
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(out)
                    T.warpgroup_fence_operand(d)
                    for x, y in T.Parallel(block_v, CHUNK):
                        w[x, y] = d[x, y] * rest[i % 2, y]
                    T.copy(w, rest16)
                    T.wgmma_gemm(rest16, k_tile[i % STAGES, :, :], state, policy=T.GemmWarpPolicy.FullRow)
                    T.copy(d, d16)
                    for x, y in T.Parallel(block_v, CHUNK):
                        out[x, y] *= scaled_decay[i % 2, y]
                    T.wgmma_gemm(d16, p_tile[i % 2, :, :], out, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    T.wait_wgmma(1)
                    T.warpgroup_fence_operand(state)
                    if lane == 0:
                        T.barrier_arrive(empty[i % STAGES])
                    # The next chunk's first product (of no effect after the last chunk) runs while O leaves.
                    T.copy(state, state16)
                    if i + 1 < chunks:
                        T.barrier_wait(full[(i + 1) % STAGES], (i + 1) // STAGES % 2)
                        T.barrier_wait(scored[(i + 1) % 2], (i + 1) // 2 % 2)
                    T.wgmma_gemm(
                        state16,
                        k_tile[(i + 1) % STAGES, :, :],
                        w,
                        transpose_B=True,
                        clear_accum=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )
                    T.wait_wgmma(1)
                    T.warpgroup_fence_operand(out)
                    if lane == 0:
                        T.barrier_arrive(unscored[i % 2])
                    T.copy(out, out16)
                    T.barrier_wait(stored[warpgroup], (i + 1) % 2)
                    T.call_extern(
                        "handle", "qla::store_transposed", T.access_ptr(o_tile[warpgroup, 0, 0], "w"), out16.data
                    )
                    T.fence_proxy_async()
                    T.barrier_arrive(wrote[warpgroup])
                    T.call_extern(
                        "handle",
                        "qla::load_transposed",
                        v16.data,
                        T.access_ptr(v_tile[(i + 1) % STAGES, 0, warpgroup * 64], "r"),
                    )
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(w)
                if has_final_state != 0:
                    for x, y in T.Parallel(block_v, HEAD_DIM):
                        final_state[document, head, y, v0 + x] = state[x, y]

            elif thread < state_threads + 128:
                T.set_max_nreg(score_registers, 0)
                for i in T.serial(chunks):
                    T.barrier_wait(full[i % STAGES], i // STAGES % 2)
                    T.gemm(q_tile[i % STAGES, :, :], k_tile[i % STAGES, :, :], p, transpose_B=True, clear_accum=True)
                    if length - i * CHUNK < CHUNK:
                        for x, y in T.Parallel(CHUNK, HEAD_DIM):
                            if x >= length - i * CHUNK:
                                k_tile[i % STAGES, x, y] = 0
                        for x, y in T.Parallel(CHUNK, block_v):
                            if x >= length - i * CHUNK:
                                v_tile[i % STAGES, x, y] = 0
                    T.barrier_wait(unscored[i % 2], (i // 2 + 1) % 2)
                    T.call_extern(
                        "handle",
                        gate_scores,
                        T.access_ptr(p_tile[i % 2, 0, 0], "w"),
                        p.data,
                        T.access_ptr(g_tile[i % STAGES, 0], "r"),
                        scale,
                    )
                    T.fence_proxy_async()
                    T.call_extern("handle", "qla::sync_warp")
                    if lane == 0:
                        T.barrier_arrive(scored[i % 2])
                        T.barrier_arrive(empty[i % STAGES])

            else:
                T.set_max_nreg(copy_registers, 0)
                if thread < state_threads + 160:
                    for i in T.serial(chunks):
                        left = start + i * CHUNK
                        T.barrier_wait(empty[i % STAGES], (i // STAGES + 1) % 2)
                        T.tma_copy(
                            k[left : left + CHUNK, key, 0:HEAD_DIM], k_tile[i % STAGES, :, :], barrier=full[i % STAGES]
                        )
                        T.tma_copy(
                            q[left : left + CHUNK, key, 0:HEAD_DIM], q_tile[i % STAGES, :, :], barrier=full[i % STAGES]
                        )
                        T.tma_copy(
                            gates[slot0 + i, head, 0 : 2 * CHUNK], g_tile[i % STAGES, :], barrier=full[i % STAGES]
                        )
                        T.tma_copy(
                            v[left : left + CHUNK, head, v0 : v0 + block_v],
                            v_tile[i % STAGES, :, :],
                            barrier=full[i % STAGES],
                        )
                        T.tma_copy(
                            a[slot0 + i, head, 0:CHUNK, 0:CHUNK], a_tile[i % STAGES, :, :], barrier=full[i % STAGES]
                        )
                        T.barrier_arrive(full[i % STAGES])
                elif thread < state_threads + 192:
                    store_output(o_tile, o, wrote, stored, 0, chunks, start, length, head, v0, value_heads)
                elif thread < state_threads + 224:
                    if warpgroups == 2:
                        store_output(o_tile, o, wrote, stored, 1, chunks, start, length, head, v0, value_heads)
                else:
                    carry = 0.0
                    for i in T.serial(chunks):
                        T.barrier_wait(full[i % STAGES], i // STAGES % 2)
                        T.barrier_wait(unscored[i % 2], (i // 2 + 1) % 2)
                        total = g_tile[i % STAGES, CHUNK - 1]
                        following = carry + total
                        factor[i % 2] = 1.0
                        if (
                            (i + 1 == chunks)
                            | (i % CHECKPOINT == CHECKPOINT - 1)
                            | (T.max(following, -following) > RANGE[dtype])
                        ):
                            factor[i % 2] = T.exp2(following)
                            following = 0.0
                        for x in T.Parallel(CHUNK):
                            decay[i % 2, x] = T.exp2(carry + g_tile[i % STAGES, x])
                            scaled_decay[i % 2, x] = scale * T.exp2(carry + g_tile[i % STAGES, x])
                            rest[i % 2, x] = g_tile[i % STAGES, CHUNK + x] * T.exp2(
                                total - g_tile[i % STAGES, x] - following
                            )
                        carry = following
                        T.barrier_arrive(scored[i % 2])
                        T.barrier_arrive(empty[i % STAGES])
                    # Rows past the last document, a row a block.
                    first_row = cu_seqlens[offsets - 1] + block
                    row_step = (offsets - 1) * value_heads * splits
                    rows = T.truncdiv(tokens - first_row + row_step - 1, row_step)
                    for row in T.serial(rows):
                        for x in T.serial(value_heads):
                            for y in T.Parallel(HEAD_DIM):
                                o[first_row + row * row_step, x, y] = 0

    return state_output


def compute_state_output(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    gates: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor,
    scale: float,
    output_final_state: bool,
    block_v: int | None = None,
    output_checkpoints: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o [T, HV, V], the final states [N, HV, K, V] and the checkpoints [*, HV, V, K], both float32 or None.

    See `state_output_kernel` for the arguments.
    """
    index, value_heads, documents = v.get_device(), v.shape[1], cu_seqlens.shape[0] - 1
    o = torch.empty_like(v)
    state = (value_heads, HEAD_DIM, HEAD_DIM)
    marks = checkpoint_count(a.shape[0], documents) if output_checkpoints else 1
    final_state, checkpoints = (
        torch.empty(count, *state, dtype=torch.float32, device=v.device)
        for count in (documents if output_final_state else 1, marks)
    )
    if block_v is None:
        # Half tiles shorten the chain of a document; worth it while whole ones would leave multiprocessors idle.
        block_v = 128 if 2 * documents * value_heads > multiprocessors(index) else 64
    kernel = compiled(architecture(index), state_output_kernel, DTYPES[v.dtype], block_v)
    kernel(
        q,
        k,
        v,
        a,
        gates.flatten(2),
        final_state if initial_state is None else initial_state,
        cu_seqlens,
        o,
        final_state,
        checkpoints,
        scale,
        value_heads // k.shape[1],
        int(initial_state is not None),
        int(output_final_state),
        int(output_checkpoints),
    )
    return o, final_state if output_final_state else None, checkpoints if output_checkpoints else None
