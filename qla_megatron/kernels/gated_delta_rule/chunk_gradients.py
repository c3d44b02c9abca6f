"""The chunk-parallel pass of the backward: dq, dk, dg and dbeta, once the states and their gradients are known.

Per chunk and value head, with S the state at the chunk's start, dS the gradient of the state at its end, X what
`recompute_states` and dV what `state_gradient` left, G and the gates of `prepare_chunks`:

    F = dO X^T      U = scale G * F                      dQ = diag(scale exp(g)) dO S^T + U diag(beta) K
    E = dV X^T      L = -tril(G * E, -1)                 dK = diag(beta exp(g_C - g)) X dS^T - diag(exp(g)) dV S^T
    Y[r, t] = sum_{s >= r} (U * Q K^T + L * K K^T)            + diag(beta) U^T Q + (L diag(beta) + diag(beta) L^T) K

    dbeta_t = Y[0, t] + exp(g_C - g_t) k_t . dS x_t
    dg_r    = sum_{s >= r} a_s + sum_{t < r} beta_t Y[r, t] + sum_{t < r} e_t + exp(g_C) sum(S * dS)

where a_s = q_s . (the first term of dQ)_s - exp(g_s) k_s . S dv_s, and e_t = k_t . (the first term of dK)_t. Nothing is
subtracted in dg: see README.md.

A block takes a chunk of one key head after another, and sums dQ and dK over the value heads of the group. Warpgroups:
0 is for dQ, 1 for dK through dV and L, 2 for dK through dS and U, for dg and dbeta; of the last, warp 0 loads, warps 1
and 2 multiply S with dS, warp 3 zeroes the tails of Q and K. With m the m-th chunk and n the n-th head of this block,
s = n % 2:

    barrier          says                                arrivals                     waited for by            parity
    keys_full        Q, K of m have landed               32 of the loading warp       warp 3                   m
    keys_ready       and their tails are zero            32 of warp 3                 warpgroups               m
    keys_empty       Q, K of m were read                 384                          loading warp             m + 1
    full[s]          X, dV, dO, gates of n have landed   32 of the loading warp       warpgroups               n / 2
    empty[s]         they were read                      384                          loading warp             n / 2 + 1
    state_full       S of n has landed                   32 of the loading warp       warpgroups 0, 1, warps   n
    state_empty      it was read                         256 + 64                     loading warp             n + 1
    gradient_full    dS of n has landed                  32 of the loading warp       warpgroup 2, warps       n
    gradient_empty   it was read                         128 + 64                     loading warp             n + 1
    scored           the tiles of U and L are there      256                          warpgroup 2              n
    unscored         they were read                      128 of warpgroup 2           warpgroups 0, 1          n + 1
    dotted           the row sums for dg are there       256 + 64                     warpgroup 2              n
    undotted         they were read                      128 of warpgroup 2           warpgroups 0, 1, warps   n + 1
    exchange_free    X, dV of m's last head were read    128 of warpgroup 1           warpgroup 2              m
    exchange_full    half of dK lies in their place      128 of warpgroup 2           warpgroup 1              m

Every wait is for an event of the same or of an earlier head; no event of a head waits for one of a later head.
"""

from typing import Any

import tilelang
import tilelang.language as T
from torch import Tensor

from ..compiled import compiled
from ..device import architecture, multiprocessors
from .backward_tiles import CHUNK_GRADIENTS
from .tiles import CHUNK, DTYPES, HEAD_DIM, PAIR_TYPES

HALF = HEAD_DIM // 2


