"""The inline device functions of the gates: what one warp does with the gates of a run of tokens."""

GATES = r"""
namespace qla {

// The gates lie behind the other channels of a token: logits of beta, then what softplus takes.
struct Gates {
  char *logits;
  int64_t token_stride, row_stride;  // bytes
  const float *A_log, *dt_bias;
  const int *offsets;
  int documents, heads, tokens, rows;

  // Where token `index` of the flattened batch has its logit for a head
  template <typename Number> __device__ __forceinline__ Number *place(int index, int head) const {
    const int row = rows == 1 ? 0 : index / tokens;
    return reinterpret_cast<Number *>(logits + (index - row * tokens) * token_stride + row * row_stride) + head;
  }
  __device__ __forceinline__ bool is_there(int index) const { return documents == 0 || index < offsets[documents]; }
};

__device__ __forceinline__ Gates gates_of(const void *projected, int64_t token_stride, int64_t row_stride,
                                          const float *A_log, const float *dt_bias, const int *offsets, int key_heads,
                                          int value_heads, int documents, int tokens, int rows) {
  char *logits = const_cast<char *>(static_cast<const char *>(projected)) + 512 * (key_heads + value_heads);
  return {logits, 2 * token_stride, 2 * row_stride, A_log, dt_bias, offsets, documents, value_heads, tokens, rows};
}

// As exact for small values as for large ones.
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.f) + log1pf(__expf(-fabsf(x))); }

// g = -exp(A_log) softplus(alpha + dt_bias) and beta = sigmoid(logit), for tokens first <= t < last of the flattened
// batch; a thread a head, eight tokens on their way at a time.
template <typename Number>
__device__ __forceinline__ void make_gates(const void *projected, int64_t token_stride, int64_t row_stride,
                                           const float *A_log, const float *dt_bias, const int *offsets, float *g,
                                           float *beta, int key_heads, int value_heads, int documents, int tokens,
                                           int rows, int first, int last) {
  const Gates p = gates_of(projected, token_stride, row_stride, A_log, dt_bias, offsets, key_heads, value_heads,
                           documents, tokens, rows);
  for (int head = threadIdx.x & 31; head < p.heads; head += 32) {
    const float rate = -__expf(p.A_log[head]), shift = p.dt_bias[head];
    for (int n = first; n < last; n += 8) {
      Number logit[8], alpha[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (n + i < last) {
          const Number *place = p.place<Number>(n + i, head);
          logit[i] = place[0];
          alpha[i] = place[p.heads];
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (n + i < last) {
          const bool is_there = p.is_there(n + i);
          const int64_t place = static_cast<int64_t>(n + i) * p.heads + head;
          beta[place] = is_there ? sigmoid(to_float(logit[i])) : 0.f;
          g[place] = is_there ? rate * softplus(to_float(alpha[i]) + shift) : 0.f;
        }
      }
    }
  }
}

// Gradients of the logits and of alpha into `dprojected`, sums over the tokens into sums[2][heads]: of A_log, dt_bias.
template <typename Number>
__device__ __forceinline__ void differentiate_gates(const void *projected, int64_t token_stride, int64_t row_stride,
                                                    const float *A_log, const float *dt_bias, const int *offsets,
                                                    const float *dg, const float *dbeta, void *dprojected,
                                                    int64_t dtoken_stride, int64_t drow_stride, float *sums,
                                                    int key_heads, int value_heads, int documents, int tokens,
                                                    int rows, int first, int last) {
  const Gates p = gates_of(projected, token_stride, row_stride, A_log, dt_bias, offsets, key_heads, value_heads,
                           documents, tokens, rows);
  const Gates out = gates_of(dprojected, dtoken_stride, drow_stride, A_log, dt_bias, offsets, key_heads, value_heads,
                             documents, tokens, rows);
  for (int head = threadIdx.x & 31; head < p.heads; head += 32) {
    const float rate = -__expf(p.A_log[head]), shift = p.dt_bias[head];
    float sum_A = 0.f, sum_dt = 0.f;
    for (int n = first; n < last; n += 8) {
      Number logit[8], alpha[8];
      float from_g[8], from_beta[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (n + i < last) {
          const Number *place = p.place<Number>(n + i, head);
          logit[i] = place[0];
          alpha[i] = place[p.heads];
          const int64_t gate = static_cast<int64_t>(n + i) * p.heads + head;
          from_g[i] = dg[gate];
          from_beta[i] = dbeta[gate];
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (n + i < last) {
          float dlogit = 0.f, dalpha = 0.f;
          if (p.is_there(n + i)) {
            const float x = to_float(alpha[i]) + shift, b = sigmoid(to_float(logit[i]));
            dlogit = from_beta[i] * b * (1.f - b);
            dalpha = from_g[i] * rate * sigmoid(x);
            sum_A += from_g[i] * rate * softplus(x);
            sum_dt += dalpha;
          }
          Number *place = out.place<Number>(n + i, head);
          place[0] = static_cast<Number>(dlogit);
          place[p.heads] = static_cast<Number>(dalpha);
        }
      }
    }
    sums[head] = sum_A;
    sums[p.heads + head] = sum_dt;
  }
}

}  // namespace qla
"""
