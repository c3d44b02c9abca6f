"""Gated DeltaNet for Megatron-style pretraining: kernels, layer, recipes.

The public names are loaded at first use, so that `import qla_megatron` imports neither torch nor Megatron.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "chunk_gated_delta_rule": "qla_megatron.kernels.gated_delta_rule",
    "chunk_gated_delta_rule_fwd": "qla_megatron.kernels.gated_delta_rule",
    "chunk_gated_delta_rule_bwd": "qla_megatron.kernels.gated_delta_rule",
    "GatedDeltaNet": "qla_megatron.layers",
    "enable": "qla_megatron.switch",
    "disable": "qla_megatron.switch",
    "swap_gdn": "qla_megatron.switch",
}
__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
