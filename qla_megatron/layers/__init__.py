"""The Gated DeltaNet layer for Megatron and what its models need around it.

The layer is loaded at first use, so that the pure functions here, such as the weight mapping, do without Megatron.
"""

from typing import Any

__all__ = ["GatedDeltaNet"]


def __getattr__(name: str) -> Any:
    if name != "GatedDeltaNet":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from qla_megatron.layers.gated_delta_net import GatedDeltaNet

    return GatedDeltaNet