def chunk_gradients_kernel(dtype: str) -> Any:
    """Build the kernel for 16-bit inputs.

    Arguments of the kernel: q, k [T, H, K], do and dv [T, HV, V], gates as `prepare_chunks` leaves them; states and
    dstates [slots of the segment, HV, V, K] and writes [slots of the segment, HV, C, V] for the slots first_slot to
    last_slot; cu_seqlens [N + 1] int32; out: dq, dk [T, H, K], dg, dbeta [T, HV] float32, 0 past the last document;
    scale; group = HV / H; blocks = the size of the grid.
    """
    tokens, key_heads, value_heads = T.dynamic("tokens"), T.dynamic("key_heads"), T.dynamic("value_heads")
    offsets, slots, segment = T.dynamic("offsets"), T.dynamic("slots"), T.dynamic("segment")
    pair = PAIR_TYPES[dtype]

    @T.prim_func
    def chunk_gradients(
        q: T.Tensor((tokens, key_heads, HEAD_DIM), dtype),
        k: T.Tensor((tokens, key_heads, HEAD_DIM), dtype),
        do: T.Tensor((tokens, value_heads, HEAD_DIM), dtype),
        dv: T.Tensor((tokens, value_heads, HEAD_DIM), dtype),
        gates: T.Tensor((slots, value_heads, 2, CHUNK), "float32"),
        states: T.Tensor((segment, value_heads, HEAD_DIM, HEAD_DIM), dtype),
        dstates: T.Tensor((segment, value_heads, HEAD_DIM, HEAD_DIM), dtype),
        writes: T.Tensor((segment, value_heads, CHUNK, HEAD_DIM), dtype),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        dq: T.Tensor((tokens, key_heads, HEAD_DIM), dtype),
        dk: T.Tensor((tokens, key_heads, HEAD_DIM), dtype),
        dg: T.Tensor((tokens, value_heads), "float32"),
        dbeta: T.Tensor((tokens, value_heads), "float32"),
        scale: T.float32,
        group: T.int32,
        first_slot: T.int32,
        last_slot: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=512) as block:
            T.import_source(CHUNK_GRADIENTS)
            q_tile = T.alloc_shared((CHUNK, HEAD_DIM), dtype)
            k_tile = T.alloc_shared((CHUNK, HEAD_DIM), dtype)
            x_tile = T.alloc_shared((2, CHUNK, HEAD_DIM), dtype)
            dv_tile = T.alloc_shared((2, CHUNK, HEAD_DIM), dtype)
            do_tile = T.alloc_shared((2, CHUNK, HEAD_DIM), dtype)
            s_tile = T.alloc_shared((2, HEAD_DIM, HALF), dtype)
            ds_tile = T.alloc_shared((2, HEAD_DIM, HALF), dtype)
            u_tile = T.alloc_shared((CHUNK, CHUNK), dtype)
            l_tile = T.alloc_shared((CHUNK, CHUNK), dtype)
            between_u = T.alloc_shared((CHUNK, CHUNK), dtype)
            between_l = T.alloc_shared((CHUNK, CHUNK), dtype)
            gate_tile = T.alloc_shared((2, 2, CHUNK), "float32")
            # rows: q . dO S^T, k . dV S^T, k . X dS^T, crossing, columns
            rows = T.alloc_shared((5, CHUNK), "float32", scope="shared")
            whole = T.alloc_shared((2,), "float32", scope="shared")
            T.annotate_layout(
                {
                    tile: tilelang.layout.make_swizzled_layout(tile)
                    for tile in (
                        q_tile,
                        k_tile,
                        x_tile,
                        dv_tile,
                        do_tile,
                        s_tile,
                        ds_tile,
                        u_tile,
                        l_tile,
                        between_u,
                        between_l,
                    )
                }
            )
            keys_full, keys_ready, keys_empty = T.alloc_barrier(32), T.alloc_barrier(32), T.alloc_barrier(384)
            full, empty = T.alloc_barrier([32] * 2), T.alloc_barrier([384] * 2)
            state_full, state_empty = T.alloc_barrier(32), T.alloc_barrier(320)
            gradient_full, gradient_empty = T.alloc_barrier(32), T.alloc_barrier(192)
            scored, unscored = T.alloc_barrier(256), T.alloc_barrier(128)
            dotted, undotted = T.alloc_barrier(320), T.alloc_barrier(128)
            exchange_free, exchange_full = T.alloc_barrier(128), T.alloc_barrier(128)

            dq_sum = T.alloc_fragment((CHUNK, HEAD_DIM), "float32")
            qk = T.alloc_fragment((CHUNK, CHUNK), "float32")
            f = T.alloc_fragment((CHUNK, CHUNK), "float32")
            u16 = T.alloc_fragment((CHUNK, CHUNK), dtype)
            from_state = T.alloc_fragment((CHUNK, HALF), "float32")
            dk_sum = T.alloc_fragment((CHUNK, HEAD_DIM), "float32")
            kk = T.alloc_fragment((CHUNK, CHUNK), "float32")
            e = T.alloc_fragment((CHUNK, CHUNK), "float32")
            l16 = T.alloc_fragment((CHUNK, CHUNK), dtype)
            from_value = T.alloc_fragment((CHUNK, HALF), "float32")
            dk_part = T.alloc_fragment((CHUNK, HEAD_DIM), "float32")
            to_state = T.alloc_fragment((CHUNK, HALF), "float32")
            not_before = T.alloc_fragment((CHUNK, CHUNK), dtype)
            y = T.alloc_fragment((CHUNK, CHUNK), "float32")

            thread = T.get_thread_binding()
            place, dots = T.alloc_local((2,), "int32"), T.alloc_local((2,), "float32")
            factors = T.alloc_local((2,), "float32")
            items, slot, key, head = (T.alloc_var("int32") for _ in range(4))
            m, n, left, valid = (T.alloc_var("int32") for _ in range(4))
            row = (thread % 128) // 32 * 16 + thread % 32 // 4
            items = (last_slot - first_slot) * key_heads
            m = 0
            n = 0

            if thread < 128:
                T.set_max_nreg(160, 1)
                for item in T.serial(T.truncdiv(items - block + blocks - 1, blocks)):
                    slot = first_slot + T.truncdiv(block + item * blocks, key_heads)
                    key = (block + item * blocks) % key_heads
                    T.call_extern(
                        "handle", "qla::locate_chunk", place.data, T.address_of(cu_seqlens[0]), offsets - 1, slot
                    )
                    valid = place[1]
                    if valid > 0:
                        T.barrier_wait(keys_ready, m % 2)
                        T.wgmma_gemm(q_tile, k_tile, qk, transpose_B=True, clear_accum=True)
                        T.clear(dq_sum)
                        T.wait_wgmma(0)
                        T.warpgroup_fence_operand(qk)
                        for _ in T.serial(group):
                            T.barrier_wait(full[n % 2], n // 2 % 2)
                            T.wgmma_gemm(
                                do_tile[n % 2, :, :], x_tile[n % 2, :, :], f, transpose_B=True, clear_accum=True
                            )
                            T.wait_wgmma(0)
                            T.warpgroup_fence_operand(f)
                            T.barrier_wait(unscored, (n + 1) % 2)
                            T.call_extern(
                                "handle",
                                f"qla::score_gradients<{pair}>",
                                u16.data,
                                T.access_ptr(u_tile[0, 0], "w"),
                                T.access_ptr(between_u[0, 0], "w"),
                                f.data,
                                qk.data,
                                T.access_ptr(gate_tile[n % 2, 0, 0], "r"),
                                scale,
                                valid,
                            )
                            T.fence_proxy_async()
                            T.barrier_arrive(scored)
                            T.wgmma_gemm(u16, k_tile, dq_sum)
                            factors[0] = scale * T.exp2(gate_tile[n % 2, 0, row])
                            factors[1] = scale * T.exp2(gate_tile[n % 2, 0, row + 8])
                            dots[0] = 0
                            dots[1] = 0
                            T.barrier_wait(state_full, n % 2)
                            T.wait_wgmma(0)
                            T.warpgroup_fence_operand(dq_sum)
                            for half in T.unroll(2):
                                T.wgmma_gemm(do_tile[n % 2, :, :], s_tile[half, :, :], from_state, clear_accum=True)
                                T.wait_wgmma(0)
                                T.warpgroup_fence_operand(from_state)
                                T.call_extern(
                                    "handle",
                                    f"qla::add_rows<{pair}>",
                                    dq_sum.data,
                                    half,
                                    from_state.data,
                                    T.access_ptr(q_tile[0, half * HALF], "r"),
                                    dots.data,
                                    factors[0],
                                    factors[1],
                                )
                            T.barrier_arrive(state_empty)
                            T.barrier_arrive(empty[n % 2])
                            T.barrier_wait(undotted, (n + 1) % 2)
                            T.call_extern(
                                "handle",
                                "qla::store_dots",
                                T.access_ptr(rows[0, 0], "w"),
                                dots.data,
                                factors[0],
                                factors[1],
                            )
                            T.barrier_arrive(dotted)
                            n = n + 1
                        T.barrier_arrive(keys_empty)
                        m = m + 1
                        T.call_extern(
                            "handle",
                            f"qla::store_accumulator<{pair}>",
                            T.address_of(dq[0, 0, 0]),
                            dq_sum.data,
                            place[0],
                            key,
                            key_heads,
                            valid,
                        )

            elif thread < 256:
                T.set_max_nreg(160, 1)
                for item in T.serial(T.truncdiv(items - block + blocks - 1, blocks)):
                    slot = first_slot + T.truncdiv(block + item * blocks, key_heads)
                    key = (block + item * blocks) % key_heads
                    T.call_extern(
                        "handle", "qla::locate_chunk", place.data, T.address_of(cu_seqlens[0]), offsets - 1, slot
                    )
                    valid = place[1]
                    if valid > 0:
                        T.barrier_wait(keys_ready, m % 2)
                        T.wgmma_gemm(k_tile, k_tile, kk, transpose_B=True, clear_accum=True)
                        T.clear(dk_sum)
                        T.wait_wgmma(0)
                        T.warpgroup_fence_operand(kk)
                        for h in T.serial(group):
                            T.barrier_wait(full[n % 2], n // 2 % 2)
                            T.wgmma_gemm(
                                dv_tile[n % 2, :, :], x_tile[n % 2, :, :], e, transpose_B=True, clear_accum=True
                            )
                            T.wait_wgmma(0)
                            T.warpgroup_fence_operand(e)
                            T.barrier_wait(unscored, (n + 1) % 2)
                            T.sync_threads(1, 128)  # l_tile was read by all of the warpgroup
                            T.call_extern(
                                "handle",
                                f"qla::key_gradients<{pair}>",
                                l16.data,
                                T.access_ptr(l_tile[0, 0], "w"),
                                T.access_ptr(between_l[0, 0], "w"),
                                e.data,
                                kk.data,
                                T.access_ptr(gate_tile[n % 2, 0, 0], "r"),
                                valid,
                            )
                            T.fence_proxy_async()
                            T.barrier_arrive(scored)
                            T.sync_threads(1, 128)  # and will be
                            T.wgmma_gemm(l16, k_tile, dk_sum)
                            T.wgmma_gemm(l_tile, k_tile, dk_sum, transpose_A=True)
                            factors[0] = -T.exp2(gate_tile[n % 2, 0, row])
                            factors[1] = -T.exp2(gate_tile[n % 2, 0, row + 8])
                            dots[0] = 0
                            dots[1] = 0
                            T.barrier_wait(state_full, n % 2)
                            T.wait_wgmma(0)
                            T.warpgroup_fence_operand(dk_sum)
                            for half in T.unroll(2):
                                T.wgmma_gemm(dv_tile[n % 2, :, :], s_tile[half, :, :], from_value, clear_accum=True)
                                T.wait_wgmma(0)
                                T.warpgroup_fence_operand(from_value)
                                T.call_extern(
                                    "handle",
                                    f"qla::add_rows<{pair}>",
                                    dk_sum.data,
                                    half,
                                    from_value.data,
                                    T.access_ptr(k_tile[0, half * HALF], "r"),
                                    dots.data,
                                    factors[0],
                                    factors[1],
                                )
                            T.barrier_arrive(state_empty)
                            T.barrier_wait(undotted, (n + 1) % 2)
                            T.call_extern(
                                "handle",
                                "qla::store_dots",
                                T.access_ptr(rows[1, 0], "w"),
                                dots.data,
                                factors[0],
                                factors[1],
                            )
                            T.barrier_arrive(dotted)
                            if h < group - 1:
                                T.barrier_arrive(empty[n % 2])
                            n = n + 1
                        T.barrier_arrive(keys_empty)
                        T.barrier_arrive(exchange_free)
                        T.barrier_wait(exchange_full, m % 2)
                        m = m + 1
                        T.call_extern(
                            "handle",
                            "qla::take_over",
                            dk_sum.data,
                            T.access_ptr(x_tile[(n + 1) % 2, 0, 0], "r"),
                            T.access_ptr(dv_tile[(n + 1) % 2, 0, 0], "r"),
                        )
                        T.fence_proxy_async()
                        T.barrier_arrive(empty[(n + 1) % 2])
                        T.call_extern(
                            "handle",
                            f"qla::store_accumulator<{pair}>",
                            T.address_of(dk[0, 0, 0]),
                            dk_sum.data,
                            place[0],
                            key,
                            key_heads,
                            valid,
                        )

            elif thread < 384:
                T.set_max_nreg(160, 1)
                for item in T.serial(T.truncdiv(items - block + blocks - 1, blocks)):
                    slot = first_slot + T.truncdiv(block + item * blocks, key_heads)
                    key = (block + item * blocks) % key_heads
                    T.call_extern(
                        "handle", "qla::locate_chunk", place.data, T.address_of(cu_seqlens[0]), offsets - 1, slot
                    )
                    valid = place[1]
                    if valid > 0:
                        T.clear(dk_part)
                        T.barrier_wait(keys_ready, m % 2)
                        for h in T.serial(group):
                            T.barrier_wait(full[n % 2], n // 2 % 2)
                            for x in T.unroll(2):
                                factors[x] = gate_tile[n % 2, 1, row + 8 * x] * T.exp2(
                                    gate_tile[n % 2, 0, CHUNK - 1] - gate_tile[n % 2, 0, row + 8 * x]
                                )
                                dots[x] = 0
                            T.barrier_wait(gradient_full, n % 2)
                            for half in T.unroll(2):
                                T.wgmma_gemm(x_tile[n % 2, :, :], ds_tile[half, :, :], to_state, clear_accum=True)
                                T.wait_wgmma(0)
                                T.warpgroup_fence_operand(to_state)
                                T.call_extern(
                                    "handle",
                                    f"qla::add_rows<{pair}>",
                                    dk_part.data,
                                    half,
                                    to_state.data,
                                    T.access_ptr(k_tile[0, half * HALF], "r"),
                                    dots.data,
                                    factors[0],
                                    factors[1],
                                )
                            T.barrier_arrive(gradient_empty)
                            T.call_extern("handle", f"qla::fill_not_before<{pair}>", not_before.data, n)
                            T.barrier_wait(scored, n % 2)
                            T.wgmma_gemm(not_before, between_u, y, clear_accum=True)
                            T.wgmma_gemm(not_before, between_l, y)
                            T.wgmma_gemm(u_tile, q_tile, dk_part, transpose_A=True)
                            T.call_extern(
                                "handle", "qla::store_dots", T.access_ptr(rows[2, 0], "w"), dots.data, 1.0, 1.0
                            )
                            T.wait_wgmma(1)
                            T.warpgroup_fence_operand(y)
                            T.call_extern(
                                "handle",
                                "qla::sum_crossing",
                                T.access_ptr(rows[3, 0], "w"),
                                T.access_ptr(rows[4, 0], "w"),
                                y.data,
                                T.access_ptr(gate_tile[n % 2, 0, 0], "r"),
                            )
                            T.wait_wgmma(0)
                            T.warpgroup_fence_operand(dk_part)
                            T.barrier_arrive(unscored)
                            T.sync_threads(2, 128)
                            T.barrier_wait(dotted, n % 2)
                            head = key * group + h
                            if thread < 288:
                                T.call_extern(
                                    "handle",
                                    "qla::store_gate_gradients",
                                    T.address_of(dg[place[0], head]),
                                    T.address_of(dbeta[place[0], head]),
                                    T.cast(value_heads, "int64"),
                                    T.access_ptr(rows[0, 0], "r"),
                                    T.access_ptr(rows[1, 0], "r"),
                                    T.access_ptr(rows[2, 0], "r"),
                                    T.access_ptr(rows[3, 0], "r"),
                                    T.access_ptr(rows[4, 0], "r"),
                                    T.access_ptr(whole[0], "r"),
                                    T.access_ptr(gate_tile[n % 2, 0, 0], "r"),
                                    valid,
                                )
                            T.sync_threads(2, 128)  # the rows are read before they are written again
                            T.barrier_arrive(undotted)
                            if h < group - 1:
                                T.barrier_arrive(empty[n % 2])
                            n = n + 1
                        T.barrier_arrive(keys_empty)
                        T.barrier_wait(exchange_free, m % 2)
                        m = m + 1
                        T.call_extern(
                            "handle",
                            "qla::hand_over",
                            T.access_ptr(x_tile[(n + 1) % 2, 0, 0], "w"),
                            T.access_ptr(dv_tile[(n + 1) % 2, 0, 0], "w"),
                            dk_part.data,
                        )
                        T.fence_proxy_async()
                        T.barrier_arrive(exchange_full)
                        T.barrier_arrive(empty[(n + 1) % 2])

            else:
                T.set_max_nreg(32, 0)
                for item in T.serial(T.truncdiv(items - block + blocks - 1, blocks)):
                    slot = first_slot + T.truncdiv(block + item * blocks, key_heads)
                    key = (block + item * blocks) % key_heads
                    T.call_extern(
                        "handle", "qla::locate_chunk", place.data, T.address_of(cu_seqlens[0]), offsets - 1, slot
                    )
                    valid = place[1]
                    left = place[0]
                    if valid > 0:
                        if thread < 416:
                            for h in T.serial(group):
                                head = key * group + h
                                T.barrier_wait(empty[n % 2], (n // 2 + 1) % 2)
                                T.tma_copy(gates[slot, head, 0:2, 0:CHUNK], gate_tile[n % 2, :, :], barrier=full[n % 2])
                                T.tma_copy(
                                    writes[slot - first_slot, head, 0:CHUNK, 0:HEAD_DIM],
                                    x_tile[n % 2, :, :],
                                    barrier=full[n % 2],
                                )
                                T.tma_copy(
                                    dv[left : left + CHUNK, head, 0:HEAD_DIM], dv_tile[n % 2, :, :], barrier=full[n % 2]
                                )
                                T.tma_copy(
                                    do[left : left + CHUNK, head, 0:HEAD_DIM], do_tile[n % 2, :, :], barrier=full[n % 2]
                                )
                                T.barrier_arrive(full[n % 2])
                                T.barrier_wait(gradient_empty, (n + 1) % 2)
                                for half in T.unroll(2):
                                    T.tma_copy(
                                        dstates[slot - first_slot, head, 0:HEAD_DIM, half * HALF : half * HALF + HALF],
                                        ds_tile[half, :, :],
                                        barrier=gradient_full,
                                    )
                                T.barrier_arrive(gradient_full)
                                if h == 0:
                                    T.barrier_wait(keys_empty, (m + 1) % 2)
                                    T.tma_copy(k[left : left + CHUNK, key, 0:HEAD_DIM], k_tile, barrier=keys_full)
                                    T.tma_copy(q[left : left + CHUNK, key, 0:HEAD_DIM], q_tile, barrier=keys_full)
                                    T.barrier_arrive(keys_full)
                                T.barrier_wait(state_empty, (n + 1) % 2)
                                for half in T.unroll(2):
                                    T.tma_copy(
                                        states[slot - first_slot, head, 0:HEAD_DIM, half * HALF : half * HALF + HALF],
                                        s_tile[half, :, :],
                                        barrier=state_full,
                                    )
                                T.barrier_arrive(state_full)
                                n = n + 1
                        elif thread < 480:
                            for _ in T.serial(group):
                                T.barrier_wait(gradient_full, n % 2)
                                T.barrier_wait(state_full, n % 2)
                                T.barrier_wait(undotted, (n + 1) % 2)
                                T.call_extern(
                                    "handle",
                                    f"qla::multiply_states<{pair}>",
                                    T.access_ptr(whole[0], "w"),
                                    T.access_ptr(s_tile[0, 0, 0], "r"),
                                    T.access_ptr(ds_tile[0, 0, 0], "r"),
                                    thread - 416,
                                    64,
                                )
                                T.barrier_arrive(state_empty)
                                T.barrier_arrive(gradient_empty)
                                T.barrier_arrive(dotted)
                                n = n + 1
                        else:
                            T.barrier_wait(keys_full, m % 2)
                            if valid < CHUNK:
                                for r, c in T.Parallel(CHUNK, HEAD_DIM):
                                    if r >= valid:
                                        q_tile[r, c] = 0
                                        k_tile[r, c] = 0
                                T.fence_proxy_async()
                            T.barrier_arrive(keys_ready)
                        m = m + 1
                if thread >= 480:
                    # Rows past the last document, a row a block.
                    left = cu_seqlens[offsets - 1] + block
                    for x in T.serial(T.truncdiv(tokens - left + blocks - 1, blocks)):
                        for h in T.serial(key_heads):
                            for c in T.Parallel(HEAD_DIM):
                                dq[left + x * blocks, h, c] = 0
                                dk[left + x * blocks, h, c] = 0
                        for h in T.serial(value_heads):
                            if thread == 480:
                                dg[left + x * blocks, h] = 0
                                dbeta[left + x * blocks, h] = 0

    return chunk_gradients


def compute_chunk_gradients(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    dv: Tensor,
    gates: Tensor,
    states: Tensor,
    dstates: Tensor,
    writes: Tensor,
    cu_seqlens: Tensor,
    dq: Tensor,
    dk: Tensor,
    dg: Tensor,
    dbeta: Tensor,
    scale: float,
    segment: tuple[int, int],
) -> None:
    """Fill dq, dk, dg and dbeta for the slots of `segment`; see `chunk_gradients_kernel` for the arguments."""
    index, key_heads = do.get_device(), k.shape[1]
    kernel = compiled(architecture(index), chunk_gradients_kernel, DTYPES[do.dtype])
    group = do.shape[1] // key_heads
    blocks = min(multiprocessors(index), (segment[1] - segment[0]) * key_heads)
    inputs = (q, k, do, dv, gates, states, dstates, writes, cu_seqlens)
    kernel(*inputs, dq, dk, dg, dbeta, scale, group, *segment, blocks)
