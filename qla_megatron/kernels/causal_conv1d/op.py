"""Causal depthwise convolution, and what the layer makes of in_proj's output: the public functions."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..backend import BACKENDS, choose_backend
from ..checks import (
    check_bool,
    check_choice,
    check_dtype,
    check_heads,
    check_offset_values,
    check_offsets,
    check_same_device,
    check_shape,
)
from ..rows import DTYPES, HEAD_DIM
from . import reference
from .autograd import forward_op
from .tiles import WIDTH

L2_NORM_EPS = 1e-6


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """y_t = activation(bias + sum_j weight[:, j] x_{t-W+1+j}) per channel, within each document; differentiable.

    Before a document's first token lies its initial state, or 0. Computes in float32 (float64 if x is float64). Tokens
    after the last document's end get outputs and gradients of exactly 0. Deterministic, without host reads: the values
    of cu_seqlens are checked where they are on the CPU and nothing is being compiled.

    Args:
        x: [B, T, D] in bfloat16, float16, float32 or float64; it may be a view into a wider tensor.
        weight: [D, W]; the last column meets the token itself, as in `torch.nn.Conv1d` with padding W - 1.
        bias: [D] or None.
        activation: "silu" (or its other name "swish") or None.
        initial_state: [N, D, W-1], the W - 1 inputs before each document's first token, oldest first; N = B, or the
            number of documents.
        output_final_state: whether to return the last W - 1 inputs of each document, the initial state's among them
            where the document is shorter.
        cu_seqlens: [N+1] int32 or int64 offsets of documents packed into one row (B = 1); documents may be empty.
        backend: "reference" (plain torch, any device), "tilelang" (kernels for Hopper: W = 4, D a multiple of 128,
            bfloat16 or float16), or "auto": the reference for CPU tensors, the kernels for CUDA tensors. No backend
            stands in for another.

    Returns:
        y [B, T, D] in x's dtype, and the final states [N, D, W-1] in x's dtype, or None.

    Raises:
        ValueError: a shape, device or value doesn't fit. TypeError: a type or dtype doesn't fit.
        NotImplementedError: what the backend doesn't serve.
    """
    check_shape("x", x, B=None, T=None, D=None)
    B, T, D = x.shape
    check_dtype("x", x)
    _check_weights(weight, bias, D, "x", x)
    check_choice("activation", activation, ("silu", "swish", None))
    check_bool("output_final_state", output_final_state)
    _check_documents(cu_seqlens, initial_state, B, T, weight, "x", x)
    check_choice("backend", backend, BACKENDS)
    is_silu = activation is not None
    if choose_backend(backend, x.device) == "reference":
        return reference.causal_conv1d(x, weight, bias, is_silu, initial_state, output_final_state, cu_seqlens)
    if D % HEAD_DIM or D == 0:
        raise NotImplementedError(
            f'the fused convolution takes D a multiple of {HEAD_DIM}, got D = {D}; backend="reference" takes any'
        )
    _check_supported(x, weight)
    rows = (x if x.stride(2) == 1 else x.contiguous()).transpose(0, 1)
    tensors = (rows, weight, bias, None, None, initial_state, cu_seqlens)
    _, _, y, _, _, final_state, _ = forward_op(*tensors, 0, D // HEAD_DIM, is_silu, None, output_final_state)
    return y.flatten(2), final_state if output_final_state else None


class ConvolvedProjection(NamedTuple):
    """What `convolve_projection` makes of in_proj's output.

    Attributes:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. All three contiguous with the kernels.
        g, beta: [B, T, HV] float32 (float64 if the projection is float64): log decay and strength of the writes.
        gate: [B, T, HV, V], a view of the projection: what `gated_rms_norm` takes as gate.
        final_state: [N, D, W-1], or None unless it was asked for.
        room: with the kernels, what `gated_rms_norm` takes as room: [T, B, P] without memory of its own. Its gradient
            is the projection's gradient, of which the norm's backward pass writes z's columns and this op's the others,
            in place: the parts are never gathered. None with the reference.
        room_column: the first column of the gate.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    gate: Tensor
    final_state: Tensor | None
    room: Tensor | None
    room_column: int


