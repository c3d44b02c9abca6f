"""What the kernels need to know of a CUDA device; asked at first use, never at import."""

from functools import cache

import torch


@cache
def architecture(index: int) -> str:
    """The compile target of a CUDA device, `sm_90a` on Hopper; raises NotImplementedError on any other."""
    capability = torch.cuda.get_device_capability(index)
    if capability != (9, 0):
        name = torch.cuda.get_device_name(index)
        raise NotImplementedError(
            f"the fused kernels serve compute capability 9.0 (H100, H200), got {capability[0]}.{capability[1]} "
            f'({name}); backend="reference" runs on any device'
        )
    return "sm_90a"


@cache
def multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
