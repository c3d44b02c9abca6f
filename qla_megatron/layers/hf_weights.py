"""Qwen3.5 and Qwen3.6 weights: Hugging Face tensors <-> Megatron tensors, as functions of dicts.

    hf_to_megatron(hf, layout)     the whole model under Megatron's names, as one tensor-parallel rank holds it
    megatron_to_hf(state, layout)  back to Hugging Face's names
    rules(layout)                  the same one step at a time, for models that do not fit into memory

Where the two differ (transformers 5.24, models/qwen3_5 and qwen3_5_moe; megatron-core 0.19, ssm/gated_delta_net and
transformer/attention.py): Megatron fuses in_proj of a Gated DeltaNet layer as [query | key | value | z | beta | alpha],
and query, key and value of attention as [queries | gates | key | value] of one group after another, where Hugging Face
has a gate after each query head; gate and up projections are one tensor; experts are one tensor each, not one for
all; and GDN's output norm stores its weight minus one, as all of Megatron's norms do with
`layernorm_zero_centered_gamma`. That subtraction is in float32: exact for weights from 0.5 up and for bfloat16
weights from 2^-16 up; other float32 weights come back to within 6e-8 (`Rule.rounds` marks it).

Shards of tensor-parallel ranks are in hf_shards.py. Pipeline and expert parallelism need none: load into a model
without, save as `torch_dist`, and Megatron reshards.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from qla_megatron.layers.projections import HeadSizes

Tensors = dict[str, torch.Tensor]
Convert = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Layout:
    """The sizes of a model that its weights' names and fused rows depend on.

    `vocab_size` counts Hugging Face's rows of the embedding; Megatron may have more, `padded_vocab_size`, filled with
    zeros. `fuses_norms`: Transformer Engine's linear layers own the norm before them. `groups_experts`: Megatron's
    grouped MLP, not one module an expert. `has_mtp`: there is a multi-token prediction layer; `packs_mtp_experts`:
    its experts are one tensor in Hugging Face's file (3.6), as other layers' always are, or one each (3.5).
    `hf_prefix`: "model." in text models, "model.language_model." in models with vision.
    """

    layer_is_attention: tuple[bool, ...]
    gdn_heads: HeadSizes
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int
    num_experts: int = 0
    ties_embeddings: bool = False
    has_mtp: bool = False
    fuses_norms: bool = False
    groups_experts: bool = False
    packs_mtp_experts: bool = True
    hf_prefix: str = "model."


def layout_from_hf(config: Mapping[str, Any], names: Iterable[str], **changes: Any) -> Layout:
    """The layout of a Hugging Face checkpoint.

    Args:
        config: its config.json; a `text_config` inside is used where there is one.
        names: of its tensors: they say whether there are multi-token prediction layers, and how the experts are stored.
        changes: fields of Layout to set, such as `fuses_norms`: Megatron's side is not in the checkpoint.

    Raises:
        ValueError: the configuration lacks a field.
        TypeError: `changes` has no such field.
    """
    if unknown := changes.keys() - {field.name for field in fields(Layout)}:
        raise TypeError(f"changes must be fields of Layout, got {sorted(unknown)}")
    names = set(names)
    text = config.get("text_config") or config
    try:
        found: dict[str, Any] = {
            "layer_is_attention": tuple(kind == "full_attention" for kind in text["layer_types"]),
            "gdn_heads": HeadSizes(
                text["linear_num_key_heads"],
                text["linear_num_value_heads"],
                text["linear_key_head_dim"],
                text["linear_value_head_dim"],
            ),
            "num_heads": text["num_attention_heads"],
            "num_kv_heads": text["num_key_value_heads"],
            "head_dim": text["head_dim"],
            "vocab_size": text["vocab_size"],
            "padded_vocab_size": text["vocab_size"],
        }
    except KeyError as error:
        raise ValueError(f"config must be that of a Qwen3.5 model, got none of the field {error}") from error
    found["num_experts"] = text.get("num_experts") or 0
    found["ties_embeddings"] = "lm_head.weight" not in names  # the flag of some configurations is wrong
    found["has_mtp"] = "mtp.fc.weight" in names
    found["packs_mtp_experts"] = "mtp.layers.0.mlp.experts.0.down_proj.weight" not in names
    if any(name.startswith("model.language_model.") for name in names):
        found["hf_prefix"] = "model.language_model."
    return Layout(**found | changes)


def hf_to_megatron(hf: Mapping[str, torch.Tensor], layout: Layout, *, leave: Sequence[str] = ()) -> Tensors:
    """Megatron's tensors, for one tensor-parallel rank. Those that need no change are not copied.

    Args:
        hf: Hugging Face's tensors by name.
        layout: the model.
        leave: beginnings of names that have no counterpart and may stay behind, such as "model.visual.".

    Raises:
        ValueError: a tensor is missing, or there is one that `layout` does not explain, or a shape does not fit.
    """
    names = {name for name in hf if not name.startswith(tuple(leave))}
    return _convert({name: hf[name] for name in names}, rules(layout), to_megatron=True)


def megatron_to_hf(state: Mapping[str, torch.Tensor], layout: Layout) -> Tensors:
    """Hugging Face's tensors, the inverse of `hf_to_megatron`. Megatron's `_extra_state` entries are passed over.

    GDN's output norm comes out in float32; cast it where the checkpoint wants another type.

    Raises:
        ValueError: a tensor is missing, or there is one that `layout` does not explain, or a shape does not fit.
    """
    return _convert(without_extra_state(state), rules(layout), to_megatron=False)


@dataclass(frozen=True)
class Rule:
    """Tensors `hf` hold the same numbers as tensors `megatron`; the two functions turn the one list into the other.

    `rounds`: there and back is not exact for all numbers.
    """

    hf: tuple[str, ...]
    megatron: tuple[str, ...]
    to_megatron: Convert = list
    to_hf: Convert = list
    rounds: bool = False

    def convert(self, source: Mapping[str, torch.Tensor], *, to_megatron: bool) -> Tensors:
        """The tensors of the other side from those of this rule in `source`. Meta tensors give shapes and dtypes.

        Raises:
            ValueError: a shape does not fit.
        """
        old, new = (self.hf, self.megatron) if to_megatron else (self.megatron, self.hf)
        tensors = [source[name] for name in old]
        try:
            converted = (self.to_megatron if to_megatron else self.to_hf)(tensors)
        except (RuntimeError, ValueError) as error:
            shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip(old, tensors, strict=True))
            raise ValueError(f"tensors must have the shapes that the layout says, got {shapes}: {error}") from error
        return dict(zip(new, converted, strict=True))


def rules(layout: Layout) -> Iterator[Rule]:
    """Every tensor of the model, once."""
    hf = layout.hf_prefix
    yield _vocabulary_rule(f"{hf}embed_tokens.weight", "embedding.word_embeddings.weight", layout)
    if not layout.ties_embeddings:
        yield _vocabulary_rule("lm_head.weight", "output_layer.weight", layout)
    yield _copy(f"{hf}norm.weight", "decoder.final_layernorm.weight")
    for i, is_attention in enumerate(layout.layer_is_attention):
        yield from _layer_rules(layout, f"{hf}layers.{i}.", f"decoder.layers.{i}.", is_attention, packs_experts=True)
    if layout.has_mtp:
        mtp = "mtp.layers.0."
        yield _copy("mtp.fc.weight", f"{mtp}eh_proj.weight")
        yield _copy("mtp.pre_fc_norm_embedding.weight", f"{mtp}enorm.weight")
        yield _copy("mtp.pre_fc_norm_hidden.weight", f"{mtp}hnorm.weight")
        yield _copy("mtp.norm.weight", f"{mtp}final_layernorm.weight")
        yield from _layer_rules(layout, mtp, f"{mtp}mtp_model_layer.", True, packs_experts=layout.packs_mtp_experts)


def _layer_rules(layout: Layout, hf: str, megatron: str, is_attention: bool, packs_experts: bool) -> Iterator[Rule]:
    mixer = "self_attention.linear_qkv" if is_attention else "self_attention.in_proj"
    input_norm = f"{mixer}.layer_norm_weight" if layout.fuses_norms else "input_layernorm.weight"
    fuses_mlp_norm = layout.fuses_norms and not layout.num_experts
    mlp_norm = "mlp.linear_fc1.layer_norm_weight" if fuses_mlp_norm else "pre_mlp_layernorm.weight"
    yield _copy(f"{hf}input_layernorm.weight", f"{megatron}{input_norm}")
    yield _copy(f"{hf}post_attention_layernorm.weight", f"{megatron}{mlp_norm}")
    if is_attention:
        yield from _attention_rules(layout, f"{hf}self_attn.", f"{megatron}self_attention.")
    else:
        yield from _gdn_rules(layout, f"{hf}linear_attn.", f"{megatron}self_attention.")
    if layout.num_experts:
        yield from _expert_rules(layout, f"{hf}mlp.", f"{megatron}mlp.", packs_experts)
    else:
        yield from _mlp_rules(f"{hf}mlp.", f"{megatron}mlp.")


def _gdn_rules(layout: Layout, hf: str, megatron: str) -> Iterator[Rule]:
    query, key, value, *gates = layout.gdn_heads.projection
    yield Rule(
        tuple(f"{hf}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
        (f"{megatron}in_proj.weight",),
        _concatenate([query + key + value, *gates]),
        lambda tensors: tensors[0].split([query + key + value, *gates]),
    )
    for name in ("conv1d.weight", "A_log", "dt_bias", "out_proj.weight"):
        yield _copy(hf + name, megatron + name)
    yield Rule(
        (f"{hf}norm.weight",),
        (f"{megatron}out_norm.weight",),
        lambda tensors: [tensors[0].float() - 1],
        lambda tensors: [tensors[0].float() + 1],
        rounds=True,
    )


def _attention_rules(layout: Layout, hf: str, megatron: str) -> Iterator[Rule]:
    groups, width = layout.num_kv_heads, layout.head_dim
    per_group = layout.num_heads // groups

    def fuse(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        query, key, value = tensors
        query = query.reshape(groups, per_group, 2, width, -1)
        key, value = (t.reshape(groups, 1, width, -1) for t in (key, value))
        return [torch.cat([query[:, :, 0], query[:, :, 1], key, value], 1).flatten(0, 2)]

    def part(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        query, gate, key, value = (
            tensors[0].reshape(groups, 2 * per_group + 2, width, -1).split([per_group, per_group, 1, 1], 1)
        )
        return [torch.stack([query, gate], 2).flatten(0, 3), key.flatten(0, 2), value.flatten(0, 2)]

    names = tuple(f"{hf}{part}_proj.weight" for part in "qkv")
    yield Rule(names, (f"{megatron}linear_qkv.weight",), fuse, part)
    yield _copy(f"{hf}o_proj.weight", f"{megatron}linear_proj.weight")
    yield _copy(f"{hf}q_norm.weight", f"{megatron}q_layernorm.weight")
    yield _copy(f"{hf}k_norm.weight", f"{megatron}k_layernorm.weight")


def _mlp_rules(
    hf: str, megatron: str, fc1: str = "linear_fc1.weight", fc2: str = "linear_fc2.weight"
) -> Iterator[Rule]:
    names = (f"{hf}gate_proj.weight", f"{hf}up_proj.weight")
    yield Rule(names, (megatron + fc1,), lambda tensors: [torch.cat(list(tensors))], lambda t: t[0].chunk(2))
    yield _copy(f"{hf}down_proj.weight", megatron + fc2)


def _expert_rules(layout: Layout, hf: str, megatron: str, packs_experts: bool) -> Iterator[Rule]:
    yield _copy(f"{hf}gate.weight", f"{megatron}router.weight")
    yield _copy(f"{hf}shared_expert_gate.weight", f"{megatron}shared_experts.gate_weight")
    yield from _mlp_rules(f"{hf}shared_expert.", f"{megatron}shared_experts.")
    form = "experts.{fc}.weight{e}" if layout.groups_experts else "experts.local_experts.{e}.{fc}.weight"
    fc1, fc2 = (
        tuple(megatron + form.format(fc=fc, e=e) for e in range(layout.num_experts))
        for fc in ("linear_fc1", "linear_fc2")
    )
    if packs_experts:
        yield Rule((f"{hf}experts.gate_up_proj",), fc1, _unbind(len(fc1)), lambda tensors: [torch.stack(list(tensors))])
        yield Rule((f"{hf}experts.down_proj",), fc2, _unbind(len(fc2)), lambda tensors: [torch.stack(list(tensors))])
    else:
        for e in range(layout.num_experts):
            yield from _mlp_rules(f"{hf}experts.{e}.", "", fc1[e], fc2[e])


def _copy(hf: str, megatron: str) -> Rule:
    return Rule((hf,), (megatron,))


def _vocabulary_rule(hf: str, megatron: str, layout: Layout) -> Rule:
    rows, padded = layout.vocab_size, layout.padded_vocab_size

    def pad(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        _check_rows(tensors, [rows])
        return [torch.nn.functional.pad(tensors[0], (0, 0, 0, padded - rows)) if padded > rows else tensors[0]]

    def strip(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        _check_rows(tensors, [padded])
        return [tensors[0][:rows]]

    return Rule((hf,), (megatron,), pad, strip)


def _concatenate(rows: list[int]) -> Convert:
    def convert(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        _check_rows(tensors, rows)
        return [torch.cat(list(tensors))]

    return convert


def _unbind(count: int) -> Convert:
    def convert(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        _check_rows(tensors, [count])
        return tensors[0].unbind()

    return convert


def _check_rows(tensors: Sequence[torch.Tensor], rows: list[int]) -> None:
    if [tensor.shape[0] for tensor in tensors] != rows:
        raise ValueError(f"rows must be {rows}")


def _convert(source: Mapping[str, torch.Tensor], table: Iterable[Rule], *, to_megatron: bool) -> Tensors:
    result: Tensors = {}
    used: set[str] = set()
    missing: list[str] = []
    for rule in table:
        old = rule.hf if to_megatron else rule.megatron
        absent = [name for name in old if name not in source]
        missing += absent
        used.update(old)
        if not absent:
            result |= rule.convert(source, to_megatron=to_megatron)
    unexplained = sorted(source.keys() - used)
    if missing or unexplained:
        raise ValueError(
            f"tensors must be exactly those of the layout, got {len(missing)} missing ({some(missing)}) and "
            f"{len(unexplained)} more ({some(unexplained)})"
        )
    return result


def some(names: list[str]) -> str:
    """The first names of a list, for an error."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "none"


def without_extra_state(state: Mapping[str, torch.Tensor]) -> Tensors:
    """The tensors of a state dict without Megatron's `_extra_state` entries."""
    return {name: tensor for name, tensor in state.items() if not name.endswith("_extra_state")}
