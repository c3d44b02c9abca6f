"""Causal depthwise convolution over packed documents, and the way from in_proj's output to the gated delta rule."""

from .op import ConvolvedProjection, causal_conv1d, convolve_projection

__all__ = ["ConvolvedProjection", "causal_conv1d", "convolve_projection"]
