"""RMSNorm for layer specs without Transformer Engine."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension; arXiv:1910.07467.

    Zero-centred (the configuration's `layernorm_zero_centered_gamma`), the factor is 1 + weight, and weights start at
    zero. All is computed in float32 (float64 for float64), the sum 1 + weight too: in bfloat16 a small weight would
    vanish in it. Megatron's own norm without Transformer Engine (WrappedTorchNorm) knows neither zero-centred weights
    nor sequence parallelism.

    Args:
        config: `layernorm_zero_centered_gamma`, `sequence_parallel`, `params_dtype`, `use_cpu_initialization` and
            `perform_initialization` are used; `normalization` must be "RMSNorm".
        hidden_size: width of the last dimension.
        eps: added to the mean under the root.
        dtype: of the weight; None: the configuration's `params_dtype`.

    The weight is the same on all tensor parallel ranks. Under sequence parallelism each sees a part of the tokens: the
    weight is marked `sequence_parallel`, by which Megatron's finalize_model_grads sums the gradients of all ranks.

    Raises:
        NotImplementedError: another normalization than RMSNorm.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, value in kwargs.items():  # what some callers of Megatron pass besides, at its default
            if value not in (None, False, "RMSNorm"):
                raise NotImplementedError(f"RMSNorm does not know {name}, got {value!r}")
        if config.normalization != "RMSNorm":
            raise NotImplementedError(f"normalization must be 'RMSNorm', got {config.normalization!r}")
        self.hidden_size, self.eps, self.zero_centered = hidden_size, eps, config.layernorm_zero_centered_gamma
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=dtype or config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Let the factor be 1."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., hidden_size]; the result has its shape and dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        factor = self.weight.to(wide) + 1 if self.zero_centered else self.weight.to(wide)
        return F.rms_norm(x.to(wide), (self.hidden_size,), factor, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        """Width, eps and form, for print(model)."""
        return f"{self.hidden_size}, eps={self.eps}, zero_centered={self.zero_centered}"
