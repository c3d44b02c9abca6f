"""The convolution's kernels compiled for sm_90a without a GPU: the blocks that are counted on fit a multiprocessor."""

import re

import pytest
from test_compile import REGISTERS_OF_A_MULTIPROCESSOR, RESERVED, SHARED_OF_A_MULTIPROCESSOR, assemble, lower

from qla_megatron.kernels.rows import THREADS


def fits(factory, blocks: int, *choices) -> int:
    """Demand room for `blocks` blocks; the bytes that are spilled."""
    source, shared = lower(factory, *choices)
    report = assemble(source)
    registers, spills = (int(re.search(p, report)[1]) for p in (r"Used (\d+) registers", r"(\d+) bytes spill loads"))
    assert -(-registers // 8) * 8 * THREADS * blocks <= REGISTERS_OF_A_MULTIPROCESSOR, report
    assert (shared + RESERVED) * blocks <= SHARED_OF_A_MULTIPROCESSOR
    return spills


def test_forward():
    from qla_megatron.kernels.causal_conv1d.convolve import BLOCKS, convolve_kernel

    assert fits(convolve_kernel, BLOCKS, "bfloat16", "bfloat16", 16, False, True) <= 32


def test_backward():
    from qla_megatron.kernels.causal_conv1d.convolve_backward import BLOCKS, convolve_backward_kernel

    # Four numbers that are used once a tile may be spilled.
    assert fits(convolve_backward_kernel, BLOCKS, "bfloat16", "bfloat16", 16, False, True) <= 32


@pytest.mark.slow
@pytest.mark.parametrize("choices", [("float16", "float32", 4, True, True), ("bfloat16", "bfloat16", 8, True, False)])
def test_other_choices(choices):
    from qla_megatron.kernels.causal_conv1d import convolve, convolve_backward

    assert fits(convolve.convolve_kernel, convolve.BLOCKS, *choices) <= 200
    assert fits(convolve_backward.convolve_backward_kernel, convolve_backward.BLOCKS, *choices) <= 200
