# mypy: disable-error-code="valid-type,no-untyped-def"
"""The kernels of the gated norm: x r w silu(z) with r = 1 / sqrt(mean(x^2) + eps), and the gradients.

With n = x r and G the gradient of the result:

    dz = G w n silu'(z)    dw = sum G n silu(z)    dx = r (c - n mean(c n)) with c = G w silu(z)

n and r are made again in the backward pass: nothing is saved.
"""

from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from ..compiled import compiled
from ..device import architecture
from ..row_sums import sum_rows
from ..rows import DTYPES, HEAD_DIM, PAIR_TYPES, ROWS, THREADS, WARPS, alignment, tile_length

RING = 4
BLOCKS = {"normalise": 8, "normalise_backward": 6}  # of a multiprocessor
WAVES = {"normalise": 4, "normalise_backward": 1}  # shorter tiles begin and end more evenly; backward, each has a sum

NORM = (
    ROWS
    + r"""
namespace qla {

// A warp's two heads of a row of the batch; where their number is odd, its second half repeats the last one.
struct NormHead {
  int index, lane;
  bool is_own;
  __device__ __forceinline__ NormHead(int first, int heads) {
    const int half = (threadIdx.x >> 4) & 1;
    index = min(first + half, heads - 1);
    is_own = first + half < heads;
    lane = (threadIdx.x & 15) * 8;
  }
  __device__ __forceinline__ int64_t byte() const { return 2 * (index * 128 + lane); }
};

__device__ __forceinline__ void load_scale(float (&w)[8], const float *weight, int lane, float shift) {
#pragma unroll
  for (int e = 0; e < 8; ++e) w[e] = weight[lane + e] + shift;
}

// Pointers are to the first token, strides in numbers from token to token; all tensors have 128 numbers a head.
template <typename Pair, int kBytes>
__device__ __forceinline__ void normalise_tile(const void *x, int64_t x_stride, const void *z, int64_t z_stride,
                                               const float *weight, void *y, int64_t y_stride, const void *ring,
                                               float eps, float shift, int first_head, int heads, int rows) {
  constexpr int kDepth = QLA_RING;
  const NormHead head(first_head, heads);
  const uint32_t slots = own_ring(ring);
  const char *next_x = static_cast<const char *>(x) + head.byte(), *next_z = static_cast<const char *>(z) + head.byte();
  char *out = static_cast<char *>(y) + head.byte();
#pragma unroll
  for (int n = 0; n < kDepth - 1; ++n) {
    if (n < rows) {
      ask_for_row<16>(slots, n, next_x);
      ask_for_row<kBytes>(slots, kDepth + n, next_z);
    }
    next_x += 2 * x_stride;
    next_z += 2 * z_stride;
    commit_rows();
  }
  float w[8];
  load_scale(w, weight, head.lane, shift);
  for (int n = 0; n < rows; ++n) {
    float u[8], v[8], squares = 0.f;
    wait_for_rows<kDepth - 2>();
    widen<Pair>(u, read_row(slots, n & (kDepth - 1)));
    widen<Pair>(v, read_row(slots, kDepth + (n & (kDepth - 1))));
    if (n + kDepth - 1 < rows) {
      ask_for_row<16>(slots, (n + kDepth - 1) & (kDepth - 1), next_x);
      ask_for_row<kBytes>(slots, kDepth + ((n + kDepth - 1) & (kDepth - 1)), next_z);
    }
    next_x += 2 * x_stride;
    next_z += 2 * z_stride;
    commit_rows();
#pragma unroll
    for (int e = 0; e < 8; ++e) squares += u[e] * u[e];
    const float scale = rsqrtf(sum_over_head(squares) * (1.f / 128.f) + eps);
#pragma unroll
    for (int e = 0; e < 8; ++e) u[e] *= scale * w[e] * v[e] * sigmoid(v[e]);
    *reinterpret_cast<uint4 *>(out) = narrow<Pair>(u);
    out += 2 * y_stride;
  }
}

// dweight[128]: this warp's share.
template <typename Pair, int kBytes, int kOutBytes>
__device__ __forceinline__ void normalise_tile_backward(const void *dy, int64_t dy_stride, const void *x,
                                                        int64_t x_stride, const void *z, int64_t z_stride,
                                                        const float *weight, void *dx, int64_t dx_stride, void *dz,
                                                        int64_t dz_stride, float *dweight, const void *ring,
                                                        float eps, float shift, int first_head, int heads, int rows) {
  constexpr int kDepth = QLA_RING;
  const NormHead head(first_head, heads);
  const uint32_t slots = own_ring(ring);
  const char *next_x = static_cast<const char *>(x) + head.byte(), *next_z = static_cast<const char *>(z) + head.byte();
  const char *next_dy = static_cast<const char *>(dy) + head.byte();
  char *own_dx = static_cast<char *>(dx) + head.byte(), *own_dz = static_cast<char *>(dz) + head.byte();
#pragma unroll
  for (int n = 0; n < kDepth - 1; ++n) {
    if (n < rows) {
      ask_for_row<16>(slots, n, next_x);
      ask_for_row<kBytes>(slots, kDepth + n, next_z);
      ask_for_row<16>(slots, 2 * kDepth + n, next_dy);
    }
    next_x += 2 * x_stride;
    next_z += 2 * z_stride;
    next_dy += 2 * dy_stride;
    commit_rows();
  }
  float w[8], dw[8];
  load_scale(w, weight, head.lane, shift);
#pragma unroll
  for (int e = 0; e < 8; ++e) dw[e] = 0.f;
  for (int n = 0; n < rows; ++n) {
    float u[8], v[8], d[8], squares = 0.f, product = 0.f;
    wait_for_rows<kDepth - 2>();
    widen<Pair>(u, read_row(slots, n & (kDepth - 1)));
    widen<Pair>(v, read_row(slots, kDepth + (n & (kDepth - 1))));
    widen<Pair>(d, read_row(slots, 2 * kDepth + (n & (kDepth - 1))));
    if (n + kDepth - 1 < rows) {
      const int slot = (n + kDepth - 1) & (kDepth - 1);
      ask_for_row<16>(slots, slot, next_x);
      ask_for_row<kBytes>(slots, kDepth + slot, next_z);
      ask_for_row<16>(slots, 2 * kDepth + slot, next_dy);
    }
    next_x += 2 * x_stride;
    next_z += 2 * z_stride;
    next_dy += 2 * dy_stride;
    commit_rows();
    // v becomes G w x silu'(z), d becomes G silu(z)
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float s = sigmoid(v[e]), gate = v[e] * s, slope = s + gate * (1.f - s), before = d[e] * w[e];
      squares += u[e] * u[e];
      v[e] = before * slope * u[e];
      product += before * gate * u[e];
      d[e] *= gate;
    }
    const float scale = rsqrtf(sum_over_head(squares) * (1.f / 128.f) + eps);
    const float share = scale * scale * sum_over_head(product) * (1.f / 128.f);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      v[e] *= scale;
      dw[e] += d[e] * u[e] * scale;
      d[e] = scale * (d[e] * w[e] - share * u[e]);
    }
    *reinterpret_cast<uint4 *>(own_dx) = narrow<Pair>(d);
    store_numbers<kOutBytes>(own_dz, narrow<Pair>(v));
    own_dx += 2 * dx_stride;
    own_dz += 2 * dz_stride;
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    dw[e] = head.is_own ? dw[e] : 0.f;
    dw[e] += __shfl_xor_sync(0xffffffffu, dw[e], 16);
  }
  if ((threadIdx.x & 16) == 0) {
    float4 *own = reinterpret_cast<float4 *>(dweight + head.lane);
    own[0] = make_float4(dw[0], dw[1], dw[2], dw[3]);
    own[1] = make_float4(dw[4], dw[5], dw[6], dw[7]);
  }
}

}  // namespace qla
""".replace("QLA_RING", str(RING))
)


