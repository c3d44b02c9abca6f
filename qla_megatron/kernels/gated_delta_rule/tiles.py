"""Tile sizes and the inline device functions shared by the kernels of this op.

TileLang writes the matrix products, the bulk copies and the barriers. What works on single registers of its fragments
is plain CUDA, inlined into the kernels: here the moves between a swizzled shared tile and fragments and the gates on
scores, in `triangle.py` the inverse.
"""

from ..backend import DTYPES as DTYPES
from ..backend import HEAD_DIM as HEAD_DIM
from ..backend import PAIR_TYPES as PAIR_TYPES
from ..varlen import CHUNK as CHUNK

CHECKPOINT = 16  # chunks between two kept states


def checkpoint_count(slots: int, documents: int) -> int:
    """Room for the states at the starts of chunks 0, 16, 32, ... of every document.

    That of chunk 16 j of document n lies at slot0 // 16 + n + j, with slot0 = cu_seqlens[n] // 64 + n its first slot:
    unique, and known without a prefix sum over documents.
    """
    return slots // CHECKPOINT + documents


ROUNDING = r"""
#include <tl_templates/cuda/common.h>
namespace qla {

template <typename Pair> __device__ __forceinline__ uint32_t round_pair(float a, float b);
template <> __device__ __forceinline__ uint32_t round_pair<__nv_bfloat162>(float a, float b) {
  __nv_bfloat162 p = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<uint32_t *>(&p);
}
template <> __device__ __forceinline__ uint32_t round_pair<__half2>(float a, float b) {
  __half2 p = __floats2half2_rn(a, b);
  return *reinterpret_cast<uint32_t *>(&p);
}

}  // namespace qla
"""

# A warpgroup's accumulator of 64 x 64 holds, in lane (4 g + t) of warp w, rows 16 w + 8 h + g and columns
# 8 j + 2 t + {0, 1}: as 16-bit pairs that is word 2 j + h. Shared tiles have 64 rows of 128 bytes, their 16-byte pieces
# swizzled by the row's low three bits. `transposed` moves take a row of the tile for a column of the accumulator.
TILE_MOVES = (
    ROUNDING
    + r"""
namespace qla {

__device__ __forceinline__ uint32_t transposed_tile_address(const void *tile, int pair) {
  const int lane = threadIdx.x & 31;
  const int warp = (threadIdx.x >> 5) & 3;
  const int row = 8 * (2 * pair + (lane >> 4)) + (lane & 7);
  const int piece = 2 * warp + ((lane >> 3) & 1);
  return static_cast<uint32_t>(__cvta_generic_to_shared(tile)) + row * 128 + ((piece ^ (lane & 7)) << 4);
}

// words[2 j + h] <- the transpose of a 64 x 64 tile of 16-bit numbers
__device__ __forceinline__ void load_transposed(void *fragment, const void *tile) {
  uint32_t *words = reinterpret_cast<uint32_t *>(fragment);
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[4 * pair]), "=r"(words[4 * pair + 1]),
                   "=r"(words[4 * pair + 2]), "=r"(words[4 * pair + 3])
                 : "r"(transposed_tile_address(tile, pair)) : "memory");
  }
}

__device__ __forceinline__ void store_transposed(void *tile, const void *fragment) {
  const uint32_t *words = reinterpret_cast<const uint32_t *>(fragment);
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%4], {%0, %1, %2, %3};"
                 : : "r"(words[4 * pair]), "r"(words[4 * pair + 1]), "r"(words[4 * pair + 2]), "r"(words[4 * pair + 3]),
                 "r"(transposed_tile_address(tile, pair)) : "memory");
  }
}

// The first `rows` rows of a swizzled 64 x 64 tile to out[row, head, v0:], by one warp; `out` is [T, HV, 128]
__device__ __forceinline__ void store_rows(void *out, const void *tile, int first, int head, int v0, int value_heads,
                                           int rows) {
  const int piece = threadIdx.x & 7;
#pragma unroll 1
  for (int row = (threadIdx.x & 31) >> 3; row < rows; row += 4) {
    const char *source = static_cast<const char *>(tile) + row * 128 + ((piece ^ (row & 7)) << 4);
    const int64_t place = (static_cast<int64_t>(first + row) * value_heads + head) * 16 + v0 / 8 + piece;
    static_cast<uint4 *>(out)[place] = *reinterpret_cast<const uint4 *>(source);
  }
}

// tile <- scale 2^(sums_s - sums_t) (q_s . k_t) beta_t on and below the diagonal, 0 above it, rounded and swizzled, by
// a warpgroup; `products` is its 64 x 64 accumulator of Q K^T, `sums` are followed by the strengths beta.
template <typename Pair>
__device__ __forceinline__ void gate_scores(void *tile, const void *accumulator, const float *sums, float scale) {
  const float *products = reinterpret_cast<const float *>(accumulator);
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, g = lane >> 2, t = lane & 3;
  const int row = 16 * warp + g;
  const float sum[2] = {sums[row], sums[row + 8]};
  const int target = 16 * warp + (lane & 15);
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(tile)) + target * 128;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    uint32_t words[4] = {0, 0, 0, 0};
    if (pair <= warp) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = 16 * pair + 8 * j + 2 * t;
        const float2 other = *reinterpret_cast<const float2 *>(sums + column);
        const float2 beta = *reinterpret_cast<const float2 *>(sums + 64 + column);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float a = products[8 * pair + 4 * j + 2 * h] * (scale * beta.x * exp2f(sum[h] - other.x));
          float b = products[8 * pair + 4 * j + 2 * h + 1] * (scale * beta.y * exp2f(sum[h] - other.y));
          if (pair == warp) {
            a = column <= row + 8 * h ? a : 0.f;
            b = column + 1 <= row + 8 * h ? b : 0.f;
          }
          words[2 * j + h] = round_pair<Pair>(a, b);
        }
      }
    }
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%4], {%0, %1, %2, %3};"
                 : : "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]),
                 "r"(base + (((2 * pair + (lane >> 4)) ^ (lane & 7)) << 4)) : "memory");
  }
}

// A swizzled 64 x 64 tile to out[64][64], by one warp
__device__ __forceinline__ void copy_tile(void *out, const void *tile) {
  const int lane = threadIdx.x & 31;
  __syncwarp();
#pragma unroll 4
  for (int n = 0; n < 16; ++n) {
    const int row = 4 * n + (lane >> 3);
    const char *source = static_cast<const char *>(tile) + row * 128 + (((lane & 7) ^ (row & 7)) << 4);
    static_cast<uint4 *>(out)[32 * n + lane] = *reinterpret_cast<const uint4 *>(source);
  }
}

// Zeros to rows `first` and on of a 64 x 64 tile, by a warpgroup
__device__ __forceinline__ void clear_rows(void *tile, int first) {
#pragma unroll 1
  for (int piece = 8 * first + (threadIdx.x & 127); piece < 512; piece += 128)
    static_cast<uint4 *>(tile)[piece] = make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ void sync_warp() { __syncwarp(); }

}  // namespace qla
"""
)
