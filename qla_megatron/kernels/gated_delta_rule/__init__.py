"""The gated delta rule: chunk-wise, packed, with grouped value heads. The math is in README.md here."""

from .op import (
    Gradients,
    Saved,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
)
from .reference import recurrent_gated_delta_rule

__all__ = [
    "Gradients",
    "Saved",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "recurrent_gated_delta_rule",
]
