"""Which implementation of an op serves which device."""

import torch

BACKENDS = ("auto", "tilelang", "reference")


def choose_backend(backend: str, device: torch.device) -> str:
    """The backend that serves tensors of this device; raises where none does, and falls back to nothing."""
    if backend == "reference" or (backend == "auto" and device.type == "cpu"):
        return "reference"
    if device.type != "cuda":
        raise NotImplementedError(
            f'backend="{backend}" serves CUDA tensors, got {device.type} tensors; backend="reference" serves them'
        )
    return "tilelang"
