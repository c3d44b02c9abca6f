"""The ten sizes, built as models on the meta device, have exactly the published number of parameters.

The published totals are those of the Hugging Face checkpoints (text model without the vision tower and, in the second
column, the multi-token prediction block).
"""

import contextlib
import io
import sys
from dataclasses import replace
from typing import Any

import pytest

from qla_megatron.recipes import build, catalogue, upstream
from qla_megatron.recipes.models import MODELS
from qla_megatron.recipes.recipe import Model, Parallel
from qla_megatron.testing.distributed import run_ranks

PUBLISHED = {  # text model, one multi-token prediction block
    "qwen3_5_0_8b": (752_393_024, 20_452_864),
    "qwen3_5_2b": (1_881_825_088, 60_828_160),
    "qwen3_5_4b": (4_205_751_296, 120_599_552),
    "qwen3_5_9b": (8_953_803_264, 243_290_624),
    "qwen3_5_27b": (26_895_998_464, 424_699_392),
    "qwen3_5_35b_a3b": (34_660_610_688, 844_640_768),
    "qwen3_5_122b_a10b": (122_111_526_912, 2_523_679_232),
    "qwen3_5_397b_a17b": (396_346_350_336, 6_595_568_128),
    "qwen3_6_27b": (26_895_998_464, 424_699_392),
    "qwen3_6_35b_a3b": (34_660_610_688, 844_640_768),
}


def built(model: Model) -> Any:
    """The model on the meta device, tensor parallel size 1, by Megatron's own builder."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.models.gpt import GPTModelBuilder

    upstream.apply()
    recipe = replace(catalogue.find("tiny_pretrain_2k_2xcpu"), model=model, parallel=Parallel(gpus=1, device="cpu"))
    more = ["--use-cpu-initialization", "--no-initialization"]
    sys.argv[1:] = [*build.megatron_flags(recipe, "test"), *more]
    with contextlib.redirect_stdout(io.StringIO()):
        args = parse_args()
        validate_args(args, {})
    config = build.model_config(recipe, args)
    with torch.device("meta"):
        return GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())


def count_on_this_rank(model: Model) -> tuple[int, int]:
    """Parameters of the text model and of one multi-token prediction block.

    Expert networks are thousands of modules a layer: of a mixture of experts, one group of layers is built (three
    Gated DeltaNet, one attention) and counted as often as it occurs; all groups are alike.
    """
    groups = model.num_layers // model.attention_interval
    repeats = 1 if model.num_experts is None else groups
    whole = built(replace(model, num_layers=model.num_layers // repeats))
    sizes = {name: parameter.numel() for name, parameter in whole.named_parameters()}
    layers = sum(size for name, size in sizes.items() if name.startswith("decoder.layers."))
    prediction = sum(size for name, size in sizes.items() if name.startswith("mtp."))
    assert all(parameter.is_meta for parameter in whole.parameters())
    return sum(sizes.values()) - prediction - layers + repeats * layers, prediction


def test_published_covers_the_ten_sizes() -> None:
    assert list(PUBLISHED) == list(MODELS)


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_parameter_count_is_the_published_one(name: str) -> None:
    [counts] = run_ranks(count_on_this_rank, 1, MODELS[name])
    assert counts == PUBLISHED[name]


def layer_settings_on_this_rank() -> tuple[object, str]:
    tiny = catalogue.find("tiny_pretrain_2k_2xcpu").model
    layer = built(replace(tiny, gdn_backend="reference", num_layers=4)).decoder.layers[0].self_attention
    return layer.A_init_range, layer.backend


def test_start_values_and_backend_reach_the_layer() -> None:
    assert run_ranks(layer_settings_on_this_rank, 1) == [((0.01, 16.0), "reference")]
