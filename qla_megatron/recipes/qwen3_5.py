"""Recipes of the Qwen3.5 sizes, one line each: <model>_<purpose>_<sequence>_<n>x<gpu>.

Purposes: `pretrain` starts from random weights; `extend` goes on at a longer sequence, from a checkpoint that
`checkpoint.load` names (tools/convert_checkpoint.py makes one of released weights), at a tenth of the learning rate.

Layouts: those that the planner finds fast among those that fit with a twentieth of the memory to spare and whose
groups of tensor, context and expert parallel processes stay within a machine; where two are alike, the one with fewer
kinds of parallelism. docs/recipes.md has their figures. They are starting points: they have not been run at these
sizes.
"""

import re
from typing import Any

from qla_megatron.recipes.models import MODELS
from qla_megatron.recipes.recipe import Checkpoint, Data, Optimizer, Parallel, Precision, Recipe, Train

LEARNING_RATES = {
    "0_8b": 6e-4, "2b": 4e-4, "4b": 3e-4, "9b": 3e-4, "27b": 2e-4, "35b_a3b": 3e-4, "122b_a10b": 2e-4,
    "397b_a17b": 1.5e-4,
}  # fmt: skip

# Sequences of a step, recompute, and what of Parallel is not its default.
RUNS: dict[str, dict[str, Any]] = {
    "qwen3_5_0_8b_pretrain_4k_1xh200": {"batch": 128},
    "qwen3_5_0_8b_pretrain_4k_8xh100": {"batch": 256},
    "qwen3_5_0_8b_pretrain_8k_8xh100": {"batch": 128},
    "qwen3_5_0_8b_pretrain_32k_1xh200": {"batch": 8},
    "qwen3_5_0_8b_pretrain_256k_1xh200": {"batch": 2, "recompute": "full"},
    "qwen3_5_0_8b_extend_32k_8xh100": {"batch": 32, "recompute": "mlp"},
    "qwen3_5_0_8b_extend_256k_8xh200": {"batch": 8, "recompute": "full"},
    "qwen3_5_2b_pretrain_4k_8xh200": {"batch": 256},
    "qwen3_5_2b_pretrain_8k_8xh100": {"batch": 128},
    "qwen3_5_2b_extend_32k_8xh100": {"batch": 32, "context": 2, "recompute": "mlp"},
    "qwen3_5_2b_extend_256k_8xh200": {"batch": 8, "recompute": "full"},
    "qwen3_5_4b_pretrain_4k_8xh200": {"batch": 256},
    "qwen3_5_4b_pretrain_8k_16xh100": {"batch": 128, "tensor": 2},
    "qwen3_5_4b_extend_32k_16xh100": {"batch": 32, "tensor": 2, "context": 2, "recompute": "mlp"},
    "qwen3_5_4b_extend_256k_16xh200": {"batch": 8, "tensor": 2, "recompute": "full"},
    "qwen3_5_9b_pretrain_4k_8xh200": {"batch": 256},
    "qwen3_5_9b_pretrain_4k_8xh100": {"batch": 256, "tensor": 2},
    "qwen3_5_9b_pretrain_8k_32xh100": {"batch": 256, "tensor": 2},
    "qwen3_5_9b_extend_32k_32xh100": {"batch": 64, "tensor": 2, "context": 2, "recompute": "mlp"},
    "qwen3_5_9b_extend_256k_32xh200": {"batch": 16, "tensor": 2, "context": 2, "recompute": "full"},
    "qwen3_5_27b_pretrain_4k_16xh200": {"batch": 512, "tensor": 4},
    "qwen3_5_27b_pretrain_8k_64xh100": {"batch": 256, "tensor": 4, "pipeline": 2},
    "qwen3_5_27b_extend_32k_64xh100": {"batch": 64, "tensor": 4, "recompute": "full"},
    "qwen3_5_27b_extend_256k_128xh200": {"batch": 16, "tensor": 8, "recompute": "full"},
    "qwen3_5_35b_a3b_pretrain_4k_8xh200": {"batch": 512, "expert": 8, "recompute": "mlp"},
    "qwen3_5_35b_a3b_pretrain_4k_16xh100": {"batch": 512, "pipeline": 2, "expert": 8, "recompute": "mlp"},
    "qwen3_5_35b_a3b_pretrain_8k_64xh100": {"batch": 256, "tensor": 2, "expert": 8, "recompute": "mlp"},
    "qwen3_5_35b_a3b_extend_32k_64xh100": {"batch": 64, "expert": 8, "recompute": "full"},
    "qwen3_5_35b_a3b_extend_256k_64xh200": {"batch": 16, "tensor": 4, "expert": 8, "recompute": "full"},
    "qwen3_5_122b_a10b_pretrain_4k_64xh200": {"batch": 1024, "tensor": 2, "pipeline": 2, "expert": 8},
    "qwen3_5_122b_a10b_pretrain_4k_128xh100": {
        "batch": 1024, "tensor": 2, "pipeline": 4, "expert": 8, "recompute": "mlp",
    },
    "qwen3_5_122b_a10b_pretrain_8k_256xh100": {
        "batch": 512, "tensor": 4, "pipeline": 4, "layers_per_virtual_stage": 4, "expert": 8, "recompute": "mlp",
    },
    "qwen3_5_122b_a10b_extend_32k_256xh100": {
        "batch": 256, "tensor": 4, "pipeline": 2, "layers_per_virtual_stage": 4, "expert": 8, "recompute": "full",
    },
    "qwen3_5_122b_a10b_extend_256k_256xh200": {
        "batch": 64, "tensor": 8, "pipeline": 2, "layers_per_virtual_stage": 4, "expert": 8, "recompute": "full",
    },
    "qwen3_5_397b_a17b_pretrain_4k_256xh200": {
        "batch": 1024, "tensor": 2, "pipeline": 8, "first_stage_layers": 6, "last_stage_layers": 6, "expert": 8,
    },
    "qwen3_5_397b_a17b_pretrain_4k_512xh100": {
        "batch": 1024, "tensor": 4, "pipeline": 8, "first_stage_layers": 6, "last_stage_layers": 6, "expert": 8,
        "recompute": "mlp",
    },
    "qwen3_5_397b_a17b_pretrain_8k_1024xh100": {
        "batch": 1024, "tensor": 4, "pipeline": 8, "first_stage_layers": 6, "last_stage_layers": 6, "expert": 8,
        "recompute": "mlp",
    },
    "qwen3_5_397b_a17b_extend_32k_512xh200": {
        "batch": 512, "tensor": 2, "pipeline": 4, "layers_per_virtual_stage": 3, "expert": 8, "recompute": "full",
    },
    "qwen3_5_397b_a17b_extend_256k_1024xh200": {
        "batch": 128, "tensor": 8, "pipeline": 4, "layers_per_virtual_stage": 3, "expert": 8, "recompute": "full",
    },
}  # fmt: skip


