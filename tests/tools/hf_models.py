"""Tiny models of all ten families in the format of the released ones, and the program that converts them."""

import contextlib
import functools
import importlib.util
import io
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from qla_megatron.recipes.models import MODELS

TOOL = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 48, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip


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


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_checkpoint", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def hurry() -> None:
    """Leave out the help texts of Megatron's arguments, which it parses its own sources for: half of a conversion's
    time here."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    ArgumentGroupFactory._get_field_docstrings = lambda self, source: {}


def call(*arguments: object) -> tuple[int, str]:
    """The program in this process: exit code and what it printed."""
    hurry()
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        code = tool().main([str(argument) for argument in arguments])
    return code, out.getvalue()


def run(*arguments: object) -> str:
    code, out = call(*arguments)
    assert code == 0, out
    return out