def normalise_kernel(dtype: str, align: int) -> Any:
    """Build the kernel for 16-bit numbers.

    Arguments of the kernel: x [B, T, HV, 128]; gate [B, T, HV, 128] with strides of its own for B and T, rows aligned
    to `align` bytes; weight [128] float32; out: y as x, with strides of its own for B and T; eps; shift, added to the
    weight; length: tokens of a tile. A warp takes two heads of a tile.
    """
    rows, tokens, heads = T.dynamic("rows"), T.dynamic("tokens"), T.dynamic("heads")
    x_row, x_token = T.dynamic("x_row", "int64"), T.dynamic("x_token", "int64")
    z_row, z_token = T.dynamic("z_row", "int64"), T.dynamic("z_token", "int64")
    y_row, y_token = T.dynamic("y_row", "int64"), T.dynamic("y_token", "int64")
    shape = (rows, tokens, heads, HEAD_DIM)

    @T.prim_func
    def normalise(
        x: T.StridedTensor(shape, (x_row, x_token, HEAD_DIM, 1), dtype),
        gate: T.StridedTensor(shape, (z_row, z_token, HEAD_DIM, 1), dtype),
        weight: T.Tensor((HEAD_DIM,), "float32"),
        y: T.StridedTensor(shape, (y_row, y_token, HEAD_DIM, 1), dtype),
        eps: T.float32,
        shift: T.float32,
        length: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(T.ceildiv(heads, 2) * T.ceildiv(tokens, length) * rows, WARPS), threads=THREADS
        ) as block:
            T.import_source(NORM)
            ring = T.alloc_shared((2 * RING, THREADS, 8), dtype)
            T.annotate_min_blocks_per_sm(BLOCKS["normalise"])
            pairs, tiles, unit = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            row, first = T.alloc_var("int32"), T.alloc_var("int32")
            pairs = T.truncdiv(heads + 1, 2)
            tiles = T.truncdiv(tokens + length - 1, length)
            unit = block * WARPS + T.get_thread_binding() // 32
            if unit < pairs * tiles * rows:
                row = T.truncdiv(unit, pairs * tiles)
                first = (T.truncdiv(unit, pairs) - row * tiles) * length
                T.call_extern(
                    "handle",
                    f"qla::normalise_tile<{PAIR_TYPES[dtype]}, {align}>",
                    T.address_of(x[row, first, 0, 0]),
                    x_token,
                    T.address_of(gate[row, first, 0, 0]),
                    z_token,
                    T.address_of(weight[0]),
                    T.address_of(y[row, first, 0, 0]),
                    y_token,
                    T.access_ptr(ring[0, 0, 0], "rw"),
                    eps,
                    shift,
                    2 * (unit - T.truncdiv(unit, pairs) * pairs),
                    heads,
                    T.min(length, tokens - first),
                )

    return normalise


