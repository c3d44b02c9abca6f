"""Parameters that the first and the last process of a recipe really hold, without their machines: prints JSON.

    python tests/recipes/stage_parameters.py NAME [NAME ...]

The model is built by Megatron's own builder on the meta device, in torch's fake process group of the recipe's size, in
a cheap form: a group of layers in every pipeline stage, and in every chunk of one, and two experts a process.
"""

import contextlib
import io
import json
import os
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.arguments import parse_args, validate_args
from megatron.training.models.gpt import GPTModelBuilder
from torch.testing._internal.distributed.fake_pg import FakeStore

from qla_megatron.recipes import build, catalogue, checks, upstream
from qla_megatron.recipes.recipe import Recipe
from qla_megatron.testing.platform import use_cpu

STAGES = ("first_stage_layers", "last_stage_layers", "layers_per_virtual_stage")


def cheap(recipe: Recipe) -> Recipe:
    """The recipe with one group of layers in each chunk of each stage, and two experts a process."""
    m, p = recipe.model, recipe.parallel
    group = m.attention_interval
    chunks = 2 if p.layers_per_virtual_stage else 1
    layout = replace(
        p, first_stage_layers=None, last_stage_layers=None, layers_per_virtual_stage=group if chunks == 2 else None
    )
    experts = None if m.num_experts is None else 2 * p.expert
    model = replace(m, num_layers=group * p.pipeline * chunks, num_experts=experts)
    return replace(recipe, model=model, parallel=layout)


def parameters_of(recipe: Recipe, rank: int) -> int:
    """Of all chunks of this rank's model."""
    p = recipe.parallel
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=p.gpus)
    os.environ |= {"WORLD_SIZE": str(p.gpus), "RANK": str(rank), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    sys.argv[1:] = [*build.megatron_flags(recipe, "test"), "--use-cpu-initialization", "--no-initialization"]
    with contextlib.redirect_stdout(io.StringIO()):
        args = parse_args()
        validate_args(args, {})
    waves = args.virtual_pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(
        p.tensor, p.pipeline, waves, context_parallel_size=p.context, expert_model_parallel_size=p.expert,
        expert_tensor_parallel_size=1 if recipe.model.num_experts else None, create_gloo_process_groups=False,
    )  # fmt: skip
    builder = GPTModelBuilder(build.model_config(recipe, args))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with torch.device("meta"):
        chunks = [builder.build_model(groups, vp_stage=chunk) for chunk in (range(waves) if waves else [None])]
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())


def main(names: list[str]) -> list[list[object]]:
    """For each recipe: what was changed to make it cheap, parameters of the first process, of the last."""
    use_cpu(even_with_cuda=True)
    upstream.apply()
    found: list[list[object]] = []
    for name in names:
        recipe = cheap(catalogue.find(name))
        checks.check(recipe)
        changed = {
            "model": {name: getattr(recipe.model, name) for name in ("num_layers", "num_experts")},
            "parallel": {name: getattr(recipe.parallel, name) for name in STAGES},
        }
        found.append([changed, *(parameters_of(recipe, rank) for rank in (0, recipe.parallel.gpus - 1))])
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
