"""RMSNorm with a gate in plain torch."""

import torch
from torch import Tensor
from torch.nn.functional import silu


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """See op.py."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, scale = x.to(wide), weight.to(wide)
    if zero_centered:
        scale = scale + 1
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (normed * scale * silu(gate.to(wide))).to(x.dtype)
