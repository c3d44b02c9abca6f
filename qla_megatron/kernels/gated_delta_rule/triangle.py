"""The inverse of a gated unit lower triangular tile by one warp: inline device functions.

(I + L)^-1 for L strictly lower triangular, 64 x 64: the eight 8 x 8 blocks on the diagonal by substitution in float32,
then X21 = -(X22 L21) X11 for blocks of 8, 16 and 32 on the tensor cores, with operands in float16 and sums in float32.
Float16 has the significand of TF32; that its range suffices is a property of the rule: as long as decay and writes
don't enlarge the state, entries of L and of the inverse are at most beta |k_s| |k_t|. Within sixteen tokens K K^T
itself passes through float16: keys must be shorter than 255.

A triangle in shared memory: the diagonal 8 x 8 blocks of L in float32, then ten 16 x 16 blocks in float16, block (i, j)
at i (i + 1) / 2 + j: K K^T, then L, then the inverse from the inside out. Rows of 32 bytes, whose two 16-byte pieces
change places in every other four rows, so that eight rows of `ldmatrix` lie in different banks.

An entry holds a chunk's gates, 64 pairs of floats in pairs of tokens (two sums, two strengths), then beta 2^(sum of
the last token of the same sixteen - sum) by tokens.
"""

COLUMN, ENTRY = 128, 192  # floats
CORNER = 68  # floats from one diagonal 8 x 8 block to the next: eight of them start in different banks
BLOCK = 528  # bytes from one 16 x 16 block to the next
TRIANGLE = 8 * CORNER + 10 * BLOCK // 4  # floats

