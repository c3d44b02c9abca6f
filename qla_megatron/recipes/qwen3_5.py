"""Pretraining recipes of the Qwen3.5 sizes on packed sequences of 4096 tokens.

Layouts: the smallest number of GPUs on which weights, gradients and optimizer state (18 bytes a parameter in bf16, 12
of them shared out over the data-parallel processes) leave room for activations. Dense models stay at TP1 as long as
they fit, then TP4 with sequence parallel; mixtures of experts spread the experts first, then layers, as public H100
recipes do. The layouts are starting points: they have not been tuned for speed.
"""

from dataclasses import replace

from qla_megatron.recipes.models import MODELS
from qla_megatron.recipes.recipe import Data, Model, Optimizer, Parallel, Precision, Recipe, Train


def pretrain_4k(model: Model, parallel: Parallel, *, global_batch: int, lr: float) -> Recipe:
    """What every pretraining run at 4096 tokens shares."""
    return Recipe(
        model=model,
        parallel=parallel,
        precision=Precision(),
        data=Data(sequence_length=4096),
        train=Train(steps=100_000, global_batch=global_batch),
        optimizer=Optimizer(lr=lr, min_lr=round(lr / 10, 9), warmup_steps=2000),
    )


def qwen3_5_0_8b_pretrain_4k_1xh200() -> Recipe:
    """Qwen3.5-0.8B on one GPU."""
    parallel = Parallel(gpus=1, device="h200")
    return pretrain_4k(MODELS["qwen3_5_0_8b"], parallel, global_batch=128, lr=6e-4)


def qwen3_5_0_8b_pretrain_4k_8xh100() -> Recipe:
    """Qwen3.5-0.8B on one node, data parallel."""
    parallel = Parallel(gpus=8, device="h100")
    return pretrain_4k(MODELS["qwen3_5_0_8b"], parallel, global_batch=256, lr=6e-4)


def qwen3_5_2b_pretrain_4k_8xh200() -> Recipe:
    """Qwen3.5-2B on one node, data parallel."""
    parallel = Parallel(gpus=8, device="h200")
    return pretrain_4k(MODELS["qwen3_5_2b"], parallel, global_batch=256, lr=4e-4)


def qwen3_5_4b_pretrain_4k_8xh200() -> Recipe:
    """Qwen3.5-4B on one node, data parallel."""
    return pretrain_4k(MODELS["qwen3_5_4b"], Parallel(gpus=8, device="h200"), global_batch=256, lr=3e-4)


def qwen3_5_9b_pretrain_4k_8xh200() -> Recipe:
    """Qwen3.5-9B on one node, data parallel."""
    return pretrain_4k(MODELS["qwen3_5_9b"], Parallel(gpus=8, device="h200"), global_batch=256, lr=3e-4)


def qwen3_5_9b_pretrain_4k_8xh100() -> Recipe:
    """Qwen3.5-9B on one node of 80 GB GPUs: TP2 halves weights and activations."""
    parallel = Parallel(gpus=8, device="h100", tensor=2, sequence=True)
    return pretrain_4k(MODELS["qwen3_5_9b"], parallel, global_batch=256, lr=3e-4)


def qwen3_5_27b_pretrain_4k_16xh200() -> Recipe:
    """Qwen3.5-27B on two nodes, TP4."""
    parallel = Parallel(gpus=16, device="h200", tensor=4, sequence=True)
    return pretrain_4k(MODELS["qwen3_5_27b"], parallel, global_batch=512, lr=2e-4)


def qwen3_5_35b_a3b_pretrain_4k_8xh200() -> Recipe:
    """Qwen3.5-35B-A3B on one node: the experts over all eight GPUs."""
    recipe = pretrain_4k(
        MODELS["qwen3_5_35b_a3b"], Parallel(gpus=8, device="h200", expert=8), global_batch=512, lr=3e-4
    )
    return replace(recipe, train=replace(recipe.train, recompute="full"))


def qwen3_5_35b_a3b_pretrain_4k_16xh100() -> Recipe:
    """Qwen3.5-35B-A3B on two nodes of 80 GB GPUs: two stages, the experts over eight GPUs each."""
    parallel = Parallel(gpus=16, device="h100", pipeline=2, expert=8)
    return pretrain_4k(MODELS["qwen3_5_35b_a3b"], parallel, global_batch=512, lr=3e-4)


def qwen3_5_122b_a10b_pretrain_4k_64xh200() -> Recipe:
    """Qwen3.5-122B-A10B on eight nodes: TP2, four stages, the experts over 16 GPUs each."""
    parallel = Parallel(gpus=64, device="h200", tensor=2, sequence=True, pipeline=4, expert=16)
    return pretrain_4k(MODELS["qwen3_5_122b_a10b"], parallel, global_batch=1024, lr=2e-4)


def qwen3_5_122b_a10b_pretrain_4k_128xh100() -> Recipe:
    """Qwen3.5-122B-A10B on sixteen nodes of 80 GB GPUs: TP2, eight stages of six layers, two chunks each."""
    parallel = Parallel(
        gpus=128, device="h100", tensor=2, sequence=True, pipeline=8, layers_per_virtual_stage=3, expert=16
    )
    return pretrain_4k(MODELS["qwen3_5_122b_a10b"], parallel, global_batch=1024, lr=2e-4)


def qwen3_5_397b_a17b_pretrain_4k_256xh200() -> Recipe:
    """Qwen3.5-397B-A17B on 32 nodes: TP2, eight stages (six layers in the first and the last), experts over 32 GPUs."""
    parallel = Parallel(
        gpus=256, device="h200", tensor=2, sequence=True, pipeline=8, first_stage_layers=6, last_stage_layers=6,
        expert=32,
    )  # fmt: skip
    return pretrain_4k(MODELS["qwen3_5_397b_a17b"], parallel, global_batch=1024, lr=1.5e-4)
