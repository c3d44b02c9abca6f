"""Zigzag: which tokens a context parallel rank holds.

A sequence is cut into 2 c equal pieces for c ranks; rank r holds pieces r and 2 c - 1 - r, so that under a causal mask
every rank has about the same work (Megatron's get_batch_on_this_cp_rank). A packed sequence is cut so document by
document, in the order of the documents.
"""

import torch
from torch import Tensor


def zigzag_index(cu_seqlens: Tensor, cp: int, rank: int) -> Tensor:
    """Places in the whole sequence of the tokens that `rank` of `cp` holds, in the order in which it holds them.

    Args:
        cu_seqlens: [N + 1], padded offsets of the documents in the whole sequence; of one document, [0, S]. Documents
            may be empty. Every token belongs to a document: S = cu_seqlens[-1].

    Returns:
        int64 [S / cp] on the device of `cu_seqlens`.

    Raises:
        ValueError: a length that does not divide by 2 `cp`, if the offsets are on the CPU; a `rank` outside `cp`.
    """
    if not 0 <= rank < cp:
        raise ValueError(f"rank must be in 0 .. cp - 1 with cp={cp}, got {rank}")
    check_zigzag_lengths(cu_seqlens, cp)
    total = int(cu_seqlens[-1])
    return zigzag_order(cu_seqlens, cp, total).view(cp, total // cp)[rank]


def zigzag_order(cu_seqlens: Tensor, cp: int, total: int) -> Tensor:
    """Places in the whole sequence of the tokens of all ranks, rank after rank: int64 [total].

    `total` is cu_seqlens[-1], which the caller knows without reading the device. No read of the device happens here.
    """
    offsets = cu_seqlens.long()
    held = torch.arange(total, device=offsets.device)  # a place among the tokens of all ranks
    rank, place = held // (total // cp), held % (total // cp)
    document = torch.searchsorted(offsets[1:] // cp, place, right=True)
    start, piece = offsets[document], offsets.diff()[document] // (2 * cp)
    within = place - start // cp
    is_back = within >= piece
    return start + torch.where(is_back, (2 * cp - 1 - rank) * piece + within - piece, rank * piece + within)


def inverse_order(order: Tensor) -> Tensor:
    """The inverse of a permutation, int64 [S]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def check_zigzag_lengths(cu_seqlens: Tensor, cp: int) -> None:
    """Raise ValueError unless each document's length divides by 2 `cp`. Offsets on a device are not read."""
    if cu_seqlens.device.type != "cpu":
        return
    for number, length in enumerate(cu_seqlens.diff().tolist()):
        if length < 0 or length % (2 * cp):
            raise ValueError(
                f"cu_seqlens: the length of document {number} must be a multiple of 2 * cp = {2 * cp}, got {length}"
            )
