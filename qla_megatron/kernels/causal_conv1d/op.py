"""Causal depthwise convolution: the public function."""

import torch
from torch import Tensor

from ..checks import (
    check_bool,
    check_choice,
    check_dtype,
    check_offset_values,
    check_offsets,
    check_same_device,
    check_shape,
)
from . import reference


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y_t = activation(bias + sum_j weight[:, j] x_{t-W+1+j}) per channel, within each document; differentiable.

    Before a document's first token lies its initial state, or 0. Computes in float32 (float64 if x is float64). Tokens
    after the last document's end get outputs and gradients of exactly 0. Plain torch on every device, without host
    reads: the values of cu_seqlens are checked where they are on the CPU and nothing is being compiled.

    Args:
        x: [B, T, D] in bfloat16, float16, float32 or float64.
        weight: [D, W]; the last column meets the token itself, as in `torch.nn.Conv1d` with padding W - 1.
        bias: [D] or None.
        activation: "silu" (or its other name "swish") or None.
        initial_state: [N, D, W-1], the W - 1 inputs before each document's first token, oldest first; N = B, or the
            number of documents.
        output_final_state: whether to return the last W - 1 inputs of each document, the initial state's among them
            where the document is shorter.
        cu_seqlens: [N+1] int32 or int64 offsets of documents packed into one row (B = 1); documents may be empty.

    Returns:
        y [B, T, D] in x's dtype, and the final states [N, D, W-1] in x's dtype, or None.
    """
    check_shape("x", x, B=None, T=None, D=None)
    B, T, D = x.shape
    check_dtype("x", x)
    check_shape("weight", weight, D=D, W=None)
    if weight.shape[1] == 0:
        raise ValueError("weight must have shape [D, W] with W >= 1, got W=0")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            check_dtype(name, parameter)
            check_same_device(name, parameter, "x", x)
    if bias is not None:
        check_shape("bias", bias, D=D)
    check_choice("activation", activation, ("silu", "swish", None))
    check_bool("output_final_state", output_final_state)
    check_offsets(cu_seqlens, B, "x", x)
    if cu_seqlens is not None and cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        check_offset_values(cu_seqlens.tolist(), T)
    if initial_state is not None:
        documents = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        check_shape("initial_state", initial_state, N=documents, D=D, **{"W-1": weight.shape[1] - 1})
        check_dtype("initial_state", initial_state)
        check_same_device("initial_state", initial_state, "x", x)
    y, final_state = reference.causal_conv1d(
        x, weight, bias, activation is not None, initial_state, output_final_state, cu_seqlens
    )
    return y, final_state
