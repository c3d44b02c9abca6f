"""The order of the fused rows of a Gated DeltaNet layer and how they are split over ranks.

`in_proj` makes [query | key | value | z | beta | alpha], the convolution sees the channels [query | key | value];
within a part, rows go head by head. A rank holds its share of the heads of every part, so that its rows are the
parts' shares one after another, never a contiguous block of the whole (Megatron-core 0.19,
ssm/gated_delta_net/gdn.py; the checkpoint keeps the parts apart under these names).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PROJECTION_PARTS = ("query", "key", "value", "z", "beta", "alpha")
CONVOLUTION_PARTS = ("query", "key", "value")


@dataclass(frozen=True)
class HeadSizes:
    """Heads of a layer, or of one rank's share, and their widths."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def share(self, ranks: int, what: str) -> "HeadSizes":
        """The heads of one of `ranks` ranks. `what` names the parallel size in the error.

        Raises:
            ValueError: the heads do not divide by `ranks`.
        """
        for name, heads in (("linear_num_key_heads", self.key_heads), ("linear_num_value_heads", self.value_heads)):
            if heads % ranks:
                raise ValueError(f"{name} must be a multiple of {what} = {ranks}, got {heads}")
        return HeadSizes(self.key_heads // ranks, self.value_heads // ranks, self.key_dim, self.value_dim)

    @property
    def query_key_width(self) -> int:
        """Channels of all query heads; the key heads have as many."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Channels of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def projection(self) -> tuple[int, int, int, int, int, int]:
        """Rows of in_proj, part by part, in the order of PROJECTION_PARTS."""
        return (*self.convolution, self.value_width, self.value_heads, self.value_heads)

    @property
    def convolution(self) -> tuple[int, int, int]:
        """Channels of the convolution, part by part, in the order of CONVOLUTION_PARTS."""
        return (self.query_key_width, self.query_key_width, self.value_width)


def split_over_ranks(rows: torch.Tensor, parts: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """The rows [sum(parts), ...] of a whole fused tensor as each rank holds them, `ranks` tensors.

    Raises:
        ValueError: `parts` do not add up to the rows, or a part does not divide by `ranks`.
    """
    _check_parts(rows, parts)
    if bad := [part for part in parts if part % ranks]:
        raise ValueError(f"parts must be multiples of ranks = {ranks}, got {tuple(bad)}")
    pieces = [part.chunk(ranks) for part in rows.split(list(parts))]
    return [torch.cat([piece[rank] for piece in pieces]) for rank in range(ranks)]


def join_from_ranks(shards: Sequence[torch.Tensor], parts: Sequence[int]) -> torch.Tensor:
    """The inverse of `split_over_ranks`; `parts` are those of the whole tensor."""
    local = [part // len(shards) for part in parts]
    for shard in shards:
        _check_parts(shard, local)
    pieces = [shard.split(local) for shard in shards]
    return torch.cat([torch.cat([piece[part] for piece in pieces]) for part in range(len(local))])


def _check_parts(rows: torch.Tensor, parts: Sequence[int]) -> None:
    if sum(parts) != rows.shape[0]:
        raise ValueError(f"parts must add up to the rows, {rows.shape[0]}, got {tuple(parts)} with sum {sum(parts)}")
