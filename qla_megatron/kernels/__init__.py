"""The ops: gated delta rule, causal convolution, gated norm. Importing them touches no GPU."""

from .causal_conv1d import causal_conv1d
from .gated_delta_rule import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    recurrent_gated_delta_rule,
)
from .gated_norm import gated_rms_norm

__all__ = [
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "gated_rms_norm",
    "recurrent_gated_delta_rule",
]
