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

// x, such that nothing made of it is made once and held in registers all along
__device__ __forceinline__ int afresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ __forceinline__ void store_words(uint32_t base, int pair, const uint32_t *words) {
  const int lane = threadIdx.x & 31;
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%4], {%0, %1, %2, %3};"
               : : "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]),
               "r"(base + (((2 * pair + (lane >> 4)) ^ (lane & 7)) << 4)) : "memory");
}

// where this lane's row of a warp's 16 rows starts in a swizzled tile of 64 rows
__device__ __forceinline__ uint32_t row_address(const void *tile) {
  const int thread = afresh(threadIdx.x);
  return static_cast<uint32_t>(__cvta_generic_to_shared(tile)) + (16 * ((thread >> 5) & 3) + (thread & 15)) * 128;
}

// a 64 x 128 fragment <- two swizzled 64 x 64 tiles side by side
__device__ __forceinline__ void load_columns(void *fragment, const void *tiles) {
  uint32_t *words = reinterpret_cast<uint32_t *>(fragment);
  const int lane = threadIdx.x & 31;
  const uint32_t base = row_address(tiles);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[4 * n]), "=r"(words[4 * n + 1]), "=r"(words[4 * n + 2]), "=r"(words[4 * n + 3])
                 : "r"(base + 8192 * (n / 4) + (((2 * (n % 4) + (lane >> 4)) ^ (lane & 7)) << 4)) : "memory");
  }
}

// 0 in the rows of such a fragment past `valid`
__device__ __forceinline__ void clear_fragment_rows(void *fragment, int valid) {
  uint32_t *words = reinterpret_cast<uint32_t *>(fragment);
  const int row = 16 * ((threadIdx.x >> 5) & 3) + ((threadIdx.x & 31) >> 2);
#pragma unroll
  for (int n = 0; n < 32; ++n) words[n] = row + 8 * (n & 1) < valid ? words[n] : 0;
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

// place <- the first token of the chunk in `slot`, its tokens (0 or less if the slot is empty), and `key`
__device__ __forceinline__ void locate_chunk(int *place, const int *cu_seqlens, int documents, int slot, int key) {
  int low = 0, high = documents - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (cu_seqlens[middle] / 64 + middle <= slot) low = middle; else high = middle - 1;
  }
  const int first = cu_seqlens[low];
  place[0] = first + (slot - first / 64 - low) * 64;
  place[1] = min(cu_seqlens[low + 1] - place[0], 64);
  place[2] = key;
}

template <typename Pair> __device__ __forceinline__ float2 unpack(uint32_t word);
template <> __device__ __forceinline__ float2 unpack<__nv_bfloat162>(uint32_t word) {
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 unpack<__half2>(uint32_t word) {
  return __half22float2(*reinterpret_cast<const __half2 *>(&word));
}

// From F = dO X^T: u = scale G F below and on the diagonal, 0 elsewhere; in 16 bits, tile <- beta_t u, the gradient
// of Q K^T, and between <- u (q_s . k_t), the scores given as a 16-bit fragment.
template <typename Pair>
__device__ __forceinline__ void score_gradients(void *tile, void *between, const void *products, const void *scores,
                                                const float *gates, float scale) {
  const float *f = reinterpret_cast<const float *>(products);
  const uint32_t *qk = reinterpret_cast<const uint32_t *>(scores);
  const int thread = afresh(threadIdx.x), lane = thread & 31, warp = (thread >> 5) & 3, g = lane >> 2, t = lane & 3;
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
          const int n = 8 * pair + 4 * j + 2 * h, last = pair == warp ? row + 8 * h : 63;
          float a = scale * exp2f(sum[h] - other.x) * f[n], b = scale * exp2f(sum[h] - other.y) * f[n + 1];
          a = column <= last ? a : 0.f;
          b = column < last ? b : 0.f;
          words[2 * j + h] = round_pair<Pair>(beta.x * a, beta.y * b);
          const float2 score = unpack<Pair>(qk[4 * pair + 2 * j + h]);
          z[2 * j + h] = round_pair<Pair>(a * score.x, b * score.y);
        }
      }
    }
    store_words(base, pair, words);
    store_words(base_between, pair, z);
  }
}

