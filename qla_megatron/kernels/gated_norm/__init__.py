"""RMSNorm with a gate."""

from .op import gated_rms_norm

__all__ = ["gated_rms_norm"]