def normalise_backward_kernel(dtype: str, align: int, dgate_align: int) -> Any:
    """Build the kernel; arguments as for `normalise_kernel`, and dy as x; out: dx and dgate, with strides of their own
    for B and T, dgate's rows aligned to `dgate_align` bytes, and dweight [warps, 128], to be summed over the first."""
    rows, tokens, heads, parts = T.dynamic("rows"), T.dynamic("tokens"), T.dynamic("heads"), T.dynamic("parts")
    x_row, x_token = T.dynamic("x_row", "int64"), T.dynamic("x_token", "int64")
    z_row, z_token = T.dynamic("z_row", "int64"), T.dynamic("z_token", "int64")
    dy_row, dy_token = T.dynamic("dy_row", "int64"), T.dynamic("dy_token", "int64")
    dx_row, dx_token = T.dynamic("dx_row", "int64"), T.dynamic("dx_token", "int64")
    dz_row, dz_token = T.dynamic("dz_row", "int64"), T.dynamic("dz_token", "int64")
    shape = (rows, tokens, heads, HEAD_DIM)

    @T.prim_func
    def normalise_backward(
        dy: T.StridedTensor(shape, (dy_row, dy_token, HEAD_DIM, 1), dtype),
        x: T.StridedTensor(shape, (x_row, x_token, HEAD_DIM, 1), dtype),
        gate: T.StridedTensor(shape, (z_row, z_token, HEAD_DIM, 1), dtype),
        weight: T.Tensor((HEAD_DIM,), "float32"),
        dx: T.StridedTensor(shape, (dx_row, dx_token, HEAD_DIM, 1), dtype),
        dgate: T.StridedTensor(shape, (dz_row, dz_token, HEAD_DIM, 1), dtype),
        dweight: T.Tensor((parts, HEAD_DIM), "float32"),
        eps: T.float32,
        shift: T.float32,
        length: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(T.ceildiv(heads, 2) * T.ceildiv(tokens, length) * rows, WARPS), threads=THREADS
        ) as block:
            T.import_source(NORM)
            ring = T.alloc_shared((3 * RING, THREADS, 8), dtype)
            T.annotate_min_blocks_per_sm(BLOCKS["normalise_backward"])
            pairs, tiles, unit = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            row, first = T.alloc_var("int32"), T.alloc_var("int32")
            pairs = T.truncdiv(heads + 1, 2)
            tiles = T.truncdiv(tokens + length - 1, length)
            unit = block * WARPS + T.get_thread_binding() // 32
            if unit < pairs * tiles * rows:
                row = T.truncdiv(unit, pairs * tiles)
                first = (T.truncdiv(unit, pairs) - row * tiles) * length
                T.call_extern(
                    "handle",
                    f"qla::normalise_tile_backward<{PAIR_TYPES[dtype]}, {align}, {dgate_align}>",
                    T.address_of(dy[row, first, 0, 0]),
                    dy_token,
                    T.address_of(x[row, first, 0, 0]),
                    x_token,
                    T.address_of(gate[row, first, 0, 0]),
                    z_token,
                    T.address_of(weight[0]),
                    T.address_of(dx[row, first, 0, 0]),
                    dx_token,
                    T.address_of(dgate[row, first, 0, 0]),
                    dz_token,
                    T.address_of(dweight[unit, 0]),
                    T.access_ptr(ring[0, 0, 0], "rw"),
                    eps,
                    shift,
                    2 * (unit - T.truncdiv(unit, pairs) * pairs),
                    heads,
                    T.min(length, tokens - first),
                )

    return normalise_backward


