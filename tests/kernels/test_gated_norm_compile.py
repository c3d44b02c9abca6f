"""The norm's kernels compiled for sm_90a without a GPU: the blocks that are counted on fit a multiprocessor."""

from test_causal_conv1d_compile import fits


def test_forward():
    from qla_megatron.kernels.gated_norm.normalise import BLOCKS, normalise_kernel

    assert fits(normalise_kernel, BLOCKS["normalise"], "bfloat16", 16) == 0


def test_backward():
    from qla_megatron.kernels.gated_norm.normalise import BLOCKS, normalise_backward_kernel

    assert fits(normalise_backward_kernel, BLOCKS["normalise_backward"], "bfloat16", 16, 16) == 0
    assert fits(normalise_backward_kernel, BLOCKS["normalise_backward"], "float16", 8, 4) == 0
