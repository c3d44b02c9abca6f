"""The fused forward pass: chunk preparation, then state and output."""

import torch
from torch import Tensor

from ..varlen import row_offsets
from .prepare_chunks import prepare_chunks
from .state_output import compute_state_output
from .tiles import DTYPES, HEAD_DIM


def fused_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    block_v: int | None = None,
    save: bool = False,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor, Tensor] | None]:
    """Gated delta rule (arXiv 2412.06464) on Hopper, without host reads: one document a row, or packed by cu_seqlens.

    Args:
        q, k: [B, T, H, 128] bfloat16 or float16, normalised or not; keys shorter than 255.
        v: [B, T, HV, 128] in the same dtype; H divides HV.
        g, beta: [B, T, HV], log decay and strength of the writes; computed in float32.
        scale: of the outputs.
        initial_state: [N, HV, 128, 128]; None is 0.
        cu_seqlens: [N+1] int32 or int64 offsets of packed documents (B = 1).
        block_v: 64 or 128 values of a head in one block of the serial pass; chosen from the shape if None.
        save: return what the backward pass wants; None where there is no token.

    Returns:
        o [B, T, HV, 128] in v's dtype, 0 past the last document; the final states [N, HV, 128, 128] float32 or None;
        None or (A, gates, checkpoints): see `prepare_chunks_kernel` and `checkpoint_count`.

    Raises:
        NotImplementedError: another head dimension, dtype or device.
    """
    batch, tokens, value_heads, V = v.shape
    if k.shape[-1] != HEAD_DIM or V != HEAD_DIM:
        raise NotImplementedError(
            f'the fused kernels take K = V = {HEAD_DIM}, got K = {k.shape[-1]}, V = {V}; backend="reference" takes any'
        )
    if v.dtype not in DTYPES:
        raise NotImplementedError(
            f'the fused kernels take q, k, v in bfloat16 or float16, got {v.dtype}; backend="reference" takes it'
        )
    if v.numel() == 0:
        documents = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = v.new_zeros(documents, value_heads, HEAD_DIM, HEAD_DIM, dtype=torch.float32)
        state = state if initial_state is None else initial_state.float().clone()
        return torch.empty_like(v), state if output_final_state else None, None
    if cu_seqlens is None:
        cu_seqlens = row_offsets(batch, tokens, v.device)
    else:
        cu_seqlens = cu_seqlens.to(torch.int32).contiguous()
    q, k, v, g, beta = (x.flatten(0, 1).contiguous() for x in (q, k, v, g, beta))
    g, beta = g.float(), beta.float()
    if initial_state is not None:
        initial_state = initial_state.float().contiguous()
    a, gates = prepare_chunks(k, g, beta, cu_seqlens)
    o, final_state, checkpoints = compute_state_output(
        q, k, v, a, gates, initial_state, cu_seqlens, scale, output_final_state, block_v, save
    )
    saved = None if checkpoints is None else (a, gates, checkpoints)
    return o.view(batch, tokens, value_heads, V), final_state, saved
