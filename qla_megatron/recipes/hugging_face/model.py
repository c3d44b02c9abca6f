"""config.json -> a recipe's Model, and that model on Megatron's side: names, shapes and the way it is saved."""

import contextlib
import io
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

from qla_megatron.layers.hf_weights import Layout
from qla_megatron.recipes import build, upstream
from qla_megatron.recipes.models import MODELS
from qla_megatron.recipes.overrides import nearest
from qla_megatron.recipes.recipe import Data, Model, Optimizer, Parallel, Precision, Recipe, Train

# A recipe's field of the model: the field of config.json.
_FIELDS = {
    "hidden_size": "hidden_size", "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "gdn_key_heads": "linear_num_key_heads",
    "gdn_value_heads": "linear_num_value_heads", "gdn_key_dim": "linear_key_head_dim",
    "gdn_value_dim": "linear_value_head_dim", "gdn_conv_width": "linear_conv_kernel_dim", "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps", "max_position": "max_position_embeddings",
}  # fmt: skip
_DENSE_FIELDS = {"ffn_hidden_size": "intermediate_size"}
_EXPERT_FIELDS = {
    "num_experts": "num_experts", "experts_per_token": "num_experts_per_tok",
    "expert_hidden_size": "moe_intermediate_size", "shared_expert_hidden_size": "shared_expert_intermediate_size",
}  # fmt: skip
# What every Qwen3.5 is and no field of a recipe can change.
_FIXED = {
    "hidden_act": "silu", "attention_bias": False, "attn_output_gate": True, "norm_topk_prob": True,
    "mtp_use_dedicated_embeddings": False,
}  # fmt: skip
# What makes two models the same for a checkpoint's tensors.
_SHAPE_FIELDS = (
    *_FIELDS, *_DENSE_FIELDS, *_EXPERT_FIELDS, "attention_interval", "rotary_base", "rotary_fraction", "tie_embeddings"
)  # fmt: skip


def model_from_config(config: Mapping[str, Any], layout: Layout) -> Model:
    """The model of a config.json; `layout` knows what its tensors alone say.

    Raises:
        ValueError: a field is missing, or the embedding has fewer rows than the vocabulary.
        NotImplementedError: the model is none that a recipe can describe.
    """
    text = config.get("text_config") or config
    names = _FIELDS | (_EXPERT_FIELDS if layout.num_experts else _DENSE_FIELDS)
    if missing := [name for name in names.values() if name not in text]:
        raise ValueError(f"config.json must be that of a Qwen3.5 or Qwen3.6 model, got none of the field {missing[0]}")
    for name, value in _FIXED.items():
        if text.get(name, value) != value:
            raise NotImplementedError(f"config.json: {name} must be {value}, got {text[name]}")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise NotImplementedError(f"config.json: rope_type must be 'default', got {rope['rope_type']!r}")
    # Fields without an entry keep the recipe's values, which are the family's.
    optional = {
        "rotary_base": rope.get("rope_theta", text.get("rope_theta")),
        "rotary_fraction": rope.get("partial_rotary_factor", text.get("partial_rotary_factor")),
        "init_std": text.get("initializer_range"),
        "router_balance_weight": text.get("router_aux_loss_coef") if layout.num_experts else None,
    }
    if layout.padded_vocab_size < layout.vocab_size:
        raise ValueError(f"padded_vocab_size must be at least {layout.vocab_size}, got {layout.padded_vocab_size}")
    found = {field: text[name] for field, name in names.items()}
    found |= {field: value for field, value in optional.items() if value is not None}
    found["rotary_base"] = int(found.get("rotary_base", Model.rotary_base))
    return Model(
        **found,
        attention_interval=_attention_interval(layout.layer_is_attention),
        padded_vocab_size=layout.padded_vocab_size,
        tie_embeddings=layout.ties_embeddings,
        prediction_layers=int(layout.has_mtp),
    )


def _attention_interval(layer_is_attention: tuple[bool, ...]) -> int:
    interval = layer_is_attention.index(True) + 1 if any(layer_is_attention) else 0
    if not interval or any(here != ((i + 1) % interval == 0) for i, here in enumerate(layer_is_attention)):
        raise NotImplementedError(f"layer_types must be full attention in every Nth layer, got {layer_is_attention}")
    return interval


def known_names(model: Model) -> list[str]:
    """The released models that have this model's shapes."""
    return [name for name, known in MODELS.items() if not _differences(model, known)]


def check_is(model: Model, name: str) -> None:
    """Refuse a model that is not the released model `name`.

    Raises:
        ValueError: there is no such model (the text names the nearest), or the shapes are others.
    """
    if name not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}.{nearest(name, list(MODELS))}")
    if differences := _differences(model, MODELS[name]):
        raise ValueError(f"the directory must hold {name}, got another model: {', '.join(differences)}")


