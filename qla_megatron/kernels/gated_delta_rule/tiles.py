"""Tile sizes and the inline device functions shared by the kernels of this op.

TileLang writes the matrix products, the bulk copies and the barriers. What works on single
registers of its fragments is plain CUDA, inlined into the kernels: the warp-level inverse of a unit lower triangular
tile, the gates on products, and the moves between a swizzled shared tile and fragments.
"""

import torch

from ..varlen import CHUNK as CHUNK

HEAD_DIM = 128  # K = V
CHECKPOINT = 16  # chunks between two kept states
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}

# The triangular inverse works on blocks of 16 x 16.
BLOCK_ROW = 20  # floats between rows: 16-byte aligned, and `b0 = B[2t][g]` of a warp falls into 32 different banks
BLOCK_SIZE = 316  # floats between blocks: the four diagonal ones start in different banks
TRIANGLE = 10 * BLOCK_SIZE  # floats of one head's lower triangle: ten blocks, row by row

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

}  // namespace qla
"""
)

# The inverse T = (I + L)^-1 of a unit lower triangular 64 x 64 tile, one warp a tile, in float32 with TF32 products
# off the diagonal: the four 16 x 16 diagonal blocks by substitution, then X21 = -(X22 L21) X11 for blocks of 16 and
# of 32. In `mma.m16n8k8` the contraction index may be renamed freely if both operands agree: slot t stands for column
# 2 t and slot t + 4 for column 2 t + 1, so that an accumulator is the next product's left operand as it lies.
TRIANGULAR_INVERSE = (
    ROUNDING
    + f"#define QLA_ROW {BLOCK_ROW}\n#define QLA_BLOCK {BLOCK_SIZE}\n"
    + r"""
namespace qla {

// The first head's triangle takes the place of the keys, whose products are all taken by the time it is filled.
__device__ __forceinline__ float *triangle_of(void *keys, void *others, int head) {
  return head == 0 ? static_cast<float *>(keys) : static_cast<float *>(others) + (head - 1) * 10 * QLA_BLOCK;
}

__device__ __forceinline__ float *block_at(float *x, int i, int j) { return x + (i * (i + 1) / 2 + j) * QLA_BLOCK; }

// A chunk's log gates and strengths of one head into the registers of a warp, 0 past `valid`.
__device__ __forceinline__ void load_gates(float *loaded, const float *gates, const float *betas, int64_t stride,
                                           int valid) {
  const int lane = threadIdx.x & 31;
  loaded[0] = lane < valid ? gates[lane * stride] : 0.f;
  loaded[1] = lane + 32 < valid ? gates[(lane + 32) * stride] : 0.f;
  loaded[2] = lane < valid ? betas[lane * stride] : 0.f;
  loaded[3] = lane + 32 < valid ? betas[(lane + 32) * stride] : 0.f;
}

// The inclusive sum of the gates over the chunk, times log2(e), and the strengths: to out[2][64] in global memory, and
// in pairs of columns (two sums, two strengths) to shared memory.
__device__ __forceinline__ void sum_gates(const float *loaded, float *pairs, float *out) {
  const int lane = threadIdx.x & 31;
  float low = loaded[0], high = loaded[1];
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float a = __shfl_up_sync(0xffffffffu, low, d);
    const float b = __shfl_up_sync(0xffffffffu, high, d);
    if (lane >= d) { low += a; high += b; }
  }
  high += __shfl_sync(0xffffffffu, low, 31);
  low *= 1.4426950408889634f;
  high *= 1.4426950408889634f;
  float *place = pairs + 4 * (lane >> 1) + (lane & 1);
  place[0] = low;
  place[2] = loaded[2];
  place[64] = high;
  place[66] = loaded[3];
  out[lane] = low;
  out[lane + 32] = high;
  out[lane + 64] = loaded[2];
  out[lane + 96] = loaded[3];
}

// L[s][t] = (k_s . k_t) 2^(sums_s - sums_t) beta_t below the diagonal, 0 on it, above it and in rows past `valid`.
// `products` is a warpgroup's 64 x 64 accumulator of K K^T; off the diagonal blocks of a whole chunk nothing needs a
// mask.
template <bool kMasked>
__device__ __forceinline__ void gate_block(const float *products, float2 sum, const float *pairs, int row, int column,
                                           int valid, float *place) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float4 other = *reinterpret_cast<const float4 *>(pairs + 2 * (column + 8 * j));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row + 8 * h, c = column + 8 * j;
      const float *product = products + 4 * j + 2 * h;
      const float s = h ? sum.y : sum.x;
      float2 value = make_float2(product[0] * (other.z * exp2f(s - other.x)),
                                 product[1] * (other.w * exp2f(s - other.y)));
      if (kMasked) {
        if (c >= r || r >= valid) value.x = 0.f;
        if (c + 1 >= r || r >= valid) value.y = 0.f;
      }
      *reinterpret_cast<float2 *>(place + 8 * h * QLA_ROW + 8 * j) = value;
    }
  }
}

__device__ __forceinline__ void gate_products(const void *accumulator, const float *pairs, int valid, void *keys,
                                              void *others, int head) {
  float *x = triangle_of(keys, others, head);
  const float *products = reinterpret_cast<const float *>(accumulator);
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, g = lane >> 2, t = lane & 3;
  const int row = 16 * warp + g;
  const float *own = pairs + 4 * (row >> 1) + (row & 1);
  const float2 sum = make_float2(own[0], own[16]);
  float *place = block_at(x, warp, 0) + g * QLA_ROW + 2 * t;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j < warp && valid == 64) {
      gate_block<false>(products + 8 * j, sum, pairs, row, 16 * j + 2 * t, valid, place + j * QLA_BLOCK);
    } else if (j <= warp) {
      gate_block<true>(products + 8 * j, sum, pairs, row, 16 * j + 2 * t, valid, place + j * QLA_BLOCK);
    }
  }
}