TRIANGULAR_INVERSE = (  # wants ROUNDING before it
    f"#define QLA_CORNER {CORNER}\n#define QLA_BLOCK {BLOCK}\n#define QLA_COLUMN {COLUMN}\n"
    + r"""
namespace qla {

// The lane, asked for anew, so that what depends on it is not kept in registers over a loop.
__device__ __forceinline__ int lane_now() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

__device__ __forceinline__ uint32_t shared_address(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ uint32_t block_at(const float *triangle, int i, int j) {
  return shared_address(triangle) + 32 * QLA_CORNER + (i * (i + 1) / 2 + j) * QLA_BLOCK;
}

// Where a lane's row of a 16 x 16 block lies, for ldmatrix and stmatrix: the four 8 x 8 parts column by column.
__device__ __forceinline__ int block_row(int lane) {
  return (lane & 15) * 32 + (((lane >> 4) ^ ((lane >> 2) & 1)) << 4);
}

__device__ __forceinline__ void load_block(uint32_t *words, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_block_transposed(uint32_t *words, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void store_block(uint32_t address, const uint32_t *words) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%4], {%0, %1, %2, %3};"
               : : "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(address) : "memory");
}

// words <- sign c, rounded: an accumulator of 16 x 16 as left operand, or for `store_block`
template <typename Pair>
__device__ __forceinline__ void round_block(uint32_t *words, const float *c, float sign) {
#pragma unroll
  for (int n = 0; n < 4; ++n) words[n] = round_pair<Pair>(sign * c[2 * n], sign * c[2 * n + 1]);
}

// c[8] += A B, all 16 x 16: A in registers, B in shared memory at `address` (a lane's row)
__device__ __forceinline__ void multiply_add(float *c, const uint32_t *a, uint32_t address) {
  uint32_t b[4];
  load_block_transposed(b, address);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    float *d = c + 4 * n;
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[2 * n]), "r"(b[2 * n + 1]));
  }
}

// c[2] <- A B, both 8 x 8: the upper half of a product of 16 x 8
__device__ __forceinline__ void multiply_corner(float *c, uint32_t a, uint32_t b) {
  float lower[2] = {0.f, 0.f};
  c[0] = c[1] = 0.f;
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
               "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(lower[0]), "+f"(lower[1]) : "r"(a), "r"(0), "r"(b));
}

// Zeros to a 64 x 64 tile, by one warp: what lies above the diagonal stays so
__device__ __forceinline__ void clear_tile(void *tile) {
#pragma unroll 1
  for (int piece = threadIdx.x & 31; piece < 512; piece += 32)
    static_cast<uint4 *>(tile)[piece] = make_uint4(0, 0, 0, 0);
  __syncwarp();
}

// L[s][t] = (k_s . k_t) 2^(sums_s - sums_t) beta_t, rounded, to the blocks below the diagonal ones, K K^T to those, of
// a triangle; by a warpgroup, `accumulator` its 64 x 64 of K K^T. The decay is that to the end of t's sixteen tokens
// times that from there on, both at most 1.
__device__ __forceinline__ void store_triangle(float *triangle, const void *accumulator, const float *entry) {
  const float *products = reinterpret_cast<const float *>(accumulator);
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, g = lane >> 2, t = lane & 3;
  const float *own = entry + 32 * warp + 4 * (g >> 1) + (g & 1);
  const float sum[2] = {own[0], own[16]};
  const uint32_t row = block_at(triangle, 0, 0) + warp * (warp + 1) / 2 * QLA_BLOCK + block_row(lane);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j > warp) continue;
    const float *product = products + 8 * j;
    uint32_t words[4];
    if (j == warp) {
      round_block<__half2>(words, product, 1.f);
    } else {
      const float last = entry[32 * j + 29];
      const float factor[2] = {exp2f(sum[0] - last), exp2f(sum[1] - last)};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 column = *reinterpret_cast<const float2 *>(entry + QLA_COLUMN + 16 * j + 8 * n + 2 * t);
#pragma unroll
        for (int h = 0; h < 2; ++h)
          words[2 * n + h] = round_pair<__half2>(product[4 * n + 2 * h] * (factor[h] * column.x),
                                                 product[4 * n + 2 * h + 1] * (factor[h] * column.y));
      }
    }
    store_block(row + j * QLA_BLOCK, words);
  }
  __syncwarp();
}

// The same in the diagonal blocks, in place of K K^T: the 8 x 8 on the diagonal to `corner`s, in float32. By one warp.
__device__ __forceinline__ void gate_diagonal(float *triangle, const float *entry) {
  const int lane = lane_now(), g = lane >> 2, t = lane & 3;
  const float *own = entry + 4 * (g >> 1) + (g & 1);
#pragma unroll 2
  for (int i = 0; i < 4; ++i) {
    const uint32_t row = block_at(triangle, i, i) + block_row(lane);
    const float sum[2] = {own[32 * i], own[32 * i + 16]};
    uint32_t words[4];
    load_block(words, row);
    float value[3][2];  // upper left, lower left, lower right
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float4 other = *reinterpret_cast<const float4 *>(entry + 32 * i + 16 * n + 4 * t);
#pragma unroll
      for (int h = n; h < 2; ++h) {
        const float2 product = __half22float2(*reinterpret_cast<const __half2 *>(&words[2 * n + h]));
        value[n + h][0] = product.x * (other.z * exp2f(sum[h] - other.x));
        value[n + h][1] = product.y * (other.w * exp2f(sum[h] - other.y));
      }
    }
    float *corner = triangle + 2 * i * QLA_CORNER + 8 * g + 2 * t;
    *reinterpret_cast<float2 *>(corner) = make_float2(value[0][0], value[0][1]);
    *reinterpret_cast<float2 *>(corner + QLA_CORNER) = make_float2(value[2][0], value[2][1]);
    words[0] = words[2] = words[3] = 0;
    words[1] = round_pair<__half2>(value[1][0], value[1][1]);
    store_block(row, words);
  }
  __syncwarp();
}

// tile <- (I + L)^-1, rounded and swizzled, at and below the diagonal 8 x 8 blocks; the triangle is used up. By one
// warp.
template <typename Pair>
__device__ __forceinline__ void invert_triangle(float *triangle, void *tile) {
  {
    // A lane has two columns of one 8 x 8 block: X[r] = e_r - sum_{m < r} L[r][m] X[m].
    const int lane = lane_now(), b = lane >> 2, column = 2 * (lane & 3);
    const float *corner = triangle + b * QLA_CORNER;
    char *half = reinterpret_cast<char *>(triangle + 8 * QLA_CORNER) + (lane >> 3) * ((lane >> 3) + 3) / 2 * QLA_BLOCK +
                 (b & 1) * 256 + 4 * (lane & 3);
    char *out = static_cast<char *>(tile) + b * 1024 + 4 * (lane & 3);
    float left[8], right[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      left[r] = r == column ? 1.f : 0.f;
      right[r] = r == column + 1 ? 1.f : 0.f;
#pragma unroll
      for (int m = 0; m < r; m += 4) {
        const float4 l = *reinterpret_cast<const float4 *>(corner + 8 * r + m);
        left[r] -= l.x * left[m]; right[r] -= l.x * right[m];
        if (m + 1 < r) { left[r] -= l.y * left[m + 1]; right[r] -= l.y * right[m + 1]; }
        if (m + 2 < r) { left[r] -= l.z * left[m + 2]; right[r] -= l.z * right[m + 2]; }
        if (m + 3 < r) { left[r] -= l.w * left[m + 3]; right[r] -= l.w * right[m + 3]; }
      }
      *reinterpret_cast<uint32_t *>(half + r * 32 + (((b & 1) ^ (r >> 2)) << 4)) =
          round_pair<__half2>(left[r], right[r]);
      *reinterpret_cast<uint32_t *>(out + r * 128 + ((b ^ r) << 4)) = round_pair<Pair>(left[r], right[r]);
    }
    __syncwarp();
  }
  {
    // The four diagonal 16 x 16 blocks at once.
    const int lane = lane_now(), m = lane >> 3;
    const uint32_t row = block_at(triangle, 0, 0) + m * (m + 3) / 2 * QLA_BLOCK + (8 + (lane & 7)) * 32;
    const int swap = ((lane >> 2) & 1) << 4;
    uint32_t x22[4], l21[4], x11[4], words[4];
    load_block(x22, row + (16 ^ swap));
    load_block_transposed(l21, row + swap);
    load_block_transposed(x11, row - 256 + swap);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float c[2];
      multiply_corner(c, x22[n], l21[n]);
      multiply_corner(c, round_pair<__half2>(c[0], c[1]), x11[n]);
      l21[n] = round_pair<__half2>(-c[0], -c[1]);
      words[n] = round_pair<Pair>(-c[0], -c[1]);
    }
    store_block(row + swap, l21);
    store_block(shared_address(tile) + (16 * m + 8 + (lane & 7)) * 128 + (((2 * m) ^ (lane & 7)) << 4), words);
    __syncwarp();
  }
  const int lane = lane_now(), place = block_row(lane);
  const uint32_t row = shared_address(tile) + (lane & 15) * 128;
#pragma unroll 1
  for (int i = 0; i < 4; i += 2) {
    uint32_t a[4];
    float z[8] = {}, c[8] = {};
    load_block(a, block_at(triangle, i + 1, i + 1) + place);
    multiply_add(z, a, block_at(triangle, i + 1, i) + place);
    round_block<__half2>(a, z, 1.f);
    multiply_add(c, a, block_at(triangle, i, i) + place);
    round_block<__half2>(a, c, -1.f);
    __syncwarp();
    store_block(block_at(triangle, i + 1, i) + place, a);
    round_block<Pair>(a, c, -1.f);
    store_block(row + 2048 * (i + 1) + (((2 * i + (lane >> 4)) ^ (lane & 7)) << 4), a);
  }
  __syncwarp();
#pragma unroll 1
  for (int i = 2; i < 4; ++i) {
    uint32_t a[4], b[4];
    float left[8] = {}, right[8] = {};
#pragma unroll 1
    for (int m = 2; m <= i; ++m) {
      load_block(a, block_at(triangle, i, m) + place);
      multiply_add(left, a, block_at(triangle, m, 0) + place);
      multiply_add(right, a, block_at(triangle, m, 1) + place);
    }
    round_block<__half2>(a, left, 1.f);
    round_block<__half2>(b, right, 1.f);
    float c[8] = {};
    multiply_add(c, a, block_at(triangle, 0, 0) + place);
    multiply_add(c, b, block_at(triangle, 1, 0) + place);
    round_block<Pair>(a, c, -1.f);
    store_block(row + 2048 * i + (((lane >> 4) ^ (lane & 7)) << 4), a);
#pragma unroll
    for (int n = 0; n < 8; ++n) c[n] = 0.f;
    multiply_add(c, b, block_at(triangle, 1, 1) + place);
    round_block<Pair>(a, c, -1.f);
    store_block(row + 2048 * i + (((2 + (lane >> 4)) ^ (lane & 7)) << 4), a);
  }
}

// A chunk's log gates and strengths of one head into the registers of a warp, 0 past `valid`.
__device__ __forceinline__ void load_gates(float *loaded, const float *gates, const float *betas, int64_t stride,
                                           int valid) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int token = lane + 32 * h;
    loaded[h] = token < valid ? gates[token * stride] : 0.f;
    loaded[2 + h] = token < valid ? betas[token * stride] : 0.f;
  }
}

// The gates, summed over the chunk and in units of log 2, and the strengths to out[2][64], and as an entry; by one
// warp. A gate whose exponential is 0 may as well be the largest such: long sums then keep their low bits.
__device__ __forceinline__ void write_gates(float *entry, const float *loaded, float *out) {
  const int lane = threadIdx.x & 31;
  float sums[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) sums[h] = loaded[h] < -104.f ? -150.f : loaded[h] * 1.4426950408889634f;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float a = __shfl_up_sync(0xffffffffu, sums[0], d);
    const float b = __shfl_up_sync(0xffffffffu, sums[1], d);
    if (lane >= d) { sums[0] += a; sums[1] += b; }
  }
  sums[1] += __shfl_sync(0xffffffffu, sums[0], 31);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int token = lane + 32 * h;
    float *pair = entry + 4 * (token >> 1) + (token & 1);
    pair[0] = sums[h];
    pair[2] = loaded[2 + h];
    entry[QLA_COLUMN + token] = loaded[2 + h] * exp2f(__shfl_sync(0xffffffffu, sums[h], lane | 15) - sums[h]);
    out[token] = sums[h];
    out[64 + token] = loaded[2 + h];
  }
}

// L of one head to its inverse, and that to out[64][64] in global memory, by one warp. Its swizzled tile takes a place
// among the keys, which no one reads any longer, or among the `others`.
template <typename Pair>
__device__ __forceinline__ void write_inverse(void *out, float *triangle, const float *entry, void *keys,
                                              void *others) {
  const int warp = threadIdx.x >> 5;
  void *tile = static_cast<char *>(warp < 2 ? keys : others) + (warp & 1) * 8192;
  clear_tile(tile);
  gate_diagonal(triangle, entry);
  invert_triangle<Pair>(triangle, tile);
  copy_tile(out, tile);
}

}  // namespace qla
"""
)
