"""Marks and skips shared by all tests."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    reason = missing_gpu()
    if reason:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


def missing_gpu() -> str:
    """What a test marked `gpu` lacks here, or an empty string."""
    if not torch.cuda.is_available():
        return "needs a CUDA device, none is visible"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"needs compute capability 9.0 (Hopper), the device has {capability[0]}.{capability[1]}"
    return ""
