"""Context parallelism by head exchange: from part of the tokens with all heads to all tokens with part of the heads.

With c ranks in the group, each holds the zigzag part of the tokens (data/zigzag.py) for every head. One all-to-all
gives every rank all tokens, in their natural order, for its c-th part of the heads; what mixes tokens runs on that as
on one device, and one all-to-all brings the result back (DeepSpeed Ulysses, arXiv:2309.14509).

Offsets are those of the whole, un-sharded sequence, padded, and end at its number of tokens. On a device they are
never read by the host; their lengths are checked where they are on the CPU.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qla_megatron.data.zigzag import check_zigzag_lengths, inverse_order, zigzag_order


def to_head_shards(
    x: Tensor, sections: Sequence[int], group: dist.ProcessGroup, cu_seqlens: Tensor | None = None
) -> Tensor:
    """All tokens of this rank's heads, from this rank's tokens of all heads. A collective of `group`, differentiable.

    Args:
        x: [S / c, B, P], the tokens that this rank holds in zigzag order.
        sections: widths of what lies side by side in P (query, key, ...), each ordered by heads, so that its r-th
            c-th belongs to rank r. They sum to P, and c divides each.
        cu_seqlens: [N + 1] int32 or int64, if x is packed; None: each sequence of the batch is one document.

    Returns:
        [S, B, P / c], tokens in natural order; each section's own c-th, side by side in the same order.

    Raises:
        ValueError: shapes, sections or lengths that do not fit. Lengths must divide by 2 c.
    """
    c = group.size()
    _check(x, "x", c, cu_seqlens, x.shape[0] * c)
    if sum(sections) != x.shape[-1] or any(width % c for width in sections):
        raise ValueError(
            f"sections must be multiples of the group's size {c} and sum to x.shape[-1] = {x.shape[-1]}, "
            f"got {tuple(sections)}"
        )
    if c == 1:
        return x
    tokens, batch, _ = x.shape
    parts = [part.reshape(tokens, batch, c, -1) for part in x.split(list(sections), dim=-1)]
    to_send = torch.cat(parts, dim=-1).permute(2, 0, 1, 3).contiguous()  # [c, S / c, B, P / c]
    received = _AllToAll.apply(to_send, group).flatten(0, 1)
    return received.index_select(0, inverse_order(_order(x.device, tokens * c, c, cu_seqlens)))


def to_sequence_shards(y: Tensor, group: dist.ProcessGroup, cu_seqlens: Tensor | None = None) -> Tensor:
    """This rank's tokens of all heads, from all tokens of this rank's heads: the way back of `to_head_shards`.

    A collective of `group`, differentiable.

    Args:
        y: [S, B, V / c], tokens in natural order.
        cu_seqlens: as for `to_head_shards`.

    Returns:
        [S / c, B, V], tokens in zigzag order, heads in the order of the ranks.

    Raises:
        ValueError: shapes or lengths that do not fit.
    """
    c = group.size()
    _check(y, "y", c, cu_seqlens, y.shape[0])
    if c == 1:
        return y
    ordered = y.index_select(0, _order(y.device, y.shape[0], c, cu_seqlens))
    received = _AllToAll.apply(ordered.unflatten(0, (c, -1)).contiguous(), group)  # [c, S / c, B, V / c]
    return received.permute(1, 2, 0, 3).flatten(2)


def slice_sections(parameter: Tensor, sections: Sequence[int], group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """The part of a parameter that belongs to this rank's heads: of each section, the rank's c-th along `dim`.

    The parameter is the same on all ranks of the group, and each one's gradient is zero outside its part: the sum over
    the group, which Megatron's reduction over data and context parallel ranks makes, is the whole gradient.

    Raises:
        ValueError: sections that do not sum to the size of `dim`, or do not divide by the size of the group.
    """
    c, rank = group.size(), group.rank()
    if sum(sections) != parameter.shape[dim] or any(width % c for width in sections):
        raise ValueError(
            f"sections must be multiples of the group's size {c} and sum to parameter.shape[{dim}] = "
            f"{parameter.shape[dim]}, got {tuple(sections)}"
        )
    if c == 1:
        return parameter
    parts = parameter.split(list(sections), dim=dim)
    return torch.cat([part.chunk(c, dim=dim)[rank] for part in parts], dim=dim)


class _AllToAll(torch.autograd.Function):
    """[c, ...] -> [c, ...]: what lies at index r goes to rank r. Its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grads[0].contiguous(), ctx.group), None


def _order(device: torch.device, total: int, c: int, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, 2 * total, total, device=device)
    return zigzag_order(cu_seqlens.to(device, non_blocking=True), c, total)


def _check(x: Tensor, name: str, c: int, cu_seqlens: Tensor | None, total: int) -> None:
    if x.dim() != 3:
        raise ValueError(f"{name} must have 3 dimensions, sequence, batch and width, got shape {tuple(x.shape)}")
    if cu_seqlens is None:
        if c > 1 and total % (2 * c):
            raise ValueError(f"the sequence length must be a multiple of 2 * {c} ranks = {2 * c}, got {total}")
        return
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens must have shape [N + 1], got {tuple(cu_seqlens.shape)}")
    if x.shape[1] != 1:
        raise ValueError(f"{name} must have batch size 1 when packed, got {x.shape[1]}")
    if cu_seqlens.device.type == "cpu" and (cu_seqlens[0] != 0 or cu_seqlens[-1] != total):
        raise ValueError(
            f"cu_seqlens must go from 0 to the number of tokens over all ranks, {total}, "
            f"got {int(cu_seqlens[0])} to {int(cu_seqlens[-1])}"
        )
    if c > 1:
        check_zigzag_lengths(cu_seqlens, c)
