"""Inputs of the gated delta rule: gate regimes, document layouts, whole argument sets."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus


def _spiked(noise: Tensor) -> Tensor:
    g = -1e-3 * noise.abs()
    g[:, noise.shape[1] // 2] = -1e4
    return g


# Regime -> log decay from standard normal noise [B, T, HV]. Weak decay keeps old tokens alive, strong decay cancels in
# sums of gates, and mixtures do both within one chunk.
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "weak": lambda noise: torch.full_like(noise, -1e-3),
    "logsigmoid": logsigmoid,
    "strong": lambda noise: -20 + noise,
    "mixed": lambda noise: torch.where(noise > 0, 0.0, -20.0).to(noise.dtype),
    "spike": _spiked,
    "qwen": lambda noise: -16 * torch.linspace(0.02, 1, noise.shape[-1], dtype=noise.dtype) * softplus(noise - 2),
}

# Name -> (offsets, tokens of the row). None: no offsets, every row of the batch is one document.
LAYOUTS: dict[str, tuple[tuple[int, ...] | None, int]] = {
    "one token": (None, 1),
    "one short of a chunk": (None, 63),
    "a chunk": (None, 64),
    "a chunk and a token": (None, 65),
    "rows": (None, 150),
    "two in a chunk": ((0, 20, 40), 40),
    "around a chunk": ((0, 63, 127, 192, 319, 447, 576), 576),
    "empty documents": ((0, 0, 5, 5, 70, 70), 70),
    "all empty": ((0, 0, 0), 3),
    "tail of one": ((0, 73, 115), 116),
    "tail beyond a chunk": ((0, 10, 75), 150),
}


@dataclass(frozen=True)
class RuleInputs:
    """Arguments of `chunk_gated_delta_rule`, by their names there."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor
    cu_seqlens: Tensor | None

    def leaves(self) -> list[Tensor]:
        """Copies of q, k, v, g, beta, initial_state that ask for gradients."""
        names = ("q", "k", "v", "g", "beta", "initial_state")
        return [getattr(self, name).detach().clone().requires_grad_() for name in names]


def make_rule_inputs(
    layout: str | tuple[tuple[int, ...] | None, int] = "rows",
    gate: str = "logsigmoid",
    *,
    batch: int = 1,
    key_heads: int = 1,
    value_heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 8,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    offset_dtype: torch.dtype = torch.int64,
    seed: int = 0,
) -> RuleInputs:
    """Random inputs with keys and queries of length one; the same on every device, and up to rounding in every dtype.

    Args:
        layout: a name in LAYOUTS, or (offsets or None, tokens). `batch` rows where there are no offsets, else one.
        gate: a name in GATES.
        dtype: of q, k, v; g, beta and the state are float32, or float64 if it is float64.

    Returns:
        q, k [B, T, H, K]; v [B, T, HV, V]; g, beta [B, T, HV]; initial_state [N, HV, K, V]; cu_seqlens [N+1] or None.
    """
    offsets, tokens = LAYOUTS[layout] if isinstance(layout, str) else layout
    documents = batch if offsets is None else len(offsets) - 1
    rows = batch if offsets is None else 1
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    wide = torch.promote_types(dtype, torch.float32)
    q, k = (normalize(normal(rows, tokens, key_heads, key_dim), dim=-1) for _ in range(2))
    return RuleInputs(
        q=q.to(device, dtype),
        k=k.to(device, dtype),
        v=normal(rows, tokens, value_heads, value_dim).to(device, dtype),
        g=GATES[gate](normal(rows, tokens, value_heads)).to(device, wide),
        beta=normal(rows, tokens, value_heads).sigmoid().to(device, wide),
        initial_state=normal(documents, value_heads, key_dim, value_dim).to(device, wide),
        cu_seqlens=None if offsets is None else torch.tensor(offsets, dtype=offset_dtype, device=device),
    )
