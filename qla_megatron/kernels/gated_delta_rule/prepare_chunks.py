"""Chunk preparation: the summed log gates and the matrix A of every chunk and value head.

    G[s, t] = exp(sum_{t < r <= s} g_r)                   s >= t
    A = (I + tril(K K^T * G, -1) diag(beta))^-1

diag(beta) A takes W = V - diag(exp(g)) K S to the corrected values (gated delta rule, arXiv 2412.06464, in the chunked
form of arXiv 2406.06484). The strengths stay outside: what multiplies A W has them, and the backward pass needs A W
itself, even where beta = 0. The gate goes in before the inverse, so that decay bounds it even where keys are not
normalised.
"""

from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from ..compiled import compiled
from ..device import architecture
from .tiles import CHUNK, DTYPES, HEAD_DIM, PAIR_TYPES, TILE_MOVES
from .triangle import ENTRY, TRIANGLE, TRIANGULAR_INVERSE

HEADS = 4  # value heads of a block, one warp each


def prepare_chunks_kernel(dtype: str) -> Any:
    """Build the kernel for 16-bit keys.

    Arguments of the kernel: k [T, H, K], g and beta [T, HV] float32, cu_seqlens [N + 1] int32; out: a [slots, HV, C, C]
    and gates [slots, HV, 2, C] float32: the log gates summed over the chunk in units of log 2 (past the document's end
    they stay as they are), and beta (0 there); group = HV / H. Chunk i of document n lies in slot cu_seqlens[n] // C +
    n + i: no two share one, and no prefix sum over documents is needed. Other slots are left as they are.
    """
    tokens, key_heads, value_heads = T.dynamic("tokens"), T.dynamic("key_heads"), T.dynamic("value_heads")
    offsets, slots = T.dynamic("offsets"), T.dynamic("slots")
    write_inverse = f"qla::write_inverse<{PAIR_TYPES[dtype]}>"

    @T.prim_func
    def prepare_chunks(
        k: T.Tensor((tokens, key_heads, HEAD_DIM), dtype),
        g: T.Tensor((tokens, value_heads), "float32"),
        beta: T.Tensor((tokens, value_heads), "float32"),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        a: T.Tensor((slots, value_heads, CHUNK, CHUNK), dtype),
        gates: T.Tensor((slots, value_heads, 2, CHUNK), "float32"),
        group: T.int32,
    ):
        with T.Kernel(slots * T.ceildiv(value_heads, HEADS), threads=32 * HEADS) as block:
            T.import_source(TILE_MOVES + TRIANGULAR_INVERSE)
            keys = T.alloc_shared((CHUNK, HEAD_DIM), dtype)
            others = T.alloc_shared((2, CHUNK, CHUNK), dtype)
            triangles = T.alloc_shared((HEADS, TRIANGLE), "float32")
            entries = T.alloc_shared((HEADS, ENTRY), "float32")
            own = T.alloc_local((4,), "float32")
            products = T.alloc_fragment((CHUNK, CHUNK), "float32")
            loaded = T.alloc_barrier(128)
            T.annotate_min_blocks_per_sm(3)

            first, last, document = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            middle, start, valid = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            head = T.alloc_var("int32")
            slot, head0 = T.alloc_var("int32"), T.alloc_var("int32")
            key0, key_count = T.alloc_var("int32"), T.alloc_var("int32")
            slot = T.truncdiv(block, T.ceildiv(value_heads, HEADS))
            head0 = (block - slot * T.ceildiv(value_heads, HEADS)) * HEADS

            # The last document whose first slot is not past this one.
            first = 0
            last = offsets - 2
            while first < last:
                middle = (first + last + 1) // 2
                if cu_seqlens[middle] // CHUNK + middle <= slot:
                    first = middle
                else:
                    last = middle - 1
            document = first
            start = cu_seqlens[document] + (slot - cu_seqlens[document] // CHUNK - document) * CHUNK
            valid = T.min(cu_seqlens[document + 1] - start, CHUNK)
            if valid > 0:
                key0 = T.truncdiv(head0, group)
                key_count = T.truncdiv(T.min(head0 + HEADS, value_heads) - 1, group) - key0 + 1
                T.tma_copy(k[start : start + CHUNK, key0, 0:HEAD_DIM], keys, barrier=loaded)
                T.barrier_arrive(loaded)
                warp = T.get_thread_binding() // 32
                head = head0 + warp
                if head < value_heads:
                    T.call_extern(
                        "handle",
                        "qla::load_gates",
                        own.data,
                        T.address_of(g[start, head]),
                        T.address_of(beta[start, head]),
                        T.cast(value_heads, "int64"),
                        valid,
                    )
                    T.call_extern(
                        "handle",
                        "qla::write_gates",
                        T.access_ptr(entries[warp, 0], "w"),
                        own.data,
                        T.address_of(gates[slot, head, 0, 0]),
                    )
                for n in T.serial(key_count):
                    T.barrier_wait(loaded, n % 2)
                    if valid < CHUNK:  # what follows the document is no number to multiply with
                        for h in T.serial(2):
                            T.call_extern("handle", "qla::clear_rows", T.access_ptr(keys[0, 64 * h], "w"), valid)
                        T.fence_proxy_async()
                    T.sync_threads()
                    T.gemm(keys, keys, products, transpose_B=True, clear_accum=True)
                    T.sync_threads()
                    if n + 1 < key_count:
                        T.tma_copy(k[start : start + CHUNK, key0 + n + 1, 0:HEAD_DIM], keys, barrier=loaded)
                        T.barrier_arrive(loaded)
                    for m in T.serial(HEADS):
                        if (head0 + m < value_heads) & (T.truncdiv(head0 + m, group) == key0 + n):
                            T.call_extern(
                                "handle",
                                "qla::store_triangle",
                                T.access_ptr(triangles[m, 0], "w"),
                                products.data,
                                T.access_ptr(entries[m, 0], "r"),
                            )
                T.sync_threads()
                if head < value_heads:
                    T.call_extern(
                        "handle",
                        write_inverse,
                        T.address_of(a[slot, head, 0, 0]),
                        T.access_ptr(triangles[warp, 0], "rw"),
                        T.access_ptr(entries[warp, 0], "r"),
                        T.access_ptr(keys[0, 0], "rw"),
                        T.access_ptr(others[0, 0, 0], "rw"),
                    )

    return prepare_chunks


def prepare_chunks(k: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """A [slots, HV, 64, 64] in k's dtype and the gates [slots, HV, 2, 64] float32; see `prepare_chunks_kernel`."""
    tokens, value_heads = g.shape
    slots = tokens // CHUNK + cu_seqlens.shape[0] - 1
    a = torch.empty(slots, value_heads, CHUNK, CHUNK, dtype=k.dtype, device=k.device)
    gates = torch.empty(slots, value_heads, 2, CHUNK, dtype=torch.float32, device=k.device)
    kernel = compiled(architecture(k.get_device()), prepare_chunks_kernel, DTYPES[k.dtype])
    kernel(k, g, beta, cu_seqlens, a, gates, value_heads // k.shape[1])
    return a, gates
