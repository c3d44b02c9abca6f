"""What the forward and the backward launch have in common."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compiled import compiled
from ..device import architecture
from ..rows import DTYPES, HEAD_DIM, WEIGHT_TYPES, alignment, tile_length
from .tiles import WIDTH


@dataclass(frozen=True)
class Problem:
    """The inputs of the fused convolution.

    Attributes:
        projected: [T, B, P], the last stride 1: [q | k | v | z | logits of beta | alpha] with gates, else [q | k | v].
        weight, bias: [D, 4], and [D] or None.
        A_log, dt_bias: [HV], or None without gates.
        initial_state: [N, D, 3] or None; N = B where cu_seqlens is None.
        cu_seqlens: [N + 1] or None.
        l2norm_eps: None where q and k keep their length.
    """

    projected: Tensor
    weight: Tensor
    bias: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    key_heads: int
    value_heads: int
    is_silu: bool
    l2norm_eps: float | None

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * HEAD_DIM

    @property
    def gate_heads(self) -> int:
        return 0 if self.A_log is None else self.value_heads

    @property
    def packed_documents(self) -> int:
        return 0 if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def documents(self) -> int:
        return self.packed_documents or self.projected.shape[1]

    @property
    def weight_dtype(self) -> torch.dtype:
        """In which the kernels read the weight and the bias."""
        return self.weight.dtype if self.weight.dtype == self.projected.dtype else torch.float32

    def tile(self, blocks: int, waves: int) -> tuple[int, int, int]:
        """Tokens of a tile, tiles of all rows of the batch, and warps: each takes two heads of a tile."""
        tokens, rows, _ = self.projected.shape
        pairs = (2 * self.key_heads + self.value_heads + 1) // 2
        length = tile_length(tokens, pairs * rows, blocks, self.projected.get_device(), waves)
        tiles = -(-tokens // length) * rows
        return length, tiles, tiles * pairs

    def gate_tokens(self, warps: int) -> int:
        """Tokens of the batch whose gates one of `warps` warps makes."""
        return -(-self.projected.shape[0] * self.projected.shape[1] // warps) if self.gate_heads else 0

    def kernel(self, factory: Callable[..., Any], *others: Tensor) -> Any:
        """The compiled kernel; `others` are the tensors besides `projected` whose rows may be badly aligned."""
        x = self.projected
        dtypes = (DTYPES[x.dtype], WEIGHT_TYPES[self.weight_dtype])
        choices = (*dtypes, alignment(x, *others), self.bias is not None, self.is_silu)
        return compiled(architecture(x.get_device()), factory, *choices)

    def inputs(self) -> tuple[Tensor, ...]:
        """The kernels' first arguments; a tensor that is never read stands in for what is absent."""
        x, weight = self.projected, self.weight.to(self.weight_dtype).contiguous()
        if weight.data_ptr() % 16:  # it is read 16 bytes at a time
            weight = weight.clone()
        absent = x.new_empty(1, dtype=torch.float32)
        return (
            x,
            weight,
            weight.view(-1)[:1] if self.bias is None else self.bias.to(weight.dtype).contiguous(),
            absent if self.A_log is None else self.A_log.float().contiguous(),
            absent if self.dt_bias is None else self.dt_bias.float().contiguous(),
            self._state(x),
            absent.view(torch.int32) if self.cu_seqlens is None else self.cu_seqlens.to(torch.int32).contiguous(),
        )

    def _state(self, x: Tensor) -> Tensor:
        if self.initial_state is None:
            return x.new_empty(1, self.channels, WIDTH - 1)
        return self.initial_state.to(x.dtype).contiguous()


def last_inputs(p: Problem) -> Tensor:
    """[N, D, 3]: the last three inputs of each document, the initial state's among them where it is shorter."""
    tokens, rows, _ = p.projected.shape
    x = p.projected[..., : p.channels]
    old = x.new_zeros(p.documents, p.channels, WIDTH - 1) if p.initial_state is None else p.initial_state.to(x.dtype)
    if tokens == 0:
        return old.clone()
    back = torch.arange(1 - WIDTH, 0, device=x.device)
    if p.cu_seqlens is None:
        places = (tokens + back).expand(rows, -1)  # of a token in its document; negative: in the state
        recent = x.index_select(0, places[0].clamp_min(0)).permute(1, 2, 0)
    else:
        places = p.cu_seqlens.diff()[:, None] + back
        index = (p.cu_seqlens[1:, None] + back).clamp(0, tokens - 1)
        recent = x[:, 0].index_select(0, index.flatten()).view(-1, WIDTH - 1, p.channels).mT
    kept = old.gather(2, (places + WIDTH - 1).clamp_max(WIDTH - 2)[:, None].expand(-1, p.channels, -1))
    return torch.where(places[:, None] >= 0, recent, kept)
