"""The states at the chunks' starts, and what every chunk writes, once more from the forward's checkpoints.

Per chunk, with S [K, V] the state at its start, A and the gates of `prepare_chunks`:

    W = V - diag(exp(g)) K S        X = A W        S <- exp(g_C) S + K^T diag(beta exp(g_C - g)) X

A piece is the chunks of a document from one checkpoint to the next: `PIECE` of them, or fewer at the document's end.
All pieces are independent of one another. S leaves as it enters the first product, in 16 bits and transposed.

A block has 64 rows of S^T; two blocks of a multiprocessor hide each other's latency. Warpgroups: one of state; one of
copies, whose warp 0 loads, warp 1 stores S, warp 2 stores X, and warp 3 takes the exponentials and zeroes the tails of
K and V. For chunk n of the piece, b = n % 2:

    barrier        says of chunk n                    arrivals                        waited for by        parity
    full[b]        its loads have landed              32 of the loading warp, bytes   state, warp 3        n / 2
    empty[b]       it was read                        state, warp 3                   loading warp         n / 2 + 1
    ready[b]       exponentials, tails are there      32 of warp 3                    state                n / 2
    used[b]        exponentials were read             state                           warp 3               n / 2 + 1
    wrote[0, 1]    S, X lie ready                     128 of the state                warp 1, 2            n
    stored[0, 1]   S, X were copied out               32 of warp 1, 2                 state                n + 1
"""

from typing import Any

import tilelang
import tilelang.language as T
from torch import Tensor

from ..compiled import compiled
from ..device import architecture
from .backward_tiles import BACKWARD_MOVES
from .tiles import CHECKPOINT as PIECE
from .tiles import CHUNK, DTYPES, HEAD_DIM

STAGES = 2
ROWS = 64  # of S^T in a block
SPLITS = HEAD_DIM // ROWS


