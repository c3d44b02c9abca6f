"""Inline device functions of the backward kernels: the gates and their gradients on tensor-core accumulators.

Accumulators are those of a warpgroup, see `tiles.py`: lane 4 g + t of warp w holds rows 16 w + 8 h + g and columns
8 j + 2 t + {0, 1}, as float 4 j + 2 h + {0, 1}, or as word 2 j + h in 16 bits. `gates` is a chunk's [2, 64]: the summed
log2 gates, then beta.
"""

from .tiles import TILE_MOVES

BACKWARD_MOVES = (
    TILE_MOVES
    + r"""
namespace qla {

__device__ __forceinline__ void store_words(uint32_t base, int pair, const uint32_t *words) {
  const int lane = threadIdx.x & 31;
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%4], {%0, %1, %2, %3};"
               : : "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]),
               "r"(base + (((2 * pair + (lane >> 4)) ^ (lane & 7)) << 4)) : "memory");
}

// where this lane's row of a warp's 16 rows starts in a swizzled tile of 64 rows
__device__ __forceinline__ uint32_t row_address(const void *tile) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(tile)) +
         (16 * ((threadIdx.x >> 5) & 3) + (threadIdx.x & 15)) * 128;
}

// two swizzled 64 x 64 tiles, side by side, <- a 64 x 128 fragment of 16-bit numbers
__device__ __forceinline__ void store_columns(void *tiles, const void *fragment) {
  const uint32_t *words = reinterpret_cast<const uint32_t *>(fragment);
  const uint32_t base = row_address(tiles);
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) store_words(base + 8192 * half, pair, words + 16 * half + 4 * pair);
}

}  // namespace qla
"""
)

