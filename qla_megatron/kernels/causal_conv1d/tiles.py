"""The inline device functions of the kernels of this op: what one warp does with two heads of a tile of tokens.

TileLang launches, places and types; the walk over tokens, with its rows in registers, is plain CUDA.
"""

from ..rows import ROWS
from .gates import GATES

WIDTH = 4
FORWARD_RING = 8  # rows; a power of two
BACKWARD_RING = 8

CONVOLUTION = (
    ROWS
    + r"""
namespace qla {

// The document of a token; without offsets a row of the batch is one. Past the last one lies none, up to the row's end.
struct Documents {
  const int *offsets;
  int count, document, start, end;
  bool is_there;

  __device__ __forceinline__ Documents(const int *offsets, int count, int row, int tokens)
      : offsets(offsets), count(count), document(row), start(0), end(tokens), is_there(true) {}

  __device__ __forceinline__ void find(int token) {
    if (count == 0) return;
    int first = 0, last = count - 1;  // the last document that begins at or before the token
    while (first < last) {
      const int middle = (first + last + 1) / 2;
      if (offsets[middle] <= token) first = middle; else last = middle - 1;
    }
    document = first - 1;
    move(token);
  }

  // To the document that holds `token`, which lies past the present one.
  __device__ __forceinline__ void move(int token) {
    if (count == 0) return;
    do { ++document; } while (document < count && offsets[document + 1] <= token);
    is_there = document < count;
    start = offsets[document];
    end = is_there ? offsets[document + 1] : 0x7fffffff;
  }
};

// Where a warp's rows lie: this thread's eight channels of token 0, and the bytes from token to token.
struct Channels {
  const char *x;
  int64_t stride;
  const void *state;  // the inputs before a document, [documents, channels, 3] from this thread's channels on, or null
  int64_t state_stride;
};

// The row of a token before the one that is looked at, perhaps from before the document's start.
template <typename Pair, typename Number, int kBytes>
__device__ __forceinline__ void load_past(float (&row)[8], const Channels &c, const Documents &docs, int token) {
#pragma unroll
  for (int e = 0; e < 8; ++e) row[e] = 0.f;
  if (token >= docs.start) {
    widen<Pair>(row, load_numbers<kBytes>(c.x + token * c.stride));
  } else if (c.state != nullptr && docs.is_there) {
    const Number *state = static_cast<const Number *>(c.state) + docs.document * c.state_stride + token - docs.start;
#pragma unroll
    for (int e = 0; e < 8; ++e) row[e] = to_float(state[3 * e + 3]);
  }
}

// Weights and bias come scaled, so that the exponential of SiLU needs no product: Y = kScale y, 2^Y = exp(-y).
template <bool kSilu> struct Activation {
  static constexpr float kScale = kSilu ? -1.4426950408889634f : 1.f;

  // sigmoid(y) / kScale
  static __device__ __forceinline__ float sigmoid(float Y) {
    return reciprocal(fmaf(kScale, power_of_two(Y), kScale));
  }
};

template <typename Weight>
__device__ __forceinline__ void load_weights(float (&w)[4][8], const void *weights, float scale) {
  const uint4 *packed = static_cast<const uint4 *>(weights);
#pragma unroll
  for (int n = 0; n < 2 * static_cast<int>(sizeof(Weight)); ++n) {
    constexpr int kCount = 16 / sizeof(Weight);
    const uint4 piece = packed[n];
    const Weight *numbers = reinterpret_cast<const Weight *>(&piece);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      w[(n * kCount + i) & 3][(n * kCount + i) >> 2] = scale * to_float(numbers[i]);
  }
}

template <typename Weight, bool kBias>
__device__ __forceinline__ void load_bias(float (&b)[8], const void *bias, float scale) {
#pragma unroll
  for (int e = 0; e < 8; ++e) b[e] = kBias ? scale * to_float(static_cast<const Weight *>(bias)[e]) : 0.f;
}

// Y of one channel, from the rows of three tokens before and its own
template <int kRows>
__device__ __forceinline__ float convolve(const float (&w)[4][8], const float (&b)[8], const float (&x)[kRows][8],
                                          int first, int e) {
  return b[e] + w[0][e] * x[first][e] + w[1][e] * x[first + 1][e] + w[2][e] * x[first + 2][e] +
         w[3][e] * x[first + 3][e];
}

// kStreams rings of rows, of this thread's own; see rows.py. Rows are asked for kAhead ahead of their use: those in use
// and those on their way never share a slot, even where four rows are taken at once.
template <int kBytes, int kDepth, int kStreams> struct Ring {
  static constexpr int kAhead = kDepth - 4;
  uint32_t slots;
  int rows;  // that there are
  const char *next[kStreams];
  int64_t stride[kStreams];  // bytes

  __device__ __forceinline__ void ask(int n) {
    if (n < rows) {
      // The first stream is in_proj's output, the second one of our own tensors.
      ask_for_row<kBytes>(slots, n & (kDepth - 1), next[0]);
      if constexpr (kStreams == 2) ask_for_row<16>(slots, kDepth + (n & (kDepth - 1)), next[1]);
    }
#pragma unroll
    for (int i = 0; i < kStreams; ++i) next[i] += stride[i];
    commit_rows();
  }
  __device__ __forceinline__ void start() {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) ask(n);
  }
  // Wait for `kCount` rows (1 or 4) from n on.
  template <int kCount> __device__ __forceinline__ void wait() { wait_for_rows<kAhead - kCount>(); }
  __device__ __forceinline__ uint4 read(int stream, int n) const {
    return read_row(slots, stream * kDepth + (n & (kDepth - 1)));
  }
};

// What a warp keeps while it walks over the tokens of a tile: out[t] <- activation(convolution), divided by the length
// over the head if kNormal; 0 where no document is.
template <typename Pair, int kBytes, bool kSilu, bool kNormal> struct Walk {
  Ring<kBytes, QLA_FORWARD_RING, 1> ring;
  float w[4][8], b[8], past[3][8], eps;
  char *out;
  int64_t out_stride;

  // kCount tokens (1 or 4) from row n of the tile on
  template <int kCount> __device__ __forceinline__ void step(int n, bool is_there) {
    float x[kCount + 3][8];
    uint4 packed[kCount];
    ring.template wait<kCount>();
#pragma unroll
    for (int u = 0; u < kCount; ++u) packed[u] = ring.read(0, n + u);
#pragma unroll
    for (int u = 0; u < kCount; ++u) ring.ask(n + u + ring.kAhead);
#pragma unroll
    for (int e = 0; e < 8; ++e)
#pragma unroll
      for (int d = 0; d < 3; ++d) x[d][e] = past[d][e];
#pragma unroll
    for (int u = 0; u < kCount; ++u) widen<Pair>(x[u + 3], packed[u]);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      float y[8], squares = 0.f;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        y[e] = convolve(w, b, x, u, e);
        if (kSilu) y[e] *= Activation<kSilu>::sigmoid(y[e]);
        squares += y[e] * y[e];
      }
      if (kNormal) {
        const float scale = rsqrtf(sum_over_head(squares) + eps);
#pragma unroll
        for (int e = 0; e < 8; ++e) y[e] *= scale;
      }
      uint4 result = narrow<Pair>(y);
      if (kCount == 1 && !is_there) result = make_uint4(0, 0, 0, 0);
      *reinterpret_cast<uint4 *>(out) = result;
      out += out_stride;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e)
#pragma unroll
      for (int d = 0; d < 3; ++d) past[d][e] = x[kCount + d][e];
  }
};

// Tokens first <= t < last of one row of the batch.
template <typename Pair, typename Number, typename Weight, int kBytes, bool kBias, bool kSilu, bool kNormal>
__device__ __forceinline__ void convolve_tile(const Channels &c, Documents &docs, char *out, int64_t out_stride,
                                              const void *weights, const void *bias, float eps, int first, int last,
                                              const void *ring) {
  Walk<Pair, kBytes, kSilu, kNormal> walk;
  walk.ring = {own_ring(ring), last - first, {c.x + first * c.stride}, {c.stride}};
  walk.ring.start();
  load_weights<Weight>(walk.w, weights, Activation<kSilu>::kScale);
  load_bias<Weight, kBias>(walk.b, bias, Activation<kSilu>::kScale);
  walk.eps = eps;
  walk.out = out + first * out_stride;
  walk.out_stride = out_stride;
  docs.find(first);
  for (int start = first; start < last; start = docs.end) {
    if (start > first) docs.move(start);
#pragma unroll
    for (int d = 0; d < 3; ++d) load_past<Pair, Number, kBytes>(walk.past[d], c, docs, start - 3 + d);
    const int end = min(docs.end, last);
    int t = start;
    if (docs.is_there) {
#pragma unroll 1
      for (; t + 4 <= end; t += 4) walk.template step<4>(t - first, true);
    }
#pragma unroll 1
    for (; t < end; ++t) walk.template step<1>(t - first, docs.is_there);
  }
}

// With y = silu(convolution) and r its length over the head: d/dy of y / r is (d - y (y . d) / r^2) / r. From the
// gradient d of what was made of y, first: d <- d silu', along <- y silu', both over kScale, and this thread's share of
// y . y and y . d; then, with their sums: d <- the gradient of the convolution's result, over kScale.
template <bool kSilu, int kRows>
__device__ __forceinline__ void differentiate(float (&d)[8], float (&along)[8], float2 &sums, const float (&w)[4][8],
                                              const float (&b)[8], const float (&x)[kRows][8], int first) {
  sums = make_float2(0.f, 0.f);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    float y = convolve(w, b, x, first, e), slope = 1.f;
    if (kSilu) {
      const float s = Activation<kSilu>::sigmoid(y);
      y *= s;
      slope = s + y * (1.f / Activation<kSilu>::kScale - s);
    }
    sums.x += y * y;
    sums.y += y * d[e];
    along[e] = y * slope;
    d[e] *= slope;
  }
}

__device__ __forceinline__ void project_out(float (&d)[8], const float (&along)[8], float2 sums, float eps) {
  const float scale = rsqrtf(sum_over_head(sums.x) + eps);
  const float share = scale * scale * scale * sum_over_head(sums.y);
#pragma unroll
  for (int e = 0; e < 8; ++e) d[e] = scale * d[e] - share * along[e];
}

template <typename Number> __device__ __forceinline__ void add_state(float (&row)[8], const void *state, int place) {
#pragma unroll
  for (int e = 0; e < 8; ++e) row[e] += to_float(static_cast<const Number *>(state)[3 * e + place]);
}

// The same for the gradients. `pending`: what is known of the gradients of the last three tokens, to which the results
// of three tokens after each contribute. dw and db: the sums for the weights, over kScale.
template <typename Pair, int kBytes, bool kBias, bool kSilu, bool kNormal> struct BackwardWalk {
  Ring<kBytes, QLA_BACKWARD_RING, 2> ring;  // x, and the gradient of what was made of it
  float w[4][8], b[8], past[3][8], pending[3][8], dw[4][8], db[8], eps;
  char *dx;  // of the token three before the one that comes
  int64_t dx_stride;

  // kCount tokens (1 or 4) from row n of the tile on. `counts`: whether they are the tile's own; `stores`: whether the
  // tokens three before are. Four at once do both.
  template <int kCount> __device__ __forceinline__ void step(int n, bool counts, bool stores) {
    float x[kCount + 3][8], partial[kCount + 3][8];
    uint4 packed_x[kCount], packed_d[kCount];
    ring.template wait<kCount>();
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      packed_x[u] = ring.read(0, n + u);
      packed_d[u] = ring.read(1, n + u);
    }
#pragma unroll
    for (int u = 0; u < kCount; ++u) ring.ask(n + u + ring.kAhead);
#pragma unroll
    for (int e = 0; e < 8; ++e)
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        x[i][e] = past[i][e];
        partial[i][e] = pending[i][e];
      }
    constexpr int kPair = kCount == 1 ? 1 : 2;  // two tokens at a time hide each other's latencies
#pragma unroll
    for (int first = 0; first < kCount; first += kPair) {
      float d[kPair][8], along[kPair][8];
      float2 sums[kPair];
#pragma unroll
      for (int u = 0; u < kPair; ++u) {
        widen<Pair>(x[first + u + 3], packed_x[first + u]);
        widen<Pair>(d[u], packed_d[first + u]);
        differentiate<kSilu>(d[u], along[u], sums[u], w, b, x, first + u);
      }
#pragma unroll
      for (int u = 0; u < kPair; ++u) {
        if (kNormal) project_out(d[u], along[u], sums[u], eps);
      }
#pragma unroll
      for (int u = 0; u < kPair; ++u) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
#pragma unroll
          for (int j = 0; j < 3; ++j) partial[first + u + j][e] += w[j][e] * d[u][e];
          partial[first + u + 3][e] = w[3][e] * d[u][e];
        }
        if (kCount > 1 || counts) {
#pragma unroll
          for (int e = 0; e < 8; ++e) {
#pragma unroll
            for (int j = 0; j < 4; ++j) dw[j][e] += d[u][e] * x[first + u + j][e];
            if (kBias) db[e] += d[u][e];
          }
        }
        store(partial[first + u], kCount > 1 || stores);
      }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e)
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        past[i][e] = x[kCount + i][e];
        pending[i][e] = partial[kCount + i][e];
      }
  }

  // One token on, where there is no result that contributes.
  __device__ __forceinline__ void flush(bool stores) {
    store(pending[0], stores);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      pending[0][e] = pending[1][e];
      pending[1][e] = pending[2][e];
      pending[2][e] = 0.f;
    }
  }

  __device__ __forceinline__ void store(const float (&row)[8], bool stores) {
    if (stores) store_numbers<kBytes>(dx, narrow<Pair>(row));
    dx += dx_stride;
  }
};

// The gradient of x for tokens first <= t < last, and the weights' (and bias's) share of these tokens' results. Three
// results after the tile are differentiated as well; the tile that they belong to counts them for the weights.
template <typename Pair, typename Number, typename Weight, int kBytes, bool kBias, bool kSilu, bool kNormal>
__device__ __forceinline__ void convolve_tile_backward(const Channels &c, Documents &docs, const char *dout,
                                                       int64_t dout_stride, const void *dfinal, char *dx,
                                                       int64_t dx_stride, float *dweights, float *dbias,
                                                       const void *weights, const void *bias, float eps, int first,
                                                       int last, int tokens, const void *ring) {
  BackwardWalk<Pair, kBytes, kBias, kSilu, kNormal> walk;
  constexpr float kScale = Activation<kSilu>::kScale;
  const char *first_x = c.x + first * c.stride, *first_dout = dout + first * dout_stride;
  walk.ring = {own_ring(ring), min(last + 3, tokens) - first, {first_x, first_dout}, {c.stride, dout_stride}};
  walk.ring.start();
  load_weights<Weight>(walk.w, weights, kScale);
  load_bias<Weight, kBias>(walk.b, bias, kScale);
  walk.eps = eps;
  walk.dx_stride = dx_stride;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    walk.db[e] = 0.f;
#pragma unroll
    for (int j = 0; j < 4; ++j) walk.dw[j][e] = 0.f;
  }
  docs.find(first);
  for (int start = first; start < last; start = docs.end) {
    if (start > first) docs.move(start);
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      load_past<Pair, Number, kBytes>(walk.past[d], c, docs, start - 3 + d);
#pragma unroll
      for (int e = 0; e < 8; ++e) walk.pending[d][e] = 0.f;
    }
    const int end = docs.is_there ? min(docs.end, last + 3) : start;  // of the results that there are
    const int steps_end = min(docs.end, last) + 3;
    walk.dx = dx + (start - 3) * dx_stride;
    int t = start;
#pragma unroll 1
    for (; t < min(start + 3, end); ++t) walk.template step<1>(t - first, t < last, false);
#pragma unroll 1
    for (; t + 4 <= min(end, last); t += 4) walk.template step<4>(t - first, true, true);
#pragma unroll 1
    for (; t < end; ++t) walk.template step<1>(t - first, t < last, true);
#pragma unroll 1
    for (; t < steps_end; ++t) {
      if (dfinal != nullptr && t >= docs.end) {
        add_state<Number>(walk.pending[0], static_cast<const Number *>(dfinal) + docs.document * c.state_stride,
                          t - docs.end);
      }
      walk.flush(t - 3 >= start);
    }
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const auto &dw = walk.dw;
    reinterpret_cast<float4 *>(dweights)[e] =
        make_float4(kScale * dw[0][e], kScale * dw[1][e], kScale * dw[2][e], kScale * dw[3][e]);
    if (kBias) dbias[e] = kScale * walk.db[e];
  }
}

// Gradient of the inputs before a document, dstate[8][3]: from its first three results, and, where it is shorter, from
// the part of its final state that reaches back before it.
template <typename Pair, typename Number, typename Weight, int kBytes, bool kBias, bool kSilu, bool kNormal>
__device__ __forceinline__ void differentiate_start(const Channels &c, const Documents &docs, const char *dout,
                                                    int64_t dout_stride, const void *dfinal, void *dstate,
                                                    const void *weights, const void *bias, float eps) {
  float w[4][8], b[8], x[6][8], sums[3][8];
  load_weights<Weight>(w, weights, Activation<kSilu>::kScale);
  load_bias<Weight, kBias>(b, bias, Activation<kSilu>::kScale);
#pragma unroll
  for (int d = 0; d < 3; ++d) load_past<Pair, Number, kBytes>(x[d], c, docs, docs.start - 3 + d);
#pragma unroll
  for (int m = 0; m < 3; ++m)
#pragma unroll
    for (int e = 0; e < 8; ++e) sums[m][e] = 0.f;
  const int length = docs.end - docs.start;
#pragma unroll
  for (int p = 0; p < 3; ++p) {
    if (p < length) {
      const int64_t t = docs.start + p;
      float d[8], along[8];
      float2 shares;
      widen<Pair>(x[p + 3], load_numbers<kBytes>(c.x + t * c.stride));
      widen<Pair>(d, load_numbers<16>(dout + t * dout_stride));
      differentiate<kSilu>(d, along, shares, w, b, x, p);
      if (kNormal) project_out(d, along, shares, eps);
#pragma unroll
      for (int m = p; m < 3; ++m)
#pragma unroll
        for (int e = 0; e < 8; ++e) sums[m][e] += w[m - p][e] * d[e];
    }
  }
  if (dfinal != nullptr) {
#pragma unroll
    for (int m = 0; m < 3; ++m)
      if (m >= length) add_state<Number>(sums[m], dfinal, m - length);
  }
#pragma unroll
  for (int e = 0; e < 8; ++e)
#pragma unroll
    for (int m = 0; m < 3; ++m)
      static_cast<Number *>(dstate)[3 * e + m] = static_cast<Number>(sums[m][e]);
}

// A thread's head, of query heads, key heads and value heads side by side. Where their number is odd, the second half
// of the last warp repeats the last one.
struct Head {
  int index, in_part, heads, channel;

  __device__ __forceinline__ Head(int first, int key_heads, int value_heads) {
    index = min(first + static_cast<int>((threadIdx.x >> 4) & 1), 2 * key_heads + value_heads - 1);
    const bool is_value = index >= 2 * key_heads;
    heads = is_value ? value_heads : key_heads;
    in_part = index - (is_value ? 2 * key_heads : index >= key_heads ? key_heads : 0);
    channel = index * 128 + (threadIdx.x & 15) * 8;
  }

  // This thread's place in token 0 of q, k or v, [T, heads, 128]
  __device__ __forceinline__ char *place(void *q, void *k, void *v, int key_heads) const {
    void *part = index >= 2 * key_heads ? v : index >= key_heads ? k : q;
    return static_cast<char *>(part) + (in_part * 128 + (threadIdx.x & 15) * 8) * 2;
  }
};

template <typename Number>
__device__ __forceinline__ Channels channels_of(const Head &head, const void *x, int64_t stride, const void *state,
                                                int channels) {
  const void *own = state == nullptr ? nullptr : static_cast<const Number *>(state) + 3 * head.channel;
  return {static_cast<const char *>(x) + 2 * head.channel, 2 * stride, own, 3 * static_cast<int64_t>(channels)};
}

// Two heads from `first_head` on; pointers are to the row of the batch and its first channel, strides in numbers.
template <typename Pair, typename Number, typename Weight, int kBytes, bool kBias, bool kSilu>
__device__ __forceinline__ void convolve_heads(const void *x, int64_t stride, const void *weight, const void *bias,
                                               const void *state, const int *offsets, void *q, void *k, void *v,
                                               const void *ring, float eps, int first_head, int key_heads,
                                               int value_heads, int first, int last, int tokens, int row,
                                               int documents, int has_state, int is_normalised) {
  const Head head(first_head, key_heads, value_heads);
  const Channels c =
      channels_of<Number>(head, x, stride, has_state ? state : nullptr, 128 * (2 * key_heads + value_heads));
  Documents docs(offsets, documents, row, tokens);
  const void *weights = static_cast<const Weight *>(weight) + 4 * head.channel;
  const void *biases = static_cast<const Weight *>(bias) + (kBias ? head.channel : 0);
  char *out = head.place(q, k, v, key_heads);
  const int64_t out_stride = 256 * static_cast<int64_t>(head.heads);
  if (is_normalised && first_head < 2 * key_heads) {
    convolve_tile<Pair, Number, Weight, kBytes, kBias, kSilu, true>(c, docs, out, out_stride, weights, biases, eps,
                                                                    first, last, ring);
  } else {
    convolve_tile<Pair, Number, Weight, kBytes, kBias, kSilu, false>(c, docs, out, out_stride, weights, biases, eps,
                                                                     first, last, ring);
  }
}

template <typename Pair, typename Number, typename Weight, int kBytes, bool kBias, bool kSilu>
__device__ __forceinline__ void convolve_heads_backward(
    const void *x, int64_t stride, const void *weight, const void *bias, const void *state, const int *offsets,
    const void *dq, const void *dk, const void *dv, const void *dfinal, void *dx, int64_t dx_stride, float *dweight,
    float *dbias, const void *ring, float eps, int first_head, int key_heads, int value_heads,
    int first, int last, int tokens, int row, int documents, int has_state, int has_dfinal, int is_normalised) {
  const Head head(first_head, key_heads, value_heads);
  const Channels c =
      channels_of<Number>(head, x, stride, has_state ? state : nullptr, 128 * (2 * key_heads + value_heads));
  Documents docs(offsets, documents, row, tokens);
  const void *weights = static_cast<const Weight *>(weight) + 4 * head.channel;
  const void *biases = static_cast<const Weight *>(bias) + (kBias ? head.channel : 0);
  const char *dout = head.place(const_cast<void *>(dq), const_cast<void *>(dk), const_cast<void *>(dv), key_heads);
  const int64_t dout_stride = 256 * static_cast<int64_t>(head.heads);
  const void *own_dfinal = has_dfinal ? static_cast<const Number *>(dfinal) + 3 * head.channel : nullptr;
  char *own_dx = static_cast<char *>(dx) + 2 * head.channel;
  dweight += 4 * head.channel;
  dbias += kBias ? head.channel : 0;
  if (is_normalised && first_head < 2 * key_heads) {
    convolve_tile_backward<Pair, Number, Weight, kBytes, kBias, kSilu, true>(
        c, docs, dout, dout_stride, own_dfinal, own_dx, 2 * dx_stride, dweight, dbias, weights, biases, eps, first,
        last, tokens, ring);
  } else {
    convolve_tile_backward<Pair, Number, Weight, kBytes, kBias, kSilu, false>(
        c, docs, dout, dout_stride, own_dfinal, own_dx, 2 * dx_stride, dweight, dbias, weights, biases, eps, first,
        last, tokens, ring);
  }
}

template <typename Pair, typename Number, typename Weight, int kBytes, bool kBias, bool kSilu>
__device__ __forceinline__ void differentiate_state(const void *x, int64_t stride, const void *weight,
                                                    const void *bias, const void *state, const int *offsets,
                                                    const void *dq, const void *dk, const void *dv, const void *dfinal,
                                                    void *dstate, float eps, int first_head, int key_heads,
                                                    int value_heads, int tokens, int document, int is_packed,
                                                    int has_dfinal, int is_normalised) {
  const Head head(first_head, key_heads, value_heads);
  const int channels = 128 * (2 * key_heads + value_heads);
  const Channels c = channels_of<Number>(head, x, stride, state, channels);
  Documents docs(offsets, is_packed, document, tokens);
  docs.start = is_packed ? offsets[document] : 0;
  docs.end = is_packed ? offsets[document + 1] : tokens;
  const void *weights = static_cast<const Weight *>(weight) + 4 * head.channel;
  const void *biases = static_cast<const Weight *>(bias) + (kBias ? head.channel : 0);
  const char *dout = head.place(const_cast<void *>(dq), const_cast<void *>(dk), const_cast<void *>(dv), key_heads);
  const int64_t dout_stride = 256 * static_cast<int64_t>(head.heads);
  const int64_t place = document * c.state_stride + 3 * head.channel;
  const void *own_dfinal = has_dfinal ? static_cast<const Number *>(dfinal) + place : nullptr;
  void *own_dstate = static_cast<Number *>(dstate) + place;
  if (is_normalised && first_head < 2 * key_heads) {
    differentiate_start<Pair, Number, Weight, kBytes, kBias, kSilu, true>(c, docs, dout, dout_stride, own_dfinal,
                                                                          own_dstate, weights, biases, eps);
  } else {
    differentiate_start<Pair, Number, Weight, kBytes, kBias, kSilu, false>(c, docs, dout, dout_stride, own_dfinal,
                                                                           own_dstate, weights, biases, eps);
  }
}

}  // namespace qla
""".replace("QLA_FORWARD_RING", str(FORWARD_RING)).replace("QLA_BACKWARD_RING", str(BACKWARD_RING))
    + GATES
)