def convolve_projection(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    key_heads: int,
    value_heads: int,
    value_dim: int,
    use_qk_l2norm: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> ConvolvedProjection:
    """From in_proj's output to the inputs of the gated delta rule, in one kernel; differentiable, deterministic.

    q, k, v = split(silu(convolution(projection)))    g = -exp(A_log) softplus(alpha + dt_bias)    beta = sigmoid(b)

    within each document, as Hugging Face's Qwen3-Next does (transformers, models/qwen3_next). Computes in float32
    (float64 if the projection is float64) and rounds once. Tokens after the last document's end get outputs and
    gradients of exactly 0. The kernels read the projection where it lies and save nothing but it.

    Args:
        projected: [T, B, P], Megatron's order: [q | k | v | z | b | alpha] side by side, each head by head.
        weight, bias: [D, W] and [D] or None, of the channels q, k, v.
        A_log, dt_bias: [HV].
        key_heads, value_heads, value_dim: H, HV and V; D = 2 H K + HV V and P = D + HV V + 2 HV.
        use_qk_l2norm: divide q and k by sqrt(sum of squares over K + 1e-6).
        initial_state, output_final_state, cu_seqlens: as for `causal_conv1d`.
        backend: as for `causal_conv1d`; the kernels take K = V = 128.

    Raises:
        ValueError: a shape, device or value doesn't fit. TypeError: a type or dtype doesn't fit.
        NotImplementedError: what the backend doesn't serve.
    """
    check_shape("projected", projected, T=None, B=None, P=None)
    T, B, P = projected.shape
    check_dtype("projected", projected)
    check_heads(key_heads, value_heads)
    z_width = value_heads * value_dim
    D = P - z_width - 2 * value_heads
    key_dim, rest = divmod(D - z_width, 2 * key_heads)
    if key_dim < 1 or rest:
        raise ValueError(
            f"projected must have shape [T, B, P] with P = 2 H K + 2 HV V + 2 HV for H={key_heads}, HV={value_heads}, "
            f"V={value_dim} and some K, got {tuple(projected.shape)}"
        )
    _check_weights(weight, bias, D, "projected", projected)
    for name, parameter in (("A_log", A_log), ("dt_bias", dt_bias)):
        check_shape(name, parameter, HV=value_heads)
        check_dtype(name, parameter)
        check_same_device(name, parameter, "projected", projected)
    check_bool("use_qk_l2norm", use_qk_l2norm)
    check_bool("output_final_state", output_final_state)
    _check_documents(cu_seqlens, initial_state, B, T, weight, "projected", projected)
    check_choice("backend", backend, BACKENDS)
    l2norm_eps = L2_NORM_EPS if use_qk_l2norm else None
    gate = projected.transpose(0, 1)[..., D : D + z_width].unflatten(-1, (value_heads, value_dim))
    if choose_backend(backend, projected.device) == "reference":
        q, k, v, g, beta, final_state = reference.convolve_projection(
            projected,
            weight,
            bias,
            A_log,
            dt_bias,
            key_heads,
            value_heads,
            z_width,
            l2norm_eps,
            initial_state,
            output_final_state,
            cu_seqlens,
        )
        return ConvolvedProjection(q, k, v, g, beta, gate, final_state, None, D)
    if key_dim != HEAD_DIM or value_dim != HEAD_DIM:
        raise NotImplementedError(
            f"the fused convolution takes K = V = {HEAD_DIM}, got K = {key_dim}, V = {value_dim}; "
            'backend="reference" takes any'
        )
    _check_supported(projected, weight)
    if projected.stride(2) != 1:
        projected = projected.contiguous()
    tensors = (projected, weight, bias, A_log, dt_bias, initial_state, cu_seqlens)
    q, k, v, g, beta, final_state, room = forward_op(
        *tensors, key_heads, value_heads, True, l2norm_eps, output_final_state
    )
    return ConvolvedProjection(q, k, v, g, beta, gate, final_state if output_final_state else None, room, D)


def _check_weights(weight: Tensor, bias: Tensor | None, D: int, near_name: str, near: Tensor) -> None:
    check_shape("weight", weight, D=D, W=None)
    if weight.shape[1] == 0:
        raise ValueError("weight must have shape [D, W] with W >= 1, got W=0")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            check_dtype(name, parameter)
            check_same_device(name, parameter, near_name, near)
    if bias is not None:
        check_shape("bias", bias, D=D)


def _check_documents(
    cu_seqlens: Tensor | None, state: Tensor | None, B: int, T: int, weight: Tensor, near_name: str, near: Tensor
) -> None:
    check_offsets(cu_seqlens, B, near_name, near)
    if cu_seqlens is not None and cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        check_offset_values(cu_seqlens.tolist(), T)
    if state is not None:
        documents = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        D, W = weight.shape
        check_shape("initial_state", state, N=documents, D=D, **{"W-1": W - 1})
        check_dtype("initial_state", state)
        check_same_device("initial_state", state, near_name, near)


def _check_supported(x: Tensor, weight: Tensor) -> None:
    if weight.shape[1] != WIDTH:
        raise NotImplementedError(
            f'the fused convolution takes W = {WIDTH}, got W = {weight.shape[1]}; backend="reference" takes any'
        )
    if x.dtype not in DTYPES:
        raise NotImplementedError(
            f'the fused convolution takes bfloat16 or float16, got {x.dtype}; backend="reference" takes it'
        )