// From E = dV X^T: u = -G E below the diagonal, 0 elsewhere; tile <- beta_t u, the gradient of K K^T, and between <-
// u (k_s . k_t).
template <typename Pair>
__device__ __forceinline__ void key_gradients(void *tile, void *between, const void *products, const void *scores,
                                              const float *gates) {
  const float *e = reinterpret_cast<const float *>(products);
  const uint32_t *kk = reinterpret_cast<const uint32_t *>(scores);
  const int thread = afresh(threadIdx.x), lane = thread & 31, warp = (thread >> 5) & 3, g = lane >> 2, t = lane & 3;
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
          const int n = 8 * pair + 4 * j + 2 * h, last = pair == warp ? row + 8 * h - 1 : 63;
          float a = -exp2f(sum[h] - other.x) * e[n], b = -exp2f(sum[h] - other.y) * e[n + 1];
          a = column <= last ? a : 0.f;
          b = column < last ? b : 0.f;
          words[2 * j + h] = round_pair<Pair>(beta.x * a, beta.y * b);
          const float2 score = unpack<Pair>(kk[4 * pair + 2 * j + h]);
          z[2 * j + h] = round_pair<Pair>(a * score.x, b * score.y);
        }
      }
    }
    store_words(base, pair, words);
    store_words(base_between, pair, z);
  }
}

// sums (one half of a 64 x 128 accumulator) += diag(factors) products, and dots[h] += rows of products times rows of
// the swizzled 64 x 64 tile.
template <typename Pair>
__device__ __forceinline__ void add_rows(void *sums, int half, const void *products, const void *tile, float *dots,
                                         float top, float bottom) {
  float *s = reinterpret_cast<float *>(sums) + 32 * half;
  const float *p = reinterpret_cast<const float *>(products);
  const int thread = afresh(threadIdx.x), lane = thread & 31, row = 16 * ((thread >> 5) & 3) + (lane >> 2);
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
  const int thread = afresh(threadIdx.x), lane = thread & 31, row = 16 * ((thread >> 5) & 3) + (lane >> 2);
  const float a = sum_quad(dots[0]), b = sum_quad(dots[1]);
  if ((lane & 3) == 0) {
    rows[row] = top * a;
    rows[row + 8] = bottom * b;
  }
}

// the 64 x 64 matrix U[r][s] = 1 for s >= r, else 0, as a 16-bit fragment
template <typename Pair> __device__ __forceinline__ void fill_not_before(void *fragment) {
  uint32_t *words = reinterpret_cast<uint32_t *>(fragment);
  const int thread = afresh(threadIdx.x), lane = thread & 31, row = 16 * ((thread >> 5) & 3) + (lane >> 2);
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
  const int thread = afresh(threadIdx.x), lane = thread & 31, row = 16 * ((thread >> 5) & 3) + (lane >> 2);
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

template <typename Pair>
__device__ __forceinline__ void mma_16bit(float *c, const uint32_t *a, uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma_16bit<__nv_bfloat162>(float *c, const uint32_t *a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16bit<__half2>(float *c, const uint32_t *a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void load_matrices(uint32_t *words, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(address) : "memory");
}

// The sum of the products of two tiles of 128 rows of 64, by two warps: rows times rows on the tensor cores, of which
// the diagonal counts. sums[8] keep it, spread over the threads.
template <typename Pair>
__device__ __forceinline__ void multiply_states(float *sums, const void *states, const void *gradients, int warp) {
  const int lane = threadIdx.x & 31;
  const uint32_t row = (64 * warp + (lane & 15)) * 128;
  const uint32_t s = static_cast<uint32_t>(__cvta_generic_to_shared(states)) + row;
  const uint32_t d = static_cast<uint32_t>(__cvta_generic_to_shared(gradients)) + row;
#pragma unroll
  for (int block = 0; block < 4; ++block)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t place = 2048 * block + (((2 * k + (lane >> 4)) ^ (lane & 7)) << 4);
      uint32_t a[4], b[4];
      load_matrices(a, s + place);
      load_matrices(b, d + place);
      mma_16bit<Pair>(sums, a, b[0], b[2]);
      mma_16bit<Pair>(sums + 4, a, b[1], b[3]);
    }
}

__device__ __forceinline__ void store_product(float *whole, const float *sums, int warp) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float all = g == 2 * t ? sums[0] + sums[6] : g == 2 * t + 1 ? sums[1] + sums[7] : 0.f;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) all += __shfl_xor_sync(0xffffffffu, all, d);
  if (lane == 0) whole[warp] = all;
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
  const int thread = afresh(threadIdx.x), lane = thread & 31, row = 16 * ((thread >> 5) & 3) + (lane >> 2);
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