def recompute_states_kernel(dtype: str) -> Any:
    """Build the kernel for 16-bit inputs.

    Arguments of the kernel: k [T, H, K], v [T, HV, V], a and gates as `prepare_chunks` leaves them, checkpoints
    [pieces, HV, V, K] float32 of S^T, that of chunk PIECE j of document n at (cu_seqlens[n] // C + n) // PIECE + n + j;
    cu_seqlens [N + 1] int32; out, for the slots first_slot to last_slot: states [slots of the segment, HV, V, K] of S^T
    and writes [slots of the segment, HV, C, V] of X, 0 past the document's end; group = HV / H. The grid begins at
    piece first_piece and has `grid` pieces.
    """
    tokens, key_heads, value_heads = T.dynamic("tokens"), T.dynamic("key_heads"), T.dynamic("value_heads")
    offsets, slots, segment = T.dynamic("offsets"), T.dynamic("slots"), T.dynamic("segment")
    pieces = T.dynamic("pieces")

    @T.prim_func
    def recompute_states(
        k: T.Tensor((tokens, key_heads, HEAD_DIM), dtype),
        v: T.Tensor((tokens, value_heads, HEAD_DIM), dtype),
        a: T.Tensor((slots, value_heads, CHUNK, CHUNK), dtype),
        gates: T.Tensor((slots, value_heads, 2, CHUNK), "float32"),
        checkpoints: T.Tensor((pieces, value_heads, HEAD_DIM, HEAD_DIM), "float32"),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        states: T.Tensor((segment, value_heads, HEAD_DIM, HEAD_DIM), dtype),
        writes: T.Tensor((segment, value_heads, CHUNK, HEAD_DIM), dtype),
        group: T.int32,
        first_slot: T.int32,
        last_slot: T.int32,
        first_piece: T.int32,
        grid: T.int32,
    ):
        with T.Kernel(grid * value_heads * SPLITS, threads=256) as block:
            T.import_source(BACKWARD_MOVES)
            T.annotate_min_blocks_per_sm(2)
            k_tile = T.alloc_shared((STAGES, CHUNK, HEAD_DIM), dtype)
            v_tile = T.alloc_shared((STAGES, CHUNK, ROWS), dtype)
            a_tile = T.alloc_shared((STAGES, CHUNK, CHUNK), dtype)
            gate_tile = T.alloc_shared((STAGES, 2, CHUNK), "float32")
            s_tile = T.alloc_shared((2, ROWS, 64), dtype)
            x_tile = T.alloc_shared((CHUNK, ROWS), dtype)
            # exp(g), beta exp(g_C - g)
            decay = T.alloc_shared((2, CHUNK), "float32", scope="shared")
            rest = T.alloc_shared((2, CHUNK), "float32", scope="shared")
            T.annotate_layout(
                {
                    v_tile: tilelang.layout.make_swizzled_layout(v_tile),
                    s_tile: tilelang.layout.make_swizzled_layout(s_tile),
                    x_tile: tilelang.layout.make_swizzled_layout(x_tile),
                }
            )
            full, empty = T.alloc_barrier([32] * STAGES), T.alloc_barrier([160] * STAGES)
            ready, used = T.alloc_barrier([32] * 2), T.alloc_barrier([128] * 2)
            wrote, stored = T.alloc_barrier([128] * 2), T.alloc_barrier([32] * 2)

            state = T.alloc_fragment((ROWS, HEAD_DIM), "float32")
            state16 = T.alloc_fragment((ROWS, HEAD_DIM), dtype)
            w = T.alloc_fragment((ROWS, CHUNK), "float32")
            v16 = T.alloc_fragment((ROWS, CHUNK), dtype)
            w16 = T.alloc_fragment((ROWS, CHUNK), dtype)
            x = T.alloc_fragment((ROWS, CHUNK), "float32")
            x16 = T.alloc_fragment((ROWS, CHUNK), dtype)
            rest16 = T.alloc_fragment((ROWS, CHUNK), dtype)

            thread = T.get_thread_binding()
            low, high, middle = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            piece, head, key, v0 = (T.alloc_var("int32") for _ in range(4))
            start, length, slot = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            first_chunk, count = T.alloc_var("int32"), T.alloc_var("int32")
            piece = first_piece + T.truncdiv(block, value_heads * SPLITS)
            head = T.truncdiv(block, SPLITS) - (piece - first_piece) * value_heads
            v0 = block % SPLITS * ROWS
            key = T.truncdiv(head, group)
            # The last document whose first piece is not past this one.
            low = 0
            high = offsets - 2
            while low < high:
                middle = T.truncdiv(low + high + 1, 2)
                if T.truncdiv(T.truncdiv(cu_seqlens[middle], CHUNK) + middle, PIECE) + middle <= piece:
                    low = middle
                else:
                    high = middle - 1
            slot = T.truncdiv(cu_seqlens[low], CHUNK) + low
            first_chunk = (piece - T.truncdiv(slot, PIECE) - low) * PIECE
            start = cu_seqlens[low] + first_chunk * CHUNK
            length = cu_seqlens[low + 1] - start
            slot = slot + first_chunk
            # Chunks of the piece, as far as the segment goes; none if it ends before the segment begins.
            count = T.min(T.min(T.truncdiv(length + CHUNK - 1, CHUNK), PIECE), last_slot - slot)
            if slot + count <= first_slot:
                count = 0

            if thread < 128:
                T.set_max_nreg(216, 1)
                if count > 0:
                    for r, c in T.Parallel(ROWS, HEAD_DIM):
                        state[r, c] = checkpoints[piece, head, v0 + r, c]
                    T.barrier_wait(full[0], 0)
                    T.barrier_wait(ready[0], 0)
                    T.copy(state, state16)
                    T.wgmma_gemm(state16, k_tile[0, :, :], w, transpose_B=True, clear_accum=True)
                    T.call_extern("handle", "qla::load_transposed", v16.data, T.access_ptr(v_tile[0, 0, 0], "r"))
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(w)
                for n in T.serial(count):
                    for r, c in T.Parallel(ROWS, CHUNK):
                        w[r, c] = v16[r, c] - w[r, c] * decay[n % 2, c]
                    T.copy(w, w16)
                    T.wgmma_gemm(w16, a_tile[n % STAGES, :, :], x, transpose_B=True, clear_accum=True)
                    T.barrier_wait(stored[0], (n + 1) % 2)
                    T.call_extern("handle", "qla::store_columns", T.access_ptr(s_tile[0, 0, 0], "w"), state16.data)
                    T.fence_proxy_async()
                    T.barrier_arrive(wrote[0])
                    for r, c in T.Parallel(ROWS, HEAD_DIM):
                        state[r, c] *= decay[n % 2, CHUNK - 1]
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(x)
                    for r, c in T.Parallel(ROWS, CHUNK):
                        w[r, c] = x[r, c] * rest[n % 2, c]
                    T.copy(w, rest16)
                    T.wgmma_gemm(rest16, k_tile[n % STAGES, :, :], state)
                    T.copy(x, x16)
                    T.barrier_wait(stored[1], (n + 1) % 2)
                    T.call_extern("handle", "qla::store_transposed", T.access_ptr(x_tile[0, 0], "w"), x16.data)
                    T.fence_proxy_async()
                    T.barrier_arrive(wrote[1])
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(state)
                    T.barrier_arrive(empty[n % STAGES])
                    T.barrier_arrive(used[n % 2])
                    # The next chunk's first product (of no effect after the last chunk).
                    T.copy(state, state16)
                    if n + 1 < count:
                        T.barrier_wait(full[(n + 1) % STAGES], (n + 1) // STAGES % 2)
                        T.barrier_wait(ready[(n + 1) % 2], (n + 1) // 2 % 2)
                    T.wgmma_gemm(state16, k_tile[(n + 1) % STAGES, :, :], w, transpose_B=True, clear_accum=True)
                    T.call_extern(
                        "handle",
                        "qla::load_transposed",
                        v16.data,
                        T.access_ptr(v_tile[(n + 1) % STAGES, 0, 0], "r"),
                    )
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(w)

            else:
                T.set_max_nreg(32, 0)
                if thread < 160:
                    for n in T.serial(count):
                        left = start + n * CHUNK
                        T.barrier_wait(empty[n % STAGES], (n // STAGES + 1) % 2)
                        T.tma_copy(
                            k[left : left + CHUNK, key, 0:HEAD_DIM], k_tile[n % STAGES, :, :], barrier=full[n % STAGES]
                        )
                        T.tma_copy(
                            gates[slot + n, head, 0:2, 0:CHUNK], gate_tile[n % STAGES, :, :], barrier=full[n % STAGES]
                        )
                        T.tma_copy(
                            v[left : left + CHUNK, head, v0 : v0 + ROWS],
                            v_tile[n % STAGES, :, :],
                            barrier=full[n % STAGES],
                        )
                        T.tma_copy(
                            a[slot + n, head, 0:CHUNK, 0:CHUNK], a_tile[n % STAGES, :, :], barrier=full[n % STAGES]
                        )
                        T.barrier_arrive(full[n % STAGES])
                elif thread < 192:
                    for n in T.serial(count):
                        T.barrier_wait(wrote[0], n % 2)
                        if slot + n >= first_slot:
                            for half in T.unroll(2):
                                T.tma_copy(
                                    s_tile[half, :, :],
                                    states[slot + n - first_slot, head, v0 : v0 + ROWS, 64 * half : 64 * half + 64],
                                )
                            T.tma_store_wait(0)
                        T.barrier_arrive(stored[0])
                elif thread < 224:
                    for n in T.serial(count):
                        T.barrier_wait(wrote[1], n % 2)
                        if slot + n >= first_slot:
                            T.tma_copy(x_tile, writes[slot + n - first_slot, head, 0:CHUNK, v0 : v0 + ROWS])
                            T.tma_store_wait(0)
                        T.barrier_arrive(stored[1])
                else:
                    for n in T.serial(count):
                        rows = length - n * CHUNK
                        T.barrier_wait(full[n % STAGES], n // STAGES % 2)
                        T.barrier_wait(used[n % 2], (n // 2 + 1) % 2)
                        for c in T.Parallel(CHUNK):
                            decay[n % 2, c] = T.exp2(gate_tile[n % STAGES, 0, c])
                            rest[n % 2, c] = gate_tile[n % STAGES, 1, c] * T.exp2(
                                gate_tile[n % STAGES, 0, CHUNK - 1] - gate_tile[n % STAGES, 0, c]
                            )
                        if rows < CHUNK:
                            for r, c in T.Parallel(CHUNK, HEAD_DIM):
                                if r >= rows:
                                    k_tile[n % STAGES, r, c] = 0
                            for r, c in T.Parallel(CHUNK, ROWS):
                                if r >= rows:
                                    v_tile[n % STAGES, r, c] = 0
                            T.fence_proxy_async()
                        T.barrier_arrive(ready[n % 2])
                        T.barrier_arrive(empty[n % STAGES])

    return recompute_states


def recompute_states(
    k: Tensor,
    v: Tensor,
    a: Tensor,
    gates: Tensor,
    checkpoints: Tensor,
    cu_seqlens: Tensor,
    states: Tensor,
    writes: Tensor,
    segment: tuple[int, int],
) -> None:
    """Fill states and writes for the slots of `segment`; see `recompute_states_kernel` for the arguments."""
    first, last = segment
    # With n documents before it, a slot's piece is slot // PIECE + n, or one less.
    first_piece = max(0, first // PIECE - 1)
    last_piece = min(checkpoints.shape[0], (last - 1) // PIECE + cu_seqlens.shape[0] - 1)
    kernel = compiled(architecture(v.get_device()), recompute_states_kernel, DTYPES[v.dtype])
    kernel(
        k,
        v,
        a,
        gates,
        checkpoints,
        cu_seqlens,
        states,
        writes,
        v.shape[1] // k.shape[1],
        first,
        last,
        first_piece,
        last_piece - first_piece,
    )
