"""Documents to tokens and to chunks.

`token_places` and `valid_tokens` work on the device, without host reads. `lay_out_chunks` makes the reference's table
of chunks on the host. A document is cut into chunks from its own first token on: no chunk holds two documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_offset_values

CHUNK = 64


def valid_tokens(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[T] bool: whether a token lies before the end of the last document."""
    return torch.arange(tokens, device=cu_seqlens.device) < cu_seqlens[-1]


def token_places(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Document of every token and its position there, both [T] int64; beyond the last document it is N."""
    index = torch.arange(tokens, device=cu_seqlens.device)
    # The first document that ends after the token: empty documents are passed over.
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), index.to(cu_seqlens.dtype), right=True)
    return document, index - cu_seqlens[document]


def row_offsets(batch: int, tokens: int, device: torch.device) -> Tensor:
    """[B+1] int32 offsets of the rows of a dense batch, as documents of the flattened tokens."""
    return torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=device)


def document_offsets(
    batch: int, tokens: int, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None
) -> tuple[int, ...]:
    """Offsets of the documents in the flattened [B T] tokens, on the host; without a host copy reads the device."""
    if cu_seqlens is None:
        return tuple(n * tokens for n in range(batch + 1))
    offsets = tuple((cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist())
    check_offset_values(offsets, tokens)
    if cu_seqlens_cpu is not None and cu_seqlens.device.type == "cpu" and tuple(cu_seqlens.tolist()) != offsets:
        raise ValueError(f"cu_seqlens_cpu must equal cu_seqlens, {tuple(cu_seqlens.tolist())}, got {offsets}")
    return offsets


def slot_count(batch: int, tokens: int, cu_seqlens: Tensor | None) -> int:
    """Chunks that there can be at most, whatever the offsets hold."""
    if cu_seqlens is None:
        return batch * ((tokens + CHUNK - 1) // CHUNK)
    return tokens // CHUNK + cu_seqlens.shape[0] - 1


@dataclass(frozen=True)
class ChunkLayout:
    """Chunks ordered by their place in the document, then by documents, those with most chunks first.

    The documents that have a chunk s are then the first `active[s]` ones, and their chunks lie side by side: the states
    of all documents advance together.

    Attributes:
        order: [N] documents, those with most chunks first.
        active: for every place s of a chunk in its document, how many documents get that far.
        tokens: [chunks, CHUNK] token indices; beyond a document's end its last token's.
        is_token: [chunks, CHUNK] whether a token is there.
        is_full: whether one is everywhere.
    """

    order: Tensor
    active: tuple[int, ...]
    tokens: Tensor
    is_token: Tensor
    is_full: bool


def lay_out_chunks(offsets: Sequence[int], device: torch.device) -> ChunkLayout:
    starts = torch.tensor(offsets)
    lengths = starts.diff()
    chunks = (lengths + CHUNK - 1) // CHUNK
    order = torch.argsort(chunks, descending=True, stable=True)
    lengths, chunks, starts = lengths[order], chunks[order], starts[:-1][order]
    rank = torch.repeat_interleave(torch.arange(len(order)), chunks)
    place = torch.arange(len(rank)) - torch.repeat_interleave(chunks.cumsum(0) - chunks, chunks)
    by_place = torch.argsort(place, stable=True)
    rank, place = rank[by_place], place[by_place]
    position = place[:, None] * CHUNK + torch.arange(CHUNK)
    last = lengths[rank, None] - 1
    return ChunkLayout(
        order=order.to(device),
        active=tuple(torch.bincount(place).tolist()),
        tokens=(starts[rank, None] + torch.minimum(position, last)).to(device),
        is_token=(position <= last).to(device),
        is_full=bool((lengths % CHUNK == 0).all()),
    )
