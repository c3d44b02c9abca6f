"""Which implementation of an op serves which device, and what the fused kernels take."""

import torch

HEAD_DIM = 128  # K = V of the fused kernels
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}  # and TileLang's names of them
PAIR_TYPES = {"bfloat16": "__nv_bfloat162", "float16": "__half2"}  # the CUDA type of two packed elements

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
