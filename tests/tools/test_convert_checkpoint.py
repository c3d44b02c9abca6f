"""Hugging Face -> Megatron -> Hugging Face of tiny models of all ten families, in other layouts, and its refusals.

Ranks and processes that import Megatron are dear: each of them does all families.
"""

import contextlib
import importlib.util
import io
import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qla_megatron.recipes import build, catalogue
from qla_megatron.recipes.models import MODELS
from qla_megatron.recipes.recipe import Parallel, Recipe
from qla_megatron.testing.distributed import run_ranks

TOOL = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"
LAYOUTS = {
    "tensor": Parallel(gpus=2, device="cpu", tensor=2, sequence=True),
    "pipeline": Parallel(gpus=2, device="cpu", pipeline=2),
    "expert": Parallel(gpus=2, device="cpu", expert=2),
}
EXPERTS = [name for name, model in MODELS.items() if model.num_experts]
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 48, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_checkpoint", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- tiny models in the format of the released ones ---


def tiny_config(name: str, vocab_size: int = 96) -> Any:
    """A family's config.json with its ratios of heads, its layer pattern and its experts, two key heads wide."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig

    known = MODELS[name]
    text = {
        "vocab_size": vocab_size, "hidden_size": 48, "num_hidden_layers": 4, "head_dim": 32, "num_key_value_heads": 2,
        "num_attention_heads": 2 * known.num_heads // known.num_kv_heads, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2 * known.gdn_value_heads // known.gdn_key_heads,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                            "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    }  # fmt: skip
    if known.num_experts:
        text |= {
            "num_experts": known.num_experts // 32, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        }  # fmt: skip
    else:
        text["intermediate_size"] = 64
    config_class = Qwen3_5MoeConfig if known.num_experts else Qwen3_5Config
    return config_class(text_config=text, vision_config=VISION, tie_word_embeddings=known.tie_embeddings)


def tiny_tensors(name: str, config: Any) -> dict[str, torch.Tensor]:
    """Random weights under transformers' names, with vision tower, and a prediction layer as the family stores it."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForConditionalGeneration

    has_experts = MODELS[name].num_experts is not None
    model = (Qwen3_5MoeForConditionalGeneration if has_experts else Qwen3_5ForConditionalGeneration)(config)
    shapes = {tensor: parameter.shape for tensor, parameter in model.named_parameters()}
    shapes |= mtp_shapes(shapes, packs_experts=name.startswith("qwen3_6"))
    generator = torch.Generator().manual_seed(len(name))
    tensors = {}
    for tensor, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if tensor.endswith("linear_attn.norm.weight"):
            noise = torch.rand(shape, generator=generator) * 2 + 1e-3  # small ones do not survive minus one, plus one
        is_float32 = tensor.endswith(("A_log", "linear_attn.norm.weight")) and name.startswith("qwen3_5")
        tensors[tensor] = (0.3 * noise).to(torch.float32 if is_float32 else torch.bfloat16)
    return tensors


