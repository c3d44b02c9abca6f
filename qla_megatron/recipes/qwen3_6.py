"""Pretraining recipes of the Qwen3.6 sizes: the shapes and layouts of Qwen3.5 27B and 35B-A3B."""

from dataclasses import replace

from qla_megatron.recipes.models import MODELS
from qla_megatron.recipes.qwen3_5 import qwen3_5_27b_pretrain_4k_16xh200, qwen3_5_35b_a3b_pretrain_4k_8xh200
from qla_megatron.recipes.recipe import Recipe


def qwen3_6_27b_pretrain_4k_16xh200() -> Recipe:
    """Qwen3.6-27B on two nodes, TP4."""
    return replace(qwen3_5_27b_pretrain_4k_16xh200(), model=MODELS["qwen3_6_27b"])


def qwen3_6_35b_a3b_pretrain_4k_8xh200() -> Recipe:
    """Qwen3.6-35B-A3B on one node: the experts over all eight GPUs."""
    return replace(qwen3_5_35b_a3b_pretrain_4k_8xh200(), model=MODELS["qwen3_6_35b_a3b"])