def recipe(name: str, run: dict[str, Any]) -> Recipe:
    """The recipe of a line of RUNS: its name says model, purpose, sequence and GPUs.

    Raises:
        ValueError: a name that does not.
    """
    said = re.fullmatch(r"(qwen3_\d_(.+))_(pretrain|extend)_(\d+)k_(\d+)x(h100|h200)", name)
    if said is None:
        raise ValueError(f"a recipe is named <model>_<purpose>_<sequence>k_<n>x<gpu>, got {name!r}")
    model, size, purpose, thousands, gpus, device = said.groups()
    layout = dict(run)
    batch, recompute = layout.pop("batch"), layout.pop("recompute", "none")
    sequence_parallel = layout.get("tensor", 1) > 1
    lr = LEARNING_RATES[size]
    if purpose == "pretrain":
        train = Train(steps=100_000, global_batch=batch, recompute=recompute)
        optimizer, checkpoint = Optimizer(lr=lr, min_lr=round(lr / 10, 9), warmup_steps=2000), Checkpoint()
    else:
        train = Train(steps=2000, global_batch=batch, recompute=recompute, evaluate_every=100)
        optimizer = Optimizer(lr=round(lr / 10, 9), min_lr=round(lr / 100, 9), warmup_steps=100)
        checkpoint = Checkpoint(save_every=100)
    return Recipe(
        model=MODELS[model],
        parallel=Parallel(gpus=int(gpus), device=device, sequence=sequence_parallel, **layout),  # type: ignore[arg-type]
        precision=Precision(),
        data=Data(sequence_length=1024 * int(thousands)),
        train=train,
        optimizer=optimizer,
        checkpoint=checkpoint,
    )