__device__ __forceinline__ void mma_tf32(float *c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The tensor core drops the 13 low bits of a TF32 operand; half of their range, added first, makes that a rounding.
__device__ __forceinline__ uint32_t tf32(float x) { return __float_as_uint(x) + 0x1000u; }

// c[8] += z[8] B, all 16 x 16: z and c are accumulators, B lies in shared memory
__device__ __forceinline__ void multiply_add(float *c, const float *z, const float *b) {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float *rows = b + (8 * k + 2 * t) * QLA_ROW + g;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma_tf32(c + 4 * n, tf32(z[4 * k]), tf32(z[4 * k + 2]), tf32(z[4 * k + 1]), tf32(z[4 * k + 3]),
               tf32(rows[8 * n]), tf32(rows[QLA_ROW + 8 * n]));
    }
  }
}

// a block in shared memory as an accumulator
__device__ __forceinline__ void load_block(float *z, const float *a) {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float2 top = *reinterpret_cast<const float2 *>(a + g * QLA_ROW + 8 * k + 2 * t);
    const float2 bottom = *reinterpret_cast<const float2 *>(a + (g + 8) * QLA_ROW + 8 * k + 2 * t);
    z[4 * k] = top.x; z[4 * k + 1] = top.y; z[4 * k + 2] = bottom.x; z[4 * k + 3] = bottom.y;
  }
}

__device__ __forceinline__ void store_negative(float *a, const float *c) {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    *reinterpret_cast<float2 *>(a + g * QLA_ROW + 8 * k + 2 * t) = make_float2(-c[4 * k], -c[4 * k + 1]);
    *reinterpret_cast<float2 *>(a + (g + 8) * QLA_ROW + 8 * k + 2 * t) = make_float2(-c[4 * k + 2], -c[4 * k + 3]);
  }
}

// Two columns of one diagonal block a lane: X[i] = e_i - sum_{m < i} L[i][m] X[m].
__device__ __forceinline__ void invert_diagonal(float *x) {
  const int lane = threadIdx.x & 31;
  float *block = block_at(x, lane >> 3, lane >> 3);
  const int column = 2 * (lane & 7);
  float left[16], right[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float a = i == column ? 1.f : 0.f, b = i == column + 1 ? 1.f : 0.f, a_odd = 0.f, b_odd = 0.f;
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 l = *reinterpret_cast<const float4 *>(block + i * QLA_ROW + m);
      a -= l.x * left[m]; b -= l.x * right[m];
      if (m + 1 < i) { a_odd -= l.y * left[m + 1]; b_odd -= l.y * right[m + 1]; }
      if (m + 2 < i) { a -= l.z * left[m + 2]; b -= l.z * right[m + 2]; }
      if (m + 3 < i) { a_odd -= l.w * left[m + 3]; b_odd -= l.w * right[m + 3]; }
    }
    left[i] = a + a_odd;
    right[i] = b + b_odd;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16; ++i)
    *reinterpret_cast<float2 *>(block + i * QLA_ROW + column) = make_float2(left[i], right[i]);
  __syncwarp();
}

// X <- (I + L)^-1 in place, by one warp
__device__ __forceinline__ void invert_triangle(float *x) {
  invert_diagonal(x);
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    float a[8], z[8] = {}, c[8] = {};
    load_block(a, block_at(x, i + 1, i + 1));
    multiply_add(z, a, block_at(x, i + 1, i));
    multiply_add(c, z, block_at(x, i, i));
    __syncwarp();
    store_negative(block_at(x, i + 1, i), c);
  }
  __syncwarp();
  float z[2][2][8] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int m = 0; m <= i; ++m) {
      float a[8];
      load_block(a, block_at(x, 2 + i, 2 + m));
#pragma unroll
      for (int j = 0; j < 2; ++j) multiply_add(z[i][j], a, block_at(x, 2 + m, j));
    }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float c[8] = {};
#pragma unroll
      for (int m = j; m < 2; ++m) multiply_add(c, z[i][m], block_at(x, m, j));
      store_negative(block_at(x, 2 + i, j), c);
    }
  __syncwarp();
}

// out[64][64] <- (I + L)^-1, rounded, zeros above the diagonal; by one warp, 16 bytes a lane
template <typename Pair>
__device__ __forceinline__ void write_inverse(void *out, void *keys, void *others, int head) {
  float *x = triangle_of(keys, others, head);
  invert_triangle(x);
  const int lane = threadIdx.x & 31, piece = lane & 7;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int row = 4 * i + (lane >> 3);
    const bool below = piece / 2 <= i / 4;
    const float *p = block_at(x, i / 4, below ? piece / 2 : 0) + (row & 15) * QLA_ROW + 8 * (piece & 1);
    const float4 a = *reinterpret_cast<const float4 *>(p), b = *reinterpret_cast<const float4 *>(p + 4);
    uint4 word;
    word.x = below ? round_pair<Pair>(a.x, a.y) : 0;
    word.y = below ? round_pair<Pair>(a.z, a.w) : 0;
    word.z = below ? round_pair<Pair>(b.x, b.y) : 0;
    word.w = below ? round_pair<Pair>(b.z, b.w) : 0;
    reinterpret_cast<uint4 *>(out)[row * 8 + piece] = word;
  }
}

}  // namespace qla
"""
)

PAIR_TYPES = {"bfloat16": "__nv_bfloat162", "float16": "__half2"}  # the CUDA type of two packed elements
