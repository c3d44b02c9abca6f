"""Causal depthwise convolution in plain torch, W shifted multiply-adds, and what the layer makes of its result."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu, softplus

from ..varlen import token_places, valid_tokens


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    is_silu: bool,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """See op.py."""
    y, final_state = _within_documents(x, weight, bias, is_silu, initial_state, output_final_state, cu_seqlens)
    return y.to(x.dtype), final_state


def convolve_projection(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    key_heads: int,
    value_heads: int,
    z_width: int,
    l2norm_eps: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v, g, beta and the final states; see op.py."""
    channels = weight.shape[0]
    widths = (channels, z_width, value_heads, value_heads)
    qkv, _, logits, alpha = projected.transpose(0, 1).split(widths, dim=-1)
    y, final_state = _within_documents(qkv, weight, bias, True, initial_state, output_final_state, cu_seqlens)
    key_width = (channels - z_width) // 2
    q, k, v = y.split((key_width, key_width, z_width), dim=-1)
    q, k = (part.unflatten(-1, (key_heads, -1)) for part in (q, k))
    if l2norm_eps is not None:
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + l2norm_eps) for part in (q, k))
    q, k, v = (part.to(projected.dtype) for part in (q, k, v.unflatten(-1, (value_heads, -1))))
    logits, alpha = logits.to(y.dtype), alpha.to(y.dtype)
    if cu_seqlens is not None:
        valid = valid_tokens(cu_seqlens, projected.shape[0])[None, :, None]
        logits, alpha = logits.where(valid, 0), alpha.where(valid, 0)
    beta, g = logits.sigmoid(), -A_log.to(y.dtype).exp() * softplus(alpha + dt_bias.to(y.dtype))
    if cu_seqlens is not None:
        beta, g = beta.where(valid, 0), g.where(valid, 0)
    return q, k, v, g, beta, final_state


def _within_documents(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    is_silu: bool,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """As `causal_conv1d`, not rounded.

    Each document is preceded by W - 1 rows of its state, so that a plain convolution stays within it.
    """
    B, T, D = x.shape
    W = weight.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    history = x.new_zeros(N, W - 1, D) if initial_state is None else initial_state.mT.to(x.dtype)
    if cu_seqlens is None:
        rows = torch.cat([history, x], dim=1)
        y = _convolve(rows, weight, bias, is_silu, wide)
        return y, rows[:, T:].mT.contiguous() if output_final_state else None

    document, _ = token_places(cu_seqlens, T)
    before = torch.arange(W - 1, device=x.device)
    index = torch.arange(T, device=x.device)
    # Document n's state begins at row cu_seqlens[n] + n (W - 1); tokens after the last document become 0, at the end.
    is_token = (document < N)[:, None]
    token_row = index + (W - 1) * (document + 1).clamp_max(N)
    state_row = (cu_seqlens[:-1, None] + (W - 1) * torch.arange(N, device=x.device)[:, None] + before).flatten()
    rows = x.new_zeros(T + N * (W - 1), D)
    rows = rows.index_copy(0, state_row.long(), history.flatten(0, 1)).index_copy(0, token_row, x[0].where(is_token, 0))
    y = _convolve(rows[None], weight, bias, is_silu, wide)[0].index_select(0, token_row - (W - 1))
    y = y.where(is_token, 0)[None]
    if not output_final_state:
        return y, None
    last = cu_seqlens[1:, None] + (W - 1) * torch.arange(N, device=x.device)[:, None] + before
    return y, rows[last.long()].mT.contiguous()


class _Convolution(torch.autograd.Function):
    """W shifted multiply-adds into one buffer, forward and backward; autograd would write one for each."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        length = rows.shape[1] - weight.shape[1] + 1
        y = rows[:, :length] * weight[:, 0]
        for shift, tap in enumerate(weight.unbind(1)[1:], 1):
            y.addcmul_(rows[:, shift : shift + length], tap)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        drows, dtaps = torch.zeros_like(rows), []
        for shift, tap in enumerate(weight.unbind(1)):
            window = slice(shift, shift + dy.shape[1])
            drows[:, window].addcmul_(dy, tap)
            dtaps.append((rows[:, window] * dy).sum((0, 1)))
        return drows, torch.stack(dtaps, dim=1)


def _convolve(rows: Tensor, weight: Tensor, bias: Tensor | None, is_silu: bool, wide: torch.dtype) -> Tensor:
    """[B, L, D] -> [B, L - W + 1, D]."""
    y = _Convolution.apply(rows.to(wide), weight.to(wide))
    if bias is not None:
        y = y + bias.to(wide)
    return silu(y) if is_silu else y
