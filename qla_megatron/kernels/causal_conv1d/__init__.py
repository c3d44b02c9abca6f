"""Causal depthwise convolution over packed documents."""

from .op import causal_conv1d

__all__ = ["causal_conv1d"]