CHUNK_GRADIENTS = (
    BACKWARD_MOVES
    + r"""
namespace qla {

// place[0] <- the first token of the chunk in `slot`, place[1] <- its tokens, 0 or less if the slot is empty
__device__ __forceinline__ void locate_chunk(int *place, const int *cu_seqlens, int documents, int slot) {
  int low = 0, high = documents - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (cu_seqlens[middle] / 64 + middle <= slot) low = middle; else high = middle - 1;
  }
  const int first = cu_seqlens[low];
  place[0] = first + (slot - first / 64 - low) * 64;
  place[1] = min(cu_seqlens[low + 1] - place[0], 64);
}

// From F = dO X^T: u = scale G F below and on the diagonal, 0 elsewhere and in rows past `valid`; in 16 bits, fragment
// and tile <- beta_t u, the gradient of Q K^T, and between <- u (q_s . k_t).
template <typename Pair>
__device__ __forceinline__ void score_gradients(void *fragment, void *tile, void *between, const void *products,
                                                const void *scores, const float *gates, float scale, int valid) {
  uint32_t *out = reinterpret_cast<uint32_t *>(fragment);
  const float *f = reinterpret_cast<const float *>(products), *qk = reinterpret_cast<const float *>(scores);
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, g = lane >> 2, t = lane & 3;
  const int row = 16 * warp + g;
  const float sum[2] = {gates[row], gates[row + 8]};
  const uint32_t base = row_address(tile), base_between = row_address(between);
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    uint32_t words[4] = {0, 0, 0, 0}, z[4] = {0, 0, 0, 0};
    if (pair <= warp) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = 16 * pair + 8 * j + 2 * t;
        const float2 other = *reinterpret_cast<const float2 *>(gates + column);
        const float2 beta = *reinterpret_cast<const float2 *>(gates + 64 + column);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int n = 8 * pair + 4 * j + 2 * h, last = min(row + 8 * h, valid - 1);
          float a = scale * exp2f(sum[h] - other.x) * f[n], b = scale * exp2f(sum[h] - other.y) * f[n + 1];
          a = column <= last && row + 8 * h < valid ? a : 0.f;
          b = column + 1 <= last && row + 8 * h < valid ? b : 0.f;
          words[2 * j + h] = round_pair<Pair>(beta.x * a, beta.y * b);
          z[2 * j + h] = round_pair<Pair>(a * qk[n], b * qk[n + 1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) out[4 * pair + n] = words[n];
    store_words(base, pair, words);
    store_words(base_between, pair, z);
  }
}

// From E = dV X^T: u = -G E below the diagonal, 0 elsewhere and in rows past `valid`; fragment and tile <- beta_t u,
// the gradient of K K^T, and between <- u (k_s . k_t).
template <typename Pair>
__device__ __forceinline__ void key_gradients(void *fragment, void *tile, void *between, const void *products,
                                              const void *scores, const float *gates, int valid) {
  uint32_t *out = reinterpret_cast<uint32_t *>(fragment);
  const float *e = reinterpret_cast<const float *>(products), *kk = reinterpret_cast<const float *>(scores);
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, g = lane >> 2, t = lane & 3;
  const int row = 16 * warp + g;
  const float sum[2] = {gates[row], gates[row + 8]};
  const uint32_t base = row_address(tile), base_between = row_address(between);
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    uint32_t words[4] = {0, 0, 0, 0}, z[4] = {0, 0, 0, 0};
    if (pair <= warp) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = 16 * pair + 8 * j + 2 * t;
        const float2 other = *reinterpret_cast<const float2 *>(gates + column);
        const float2 beta = *reinterpret_cast<const float2 *>(gates + 64 + column);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int n = 8 * pair + 4 * j + 2 * h;
          float a = -exp2f(sum[h] - other.x) * e[n], b = -exp2f(sum[h] - other.y) * e[n + 1];
          a = column < row + 8 * h && row + 8 * h < valid ? a : 0.f;
          b = column + 1 < row + 8 * h && row + 8 * h < valid ? b : 0.f;
          words[2 * j + h] = round_pair<Pair>(beta.x * a, beta.y * b);
          z[2 * j + h] = round_pair<Pair>(a * kk[n], b * kk[n + 1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) out[4 * pair + n] = words[n];
    store_words(base, pair, words);
    store_words(base_between, pair, z);
  }
}

template <typename Pair> __device__ __forceinline__ float2 unpack(uint32_t word);
template <> __device__ __forceinline__ float2 unpack<__nv_bfloat162>(uint32_t word) {
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 unpack<__half2>(uint32_t word) {
  return __half22float2(*reinterpret_cast<const __half2 *>(&word));
}

// sums (one half of a 64 x 128 accumulator) += diag(factors) products, and dots[h] += rows of products times rows of
// the swizzled 64 x 64 tile.
template <typename Pair>
__device__ __forceinline__ void add_rows(void *sums, int half, const void *products, const void *tile, float *dots,
                                         float top, float bottom) {
  float *s = reinterpret_cast<float *>(sums) + 32 * half;
  const float *p = reinterpret_cast<const float *>(products);
  const int lane = threadIdx.x & 31, row = 16 * ((threadIdx.x >> 5) & 3) + (lane >> 2);
  const char *base = static_cast<const char *>(tile) + row * 128 + 4 * (lane & 3);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const char *word = base + ((j ^ (row & 7)) << 4);
    const float2 a = unpack<Pair>(*reinterpret_cast<const uint32_t *>(word));
    const float2 b = unpack<Pair>(*reinterpret_cast<const uint32_t *>(word + 8 * 128));
    dots[0] += a.x * p[4 * j] + a.y * p[4 * j + 1];
    dots[1] += b.x * p[4 * j + 2] + b.y * p[4 * j + 3];
    s[4 * j] += top * p[4 * j];
    s[4 * j + 1] += top * p[4 * j + 1];
    s[4 * j + 2] += bottom * p[4 * j + 2];
    s[4 * j + 3] += bottom * p[4 * j + 3];
  }
}

__device__ __forceinline__ float sum_quad(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// rows[64] <- the dots of a warpgroup's 64 rows
__device__ __forceinline__ void store_dots(float *rows, const float *dots, float top, float bottom) {
  const int lane = threadIdx.x & 31, row = 16 * ((threadIdx.x >> 5) & 3) + (lane >> 2);
  const float a = sum_quad(dots[0]), b = sum_quad(dots[1]);
  if ((lane & 3) == 0) {
    rows[row] = top * a;
    rows[row + 8] = bottom * b;
  }
}

// the 64 x 64 matrix U[r][s] = 1 for s >= r, else 0, as a 16-bit fragment; `turn` only keeps it from being made once
// and held in registers all along.
template <typename Pair> __device__ __forceinline__ void fill_not_before(void *fragment, int turn) {
  uint32_t *words = reinterpret_cast<uint32_t *>(fragment);
  const int lane = threadIdx.x & 31;
  int row = 16 * ((threadIdx.x >> 5) & 3) + (lane >> 2);
  asm volatile("" : "+r"(row) : "r"(turn));
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int column = 8 * j + 2 * (lane & 3);
      words[2 * j + h] = round_pair<Pair>(column >= row + 8 * h ? 1.f : 0.f, column + 1 >= row + 8 * h ? 1.f : 0.f);
    }
}

// From Y[r][t], the sums over s >= r of the gradients between s and t less beta_t: crossing[r] <- their sum over t < r
// times beta_t, columns[t] <- Y[0][t].
__device__ __forceinline__ void sum_crossing(float *crossing, float *columns, const void *sums, const float *gates) {
  const float *y = reinterpret_cast<const float *>(sums);
  const int lane = threadIdx.x & 31, row = 16 * ((threadIdx.x >> 5) & 3) + (lane >> 2);
  float total[2] = {0.f, 0.f};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int column = 8 * j + 2 * (lane & 3);
    const float2 beta = *reinterpret_cast<const float2 *>(gates + 64 + column);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      total[h] += column < row + 8 * h ? beta.x * y[4 * j + 2 * h] : 0.f;
      total[h] += column + 1 < row + 8 * h ? beta.y * y[4 * j + 2 * h + 1] : 0.f;
    }
    if (row == 0) *reinterpret_cast<float2 *>(columns + column) = make_float2(y[4 * j], y[4 * j + 1]);
  }
  store_dots(crossing, total, 1.f, 1.f);
}

// part <- the sum of the products of two tiles of 128 x 128, by `threads` threads of whole warps; one number a warp
template <typename Pair>
__device__ __forceinline__ void multiply_states(float *part, const void *states, const void *gradients, int thread,
                                                int threads) {
  const uint4 *s = static_cast<const uint4 *>(states), *d = static_cast<const uint4 *>(gradients);
  float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
  for (int n = thread; n < 2048; n += threads) {
    const uint4 a = s[n], b = d[n];
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 u = unpack<Pair>(x[e]), w = unpack<Pair>(y[e]);
      sum[e] += u.x * w.x + u.y * w.y;
    }
  }
  float all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
#pragma unroll
  for (int d = 16; d > 0; d /= 2) all += __shfl_xor_sync(0xffffffffu, all, d);
  if ((thread & 31) == 0) part[thread / 32] = all;
}

// dg and dbeta of a chunk and value head, by one warp, two tokens a lane. a: the gradients of the decays from the
// chunk's start, in two parts; key_dots: k . dS^T x; whole: the sum of S * dS, in two parts.
__device__ __forceinline__ void store_gate_gradients(float *dg, float *dbeta, int64_t stride, const float *from_queries,
                                                     const float *from_keys, const float *key_dots,
                                                     const float *crossing, const float *columns, const float *whole,
                                                     const float *gates, int valid) {
  const int lane = threadIdx.x & 31;
  const float end = gates[63];
  float start[2], ending[2], rest[2], dot[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = lane + 32 * h;
    rest[h] = exp2f(end - gates[r]);
    dot[h] = r < valid ? key_dots[r] : 0.f;
    start[h] = r < valid ? from_queries[r] + from_keys[r] : 0.f;
    ending[h] = rest[h] * gates[64 + r] * dot[h];
  }
#pragma unroll
  for (int d = 1; d < 32; d *= 2)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float a = __shfl_down_sync(0xffffffffu, start[h], d), b = __shfl_up_sync(0xffffffffu, ending[h], d);
      if (lane + d < 32) start[h] += a;
      if (lane >= d) ending[h] += b;
    }
  const float above = __shfl_sync(0xffffffffu, start[1], 0), below = __shfl_sync(0xffffffffu, ending[0], 31);
  start[0] += above;
  // Exclusive sums by a shift: less its own, a sum would lose what is small beside it.
  const float first = __shfl_up_sync(0xffffffffu, ending[0], 1), second = __shfl_up_sync(0xffffffffu, ending[1], 1);
  ending[0] = lane > 0 ? first : 0.f;
  ending[1] = lane > 0 ? second + below : below;
  const float all = exp2f(end) * (whole[0] + whole[1]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = lane + 32 * h;
    if (r < valid) {
      dg[r * stride] = start[h] + crossing[r] + ending[h] + all;
      dbeta[r * stride] = columns[r] + rest[h] * dot[h];
    }
  }
}

// a 64 x 128 accumulator of a warpgroup, to and from two places of 16 KB in shared memory
__device__ __forceinline__ void hand_over(void *first, void *second, const void *accumulator) {
  const float *x = reinterpret_cast<const float *>(accumulator);
  float *places[2] = {static_cast<float *>(first), static_cast<float *>(second)};
#pragma unroll
  for (int n = 0; n < 64; ++n) places[n / 32][(n % 32) * 128 + (threadIdx.x & 127)] = x[n];
}

__device__ __forceinline__ void take_over(void *accumulator, const void *first, const void *second) {
  float *x = reinterpret_cast<float *>(accumulator);
  const float *places[2] = {static_cast<const float *>(first), static_cast<const float *>(second)};
#pragma unroll
  for (int n = 0; n < 64; ++n) x[n] += places[n / 32][(n % 32) * 128 + (threadIdx.x & 127)];
}

// rows of a 64 x 128 accumulator, rounded, to out[first + row, head, :]; `out` is [T, heads, 128]
template <typename Pair>
__device__ __forceinline__ void store_accumulator(void *out, const void *accumulator, int first, int head, int heads,
                                                  int valid) {
  const float *x = reinterpret_cast<const float *>(accumulator);
  const int lane = threadIdx.x & 31, row = 16 * ((threadIdx.x >> 5) & 3) + (lane >> 2);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (row + 8 * h < valid) {
      uint32_t *place = static_cast<uint32_t *>(out) +
                        (static_cast<int64_t>(first + row + 8 * h) * heads + head) * 64 + (lane & 3);
#pragma unroll
      for (int j = 0; j < 16; ++j) place[4 * j] = round_pair<Pair>(x[4 * j + 2 * h], x[4 * j + 2 * h + 1]);
    }
  }
}

}  // namespace qla
"""
)