def _differences(model: Model, known: Model) -> list[str]:
    return [
        f"{field} is {getattr(model, field)}, not {getattr(known, field)}"
        for field in _SHAPE_FIELDS
        if getattr(model, field) != getattr(known, field)
    ]


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Megatron's groups for this process alone, on the CPU; those that exist already serve too.

    Raises:
        ValueError: this is one of several processes.
    """
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else os.getenv("WORLD_SIZE", "1")
    if int(world) != 1:
        raise ValueError(f"conversion is the work of one process, got {world}")
    upstream.apply()
    if torch.distributed.is_initialized():
        yield
        return
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from qla_megatron.testing.platform import use_cpu

    use_cpu()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@dataclass(frozen=True)
class MegatronModel:
    """A model without data, as one process without any parallelism would save it: any other layout loads that.

    `parameters`: Megatron's sharded form of each parameter, by the parameter's name in a GPTModel, over meta tensors.
    `objects`: entries of the model that are no tensors. `common`: what a checkpoint holds beside the model.
    """

    parameters: dict[str, ShardedTensor | ShardedTensorFactory]
    objects: tuple[ShardedObject, ...]
    common: dict[str, Any]

    def shape(self, name: str) -> torch.Tensor:
        """The parameter as a meta tensor."""
        return self.parameters[name].data

    def pieces(self, name: str, data: torch.Tensor) -> list[ShardedTensor]:
        """What Megatron saves of the parameter `name` with these values."""
        return list(nested_values(self._form(name, data)))

    def joined(self, name: str, pieces: list[torch.Tensor]) -> torch.Tensor:
        """The parameter from the values of its pieces, in the order of `pieces`."""
        entry = self.parameters[name]
        if isinstance(entry, ShardedTensor):
            return pieces[0]
        values = iter(pieces)
        return entry.merge_fn(dict_list_map_inplace(lambda _: next(values), self._form(name, entry.data)))

    def _form(self, name: str, data: torch.Tensor) -> Any:
        """Nested dicts and lists of ShardedTensor."""
        entry = self.parameters[name]
        if isinstance(entry, ShardedTensorFactory):
            return replace(entry, data=data).build()
        return [replace(entry, data=data, dtype=data.dtype)]


def megatron_model(model: Model) -> MegatronModel:
    """`model` without data, with Megatron's own names: they are read off the module that Megatron builds."""
    from megatron.core.dist_checkpointing.utils import _clean_metadata_for_serialization
    from megatron.training.checkpointing import _build_sharded_state_dict_metadata

    args, module = build_module(model, device="meta")
    metadata = _build_sharded_state_dict_metadata(args)
    entries = module.sharded_state_dict(metadata=metadata)
    objects = [entry for entry in entries.values() if isinstance(entry, ShardedObject)]
    objects += _states_of_transformer_engine(entries.values(), {entry.unique_key for entry in objects})
    return MegatronModel(
        {gpt_name(name, model): entry for name, entry in entries.items() if not isinstance(entry, ShardedObject)},
        tuple(objects),
        {
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": 0,
            "num_floating_point_operations_so_far": 0,
            "content_metadata": _clean_metadata_for_serialization(metadata),
        },
    )


def _states_of_transformer_engine(entries: Iterable[Any], known: set[str]) -> list[ShardedObject]:
    """Empty entries that a model of Transformer Engine's modules asks a checkpoint for beside those of local modules:
    its norms and its attention have a state, too, which is empty without FP8."""
    found = {}
    for entry in entries:
        for end, module in ((r"norm\.weight", "norm"), (r"linear_qkv\.weight", "core_attention")):
            if re.search(end + "$", entry.key):
                key = re.sub(end + "$", f"{module}._extra_state", entry.key)
                found[key] = ShardedObject(key, None, (1,), (0,))
    return [entry for entry in found.values() if entry.unique_key not in known]


def build_module(model: Model, device: str) -> tuple[Namespace, Any]:
    """Megatron's arguments for `model` in one process, and the module, in float32, its weights not initialized."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    recipe = _recipe(model)
    args = _arguments(recipe)
    config = build.model_config(recipe, args)
    with torch.device(device):
        module = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    return args, module


def gpt_name(name: str, model: Model) -> str:
    """The name in a GPTModel of a parameter of `model`; HybridModel has mixers and MLPs as layers in turn."""
    if model.stack == "gpt":
        return name
    name = re.sub(r"^decoder\.layers\.(\d+)\.", lambda match: f"decoder.layers.{int(match[1]) // 2}.", name)
    name = re.sub(r"\.mtp_model_layer\.layers\.\d+\.", ".mtp_model_layer.", name)
    return name.replace("decoder.final_norm.", "decoder.final_layernorm.")


def _recipe(model: Model) -> Recipe:
    """A recipe of one process around `model`; a checkpoint's arguments are those of such a run."""
    return Recipe(
        model=model,
        parallel=Parallel(gpus=1, device="cpu"),
        precision=Precision(dtype="fp32"),
        data=Data(sequence_length=4096),
        train=Train(steps=1, global_batch=1, evaluate_sequences=0),
        optimizer=Optimizer(lr=0.0, min_lr=0.0, warmup_steps=0, distributed=False, overlap=False),
    )


def _arguments(recipe: Recipe) -> Namespace:
    from megatron.training.arguments import parse_args, validate_args

    flags = [*build.megatron_flags(recipe, "conversion"), "--use-cpu-initialization", "--no-initialization"]
    arguments_of_this_program = sys.argv
    sys.argv = ["megatron", *flags]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            args = parse_args()
            validate_args(args, {})
    finally:
        sys.argv = arguments_of_this_program
    return args
