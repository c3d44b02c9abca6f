"""What the memory-bound kernels share: rows of 16-bit numbers streamed through shared memory, 16 bytes a thread.

A warp takes two heads of 128 channels side by side, 16 threads each, and walks over the tokens of its tile. Rows come
by asynchronous copies into a ring of its own for every thread: many are on their way at a time without costing
registers, and no thread waits for another.
"""

import torch
from torch import Tensor

from .backend import DTYPES as DTYPES
from .backend import HEAD_DIM as HEAD_DIM
from .backend import PAIR_TYPES as PAIR_TYPES
from .device import multiprocessors

THREADS = 128  # of a block; a warp is a unit of work
WARPS = THREADS // 32
WEIGHT_TYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
CUDA_TYPES = {"bfloat16": "__nv_bfloat16", "float16": "__half", "float32": "float"}

ROWS = r"""
#include <tl_templates/cuda/common.h>
namespace qla {

template <typename Pair> struct Numbers;
template <> struct Numbers<__nv_bfloat162> {
  static __device__ __forceinline__ float2 wide(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
  static __device__ __forceinline__ uint32_t narrow(float a, float b) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t *>(&pair);
  }
};
template <> struct Numbers<__half2> {
  static __device__ __forceinline__ float2 wide(uint32_t pair) {
    return __half22float2(*reinterpret_cast<const __half2 *>(&pair));
  }
  static __device__ __forceinline__ uint32_t narrow(float a, float b) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t *>(&pair);
  }
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <typename Pair> __device__ __forceinline__ void widen(float (&out)[8], uint4 packed) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float2 pair = Numbers<Pair>::wide(words[e]);
    out[2 * e] = pair.x;
    out[2 * e + 1] = pair.y;
  }
}

template <typename Pair> __device__ __forceinline__ uint4 narrow(const float (&x)[8]) {
  return make_uint4(Numbers<Pair>::narrow(x[0], x[1]), Numbers<Pair>::narrow(x[2], x[3]),
                    Numbers<Pair>::narrow(x[4], x[5]), Numbers<Pair>::narrow(x[6], x[7]));
}

// Eight numbers to or from global memory that is aligned to kBytes.
template <int kBytes> __device__ __forceinline__ uint4 load_numbers(const void *source) {
  uint4 packed;
  if constexpr (kBytes == 16) {
    packed = *static_cast<const uint4 *>(source);
  } else if constexpr (kBytes == 8) {
    const uint2 *p = static_cast<const uint2 *>(source);
    const uint2 a = p[0], b = p[1];
    packed = make_uint4(a.x, a.y, b.x, b.y);
  } else {
    const uint32_t *p = static_cast<const uint32_t *>(source);
    packed = make_uint4(p[0], p[1], p[2], p[3]);
  }
  return packed;
}

template <int kBytes> __device__ __forceinline__ void store_numbers(void *target, uint4 packed) {
  if constexpr (kBytes == 16) {
    *static_cast<uint4 *>(target) = packed;
  } else if constexpr (kBytes == 8) {
    uint2 *p = static_cast<uint2 *>(target);
    p[0] = make_uint2(packed.x, packed.y);
    p[1] = make_uint2(packed.z, packed.w);
  } else {
    uint32_t *p = static_cast<uint32_t *>(target);
    p[0] = packed.x; p[1] = packed.y; p[2] = packed.z; p[3] = packed.w;
  }
}

// The coming rows of one thread's eight channels, in a ring of kDepth rows of QLA_THREADS pieces. Row n is asked for
// kDepth - 1 rows ahead, into the slot that was read one row earlier.
template <int kBytes> __device__ __forceinline__ void ask_for_row(uint32_t ring, int slot, const char *row) {
  const uint32_t target = ring + slot * (QLA_THREADS * 16);
#pragma unroll
  for (int byte = 0; byte < 16; byte += kBytes) {
    if constexpr (kBytes == 16) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(target), "l"(row) : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                   : : "r"(target + byte), "l"(row + byte), "n"(kBytes) : "memory");
    }
  }
}

__device__ __forceinline__ uint32_t own_ring(const void *ring) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(ring)) + threadIdx.x * 16;
}

__device__ __forceinline__ uint4 read_row(uint32_t ring, int slot) {
  uint4 packed;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(packed.x), "=r"(packed.y), "=r"(packed.z), "=r"(packed.w)
               : "r"(ring + slot * (QLA_THREADS * 16)) : "memory");
  return packed;
}

__device__ __forceinline__ void commit_rows() { asm volatile("cp.async.commit_group;" : : : "memory"); }

template <int kPending> __device__ __forceinline__ void wait_for_rows() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
}

// The sum over the 16 threads of a head
__device__ __forceinline__ float sum_over_head(float x) {
#pragma unroll
  for (int d = 8; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  return x;
}

// The special function unit itself, without the steps that denormal numbers would take
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.f + power_of_two(-1.4426950408889634f * x)); }

}  // namespace qla
""".replace("QLA_THREADS", str(THREADS))


def alignment(*tensors: Tensor) -> int:
    """Bytes, 16 at most, to which every row of eight-channel groups of all these 16-bit tensors is aligned.

    Raises:
        NotImplementedError: fewer than 4.
    """
    bits = 16
    for x in tensors:
        bits |= x.data_ptr()
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
            bits |= stride * x.element_size() if size > 1 else 0
    bytes_ = bits & -bits
    if bytes_ < 4:
        raise NotImplementedError(
            f"the fused kernels take rows aligned to 4 bytes, got {bytes_}: a row stride or offset is odd; "
            'backend="reference" takes any'
        )
    return bytes_


def tile_length(tokens: int, columns: int, blocks: int, index: int, waves: int = 1) -> int:
    """Tokens of a tile, so that `columns` warps a tile of tokens fill a device `waves` times.

    Args:
        tokens: of one row of the batch.
        columns: warps side by side: pairs of heads, times rows of the batch.
        blocks: that a multiprocessor holds.
        index: of the device.
    """
    tiles = max(1, multiprocessors(index) * blocks * WARPS * waves // columns)
    return max(16, -(-tokens // tiles))