def _tiles(x: Tensor, kernel: str) -> tuple[int, int]:
    """Tokens of a tile, and warps."""
    rows, tokens, heads, _ = x.shape
    columns = (heads + 1) // 2 * rows
    length = tile_length(tokens, columns, BLOCKS[kernel], x.get_device(), WAVES[kernel])
    return length, columns * -(-tokens // length)


def normalise(x: Tensor, gate: Tensor, weight: Tensor, eps: float, zero_centered: bool, y: Tensor) -> None:
    """Write y; x, gate and y [B, T, HV, 128], of which B and T may be strided freely."""
    if x.numel() == 0:
        return
    kernel = compiled(architecture(x.get_device()), normalise_kernel, DTYPES[x.dtype], alignment(gate))
    kernel(x, gate, weight.float().contiguous(), y, eps, float(zero_centered), _tiles(x, "normalise")[0])


def normalise_backward(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float, zero_centered: bool, dx: Tensor, dgate: Tensor
) -> Tensor:
    """Write dx and dgate; the gradient of the weight [128], float32, a sum of fixed order."""
    if x.numel() == 0:
        return torch.zeros(HEAD_DIM, dtype=torch.float32, device=x.device)
    length, warps = _tiles(x, "normalise_backward")
    dweight = torch.empty(warps, HEAD_DIM, dtype=torch.float32, device=x.device)
    choices = (DTYPES[x.dtype], alignment(gate), alignment(dgate))
    kernel = compiled(architecture(x.get_device()), normalise_backward_kernel, *choices)
    weight = weight.float().contiguous()
    kernel(dy, x, gate, weight, dx, dgate, dweight, eps, float(zero_centered), length)
    return sum_rows(dweight)