def mtp_shapes(shapes: dict[str, Any], *, packs_experts: bool) -> dict[str, Any]:
    """Shapes of the tensors of a prediction layer, which transformers does not have: an attention layer's and four."""
    [hidden] = shapes["model.language_model.norm.weight"]
    found = {f"mtp.{n}.weight": (hidden,) for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    found["mtp.fc.weight"] = (hidden, 2 * hidden)
    attention = "model.language_model.layers.3."
    for tensor, shape in shapes.items():
        inner = tensor.replace(attention, "mtp.layers.0.")
        if not tensor.startswith(attention):
            continue
        if ".experts." not in tensor or packs_experts:
            found[inner] = shape
            continue
        for e in range(shape[0]):
            expert = inner.replace("experts.", f"experts.{e}.")
            if tensor.endswith("gate_up_proj"):
                halves = (shape[1] // 2, shape[2])
                found |= {expert.replace("gate_up_proj", f"{n}_proj.weight"): halves for n in ("gate", "up")}
            else:
                found[f"{expert}.weight"] = tuple(shape[1:])
    return found


def write_directory(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Three shards and an index, config.json and what stands for a tokenizer."""
    folder.mkdir(parents=True)
    weight_map = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"vocabulary": "of the test"}')
    (folder / "README.md").write_text("not a part of the model")


def make_families(root: Path, names: list[str], vocab_size: int = 96) -> None:
    for name in names:
        config = tiny_config(name, vocab_size)
        write_directory(root / name / "hf", config.to_dict(), tiny_tensors(name, config))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        here = load_file(file)
        assert not here.keys() & found.keys()
        found |= here
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == found.keys()
    return found


def assert_bitwise(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8)), name


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten folders NAME/hf and, imported, NAME/megatron; NAME/check holds what check printed."""
    root = tmp_path_factory.mktemp("families")
    run_ranks(import_on_this_rank, 1, str(root), timeout=300)
    return root


def import_on_this_rank(root: str) -> None:
    make_families(Path(root), list(MODELS))
    for name in MODELS:
        folder = Path(root) / name
        run("import", "--hf", folder / "hf", "--megatron", folder / "megatron")
        code, out = call("check", "--hf", folder / "hf", "--megatron", folder / "megatron", "--tokens", "70")
        (folder / "check").write_text(f"{code}\n{out}")


def call(*arguments: object) -> tuple[int, str]:
    """The program in this process: exit code and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        code = tool().main([str(argument) for argument in arguments])
    return code, out.getvalue()


def run(*arguments: object) -> str:
    code, out = call(*arguments)
    assert code == 0, out
    return out


# --- there and back ---


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(families: Path, name: str) -> None:
    code, _, *lines = (families / name / "check").read_text().splitlines()
    assert code == "0", lines
    assert [line.split()[0] for line in lines] == ["logits", "logits", str(len(mtp_names(families, name)))], lines
    assert all(line.split()[-1] == "ok" for line in lines)


def mtp_names(families: Path, name: str) -> list[str]:
    return [tensor for tensor in tensors_of(families / name / "hf") if tensor.startswith("mtp.")]


@pytest.fixture(scope="module")
def round_trips(families: Path) -> Path:
    """Every family loaded and saved by two ranks in each layout, and exported: NAME/back_LAYOUT."""
    for layout, parallel in LAYOUTS.items():
        sizes = {"tensor_parallel": parallel.tensor, "pipeline_parallel": parallel.pipeline}
        sizes |= {"expert_parallel": parallel.expert, "expert_tensor_parallel": 1}
        run_ranks(reshard_on_this_rank, 2, str(families), layout, **sizes, timeout=300)
    run_ranks(export_on_this_rank, 1, str(families), timeout=300)
    return families


def reshard_on_this_rank(root: str, layout: str) -> None:
    """Load each family's checkpoint into models of this layout, and save them."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.training.checkpointing import _build_sharded_state_dict_metadata

    from qla_megatron.recipes import upstream

    upstream.apply()
    for name in EXPERTS if layout == "expert" else MODELS:
        folder = Path(root) / name
        args, module = module_in(LAYOUTS[layout], folder)
        metadata = _build_sharded_state_dict_metadata(args)
        state = dist_checkpointing.load(
            {"model": module.sharded_state_dict(metadata=metadata)}, str(folder / "megatron" / "release")
        )
        module.load_state_dict(state["model"])
        target = folder / layout / "iter_0000007"
        if parallel_state.get_data_parallel_rank() == torch.distributed.get_rank() == 0:
            target.mkdir(parents=True)
            (folder / layout / "latest_checkpointed_iteration.txt").write_text("7")
        torch.distributed.barrier()
        saved = {"model": module.sharded_state_dict(metadata=metadata), "args": args, "iteration": 7}
        dist_checkpointing.save(saved, str(target))


def module_in(parallel: Parallel, folder: Path) -> tuple[Namespace, Any]:
    """This rank's part of the model of folder/hf, with its prediction layer, weights not those of any checkpoint."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.training.arguments import parse_args, validate_args

    from qla_megatron.layers.spec import gpt_block_spec, mtp_block_spec

    recipe = replace(recipe_of(folder), parallel=parallel)
    sys.argv = ["megatron", *build.megatron_flags(recipe, "test")]
    with contextlib.redirect_stdout(io.StringIO()):
        args = parse_args()
        validate_args(args, {})
    config = build.model_config(recipe, args)
    model = GPTModel(
        config.transformer, gpt_block_spec(config), config.vocab_size, config.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        mtp_block_spec=mtp_block_spec(config), position_embedding_type="rope", rotary_percent=config.rotary_percent,
        rotary_base=config.rotary_base,
        share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
    )  # fmt: skip
    if recipe.model.tie_embeddings and model.mtp_process and not model.pre_process:
        # Fault of megatron-core 0.19: the last stage, which has the embedding for the prediction layer, keeps an output
        # weight besides, which nothing uses and sharded_state_dict refuses.
        model.output_layer.weight = None
    return args, model


def recipe_of(folder: Path) -> Recipe:
    from qla_megatron.layers.hf_weights import layout_from_hf
    from qla_megatron.recipes.hugging_face.files import open_directory
    from qla_megatron.recipes.hugging_face.model import model_from_config

    hf = open_directory(folder / "hf")
    base = catalogue.find("tiny_pretrain_2k_2xcpu")
    return replace(base, model=model_from_config(hf.config, layout_from_hf(hf.config, hf.tensors)))


def export_on_this_rank(root: str) -> None:
    for name in MODELS:
        folder = Path(root) / name
        for layout in ("megatron", *LAYOUTS):
            if (folder / layout).exists():
                options = ["--shard-gib", 1e-4] if layout == "megatron" else []
                source, back = folder / layout, folder / f"back_{layout}"
                run("export", "--megatron", source, "--reference", folder / "hf", "--hf", back, *options)


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_bitwise(round_trips: Path, name: str) -> None:
    folder = round_trips / name
    source = tensors_of(folder / "hf")
    layouts = ["megatron", "tensor", "pipeline", *(["expert"] if name in EXPERTS else [])]
    for layout in layouts:
        back = folder / f"back_{layout}"
        assert_bitwise(tensors_of(back), source)
        small = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
        assert {file.name for file in back.iterdir() if file.suffix != ".safetensors"} == small
        for file in ("config.json", "tokenizer.json"):
            assert (back / file).read_bytes() == (folder / "hf" / file).read_bytes()
    shards = [file.stat().st_size for file in (folder / "back_megatron").glob("*.safetensors")]
    assert len(shards) > 2
    assert {file.name for file in folder.iterdir()} == {"hf", "check", *layouts, *(f"back_{n}" for n in layouts)}
