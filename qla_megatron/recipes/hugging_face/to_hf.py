"""A Megatron checkpoint -> a Hugging Face directory."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from rich.console import Console

from qla_megatron.layers.hf_weights import Layout, Rule, Tensors, layout_from_hf
from qla_megatron.recipes.hugging_face import torch_dist
from qla_megatron.recipes.hugging_face.files import HfDirectory, directory_when_complete, open_directory, write_weights
from qla_megatron.recipes.hugging_face.model import MegatronModel, megatron_model, model_from_config, one_process
from qla_megatron.recipes.hugging_face.plan import (
    EMBEDDING,
    MTP,
    VISION,
    Advance,
    MtpChoice,
    Part,
    check_shapes,
    declares_mtp,
    expected_hf,
    model_rules,
    parts,
    progress_bar,
    ties_embeddings,
)
from qla_megatron.recipes.hugging_face.to_megatron import layout_of
from qla_megatron.recipes.recipe import Model

_VISION_PREFIX, _TEXT_PREFIX = "model.language_model.", "model."
_MODEL_KEYS = ("embedding.", "decoder.", "output_layer.", MTP)
_FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")  # in Qwen3.5's files; all else has the model's dtype


def export_checkpoint(
    source: Path,
    reference: Path,
    target: Path,
    console: Console,
    *,
    step: int | None = None,
    mtp: MtpChoice = "keep",
    text_only: bool = False,
    shard_bytes: int = 5 << 30,
) -> list[Part]:
    """Write the Megatron checkpoint `source` as the Hugging Face directory `target`.

    Names, dtypes, the vision tower and the small files are those of `reference`. Weights that training left alone come
    out as they were there, bit by bit. One shard is in memory at a time.

    Args:
        source: a run's folder of checkpoints, or one checkpoint, saved in any layout, as GPTModel or HybridModel.
        reference: a Hugging Face directory of the model; its weights may be missing where it has no vision tower.
        target: must not exist yet; it appears when it is complete.
        console: for the progress bar.
        step: which checkpoint; None: the latest.
        mtp: the multi-token prediction layer comes from the checkpoint, from the reference, or is left out.
        text_only: write the language model alone, without the vision tower.
        shard_bytes: size of a safetensors file.

    Raises:
        ValueError: something is missing, truncated, of another shape, or there is more than the model explains.
        NotImplementedError: the model is none that a recipe can describe.
    """
    checkpoint = torch_dist.open_checkpoint(source, step)
    hf = open_directory(reference, needs_weights=False)
    layout = export_layout(checkpoint, hf, mtp, text_only=text_only)
    model = exported_model(checkpoint, hf, layout)
    with one_process():
        export = plan_export(checkpoint, hf, layout, megatron_model(model))
        kept = [
            name
            for name in hf.tensors
            if (name.startswith(VISION) and not text_only) or (name.startswith(MTP) and mtp == "reference")
        ]
        taken = {name: hf.tensors[name].meta for name in kept}
        left = export.left_over(drops_mtp=mtp != "keep")
        out = export.expected | taken
        total = sum(tensor.nbytes for tensor in out.values())
        with directory_when_complete(target) as folder, progress_bar(console, "exporting", total) as advance:
            write_weights(folder, out, shard_bytes, lambda names: export.produce(names, advance))
            for file in hf.small_files():
                shutil.copyfile(file, folder / file.name)
            has_mtp, had_mtp = (any(name.startswith(MTP) for name in names) for names in (out, hf.tensors))
            config = exported_config(hf.config, text_only=text_only, has_mtp=has_mtp, had_mtp=had_mtp)
            if config != hf.config:
                (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return [
        *parts(export.expected, f"exported from {checkpoint.path}"),
        *parts(taken, "taken over unchanged from the reference"),
        *parts(
            {name: t.meta for name, t in hf.tensors.items() if _is_left_out(name, out)}, "of the reference; left out"
        ),
        *left,
    ]


def export_layout(checkpoint: torch_dist.Checkpoint, hf: HfDirectory, mtp: MtpChoice, *, text_only: bool) -> Layout:
    """The layout of what comes from the checkpoint, under the names that it is to have.

    Raises:
        ValueError: the checkpoint or the reference lacks what is asked for.
    """
    if EMBEDDING not in checkpoint.tensors:
        raise ValueError(f"{checkpoint.path} must hold {EMBEDDING}, got none")
    has_mtp = any(key.startswith(MTP) for key in checkpoint.tensors)
    names = [name for name in hf.tensors if not name.startswith((VISION, MTP))]
    of_mtp = [name for name in hf.tensors if name.startswith(MTP)]
    if mtp == "keep" and of_mtp and not has_mtp:
        raise ValueError(
            f"{checkpoint.path} must hold the multi-token prediction layer, which the reference has, got no {MTP}* in "
            "it. --mtp reference takes the reference's, --mtp drop goes on without"
        )
    if mtp == "reference" and not of_mtp:
        raise ValueError(f"{hf.path} must hold the multi-token prediction layer for --mtp reference, got no {MTP}*")
    if not names and "vision_config" in hf.config and not text_only:
        raise ValueError(
            f"{hf.path} must hold the weights of the vision tower, got config.json without weights. --text-only "
            "writes the language model alone"
        )
    changes: dict[str, Any] = {
        "padded_vocab_size": checkpoint.tensors[EMBEDDING].size[0],
        "has_mtp": has_mtp and mtp == "keep",
    }
    if text_only or "text_config" not in hf.config:
        changes["hf_prefix"] = _TEXT_PREFIX
    if not names:
        tied = ties_embeddings(hf.config)
        changes["ties_embeddings"] = "output_layer.weight" not in checkpoint.tensors if tied is None else tied
        return layout_from_hf(hf.config, of_mtp, **{"packs_mtp_experts": False} | changes)
    return layout_of(hf, [*names, *of_mtp], expects_mtp=False, **changes)


def exported_model(checkpoint: torch_dist.Checkpoint, hf: HfDirectory, layout: Layout) -> Model:
    """The model of the reference in the form in which the checkpoint was saved."""
    is_hybrid = "decoder.final_norm.weight" in checkpoint.tensors
    return replace(model_from_config(hf.config, layout), stack="hybrid" if is_hybrid else "gpt")


def plan_export(
    checkpoint: torch_dist.Checkpoint, hf: HfDirectory, layout: Layout, megatron: MegatronModel
) -> "Export":
    """What is to be read and written, checked against the checkpoint and the reference.

    Raises:
        ValueError: a tensor is missing or of another shape in one of the two.
    """
    table = model_rules(layout, megatron)
    pieces = {name: megatron.pieces(name, megatron.shape(name)) for rule in table for name in rule.megatron}
    for parameter in pieces.values():
        for piece in parameter:
            checkpoint.check(piece)
    export = Export(checkpoint, hf, layout, megatron, pieces, {name: rule for rule in table for name in rule.hf})
    shapes = expected_hf(table, megatron)
    if any(not name.startswith((VISION, MTP)) for name in hf.tensors):
        of_mtp = [name for name in shapes if name.startswith(MTP)]
        looked_at = {name for name in hf.tensors if not name.startswith((VISION, MTP))}
        looked_at |= {name for name in of_mtp if name in hf.tensors}
        same = {export.source_name(name): t for name, t in shapes.items() if name not in of_mtp or name in looked_at}
        check_shapes(hf, looked_at, same)
    export.expected.update({name: tensor.to(export.dtype(name)) for name, tensor in shapes.items()})
    return export


@dataclass(frozen=True)
class Export:
    """Reads parameters from a checkpoint and makes Hugging Face's tensors of them, in the reference's dtypes.

    `expected`: what comes out, as meta tensors, in the order of the rules.
    """

    checkpoint: torch_dist.Checkpoint
    hf: HfDirectory
    layout: Layout
    megatron: MegatronModel
    pieces: dict[str, list[ShardedTensor]]
    rule_of: dict[str, Rule]
    expected: Tensors = field(default_factory=dict)
    ready: Tensors = field(default_factory=dict)

    def source_name(self, name: str) -> str:
        """The reference's name for an exported tensor."""
        if "text_config" in self.hf.config and self.layout.hf_prefix == _TEXT_PREFIX and name.startswith(_TEXT_PREFIX):
            return _VISION_PREFIX + name.removeprefix(_TEXT_PREFIX)
        return name

    def dtype(self, name: str) -> torch.dtype:
        """The reference's dtype of a tensor; without weights, that of its config.json.

        Raises:
            ValueError: config.json names none that there is.
        """
        if (source := self.source_name(name)) in self.hf.tensors:
            return self.hf.tensors[source].dtype
        text = self.hf.config.get("text_config") or self.hf.config
        declared = text.get("dtype") or text.get("torch_dtype") or self.hf.config.get("dtype") or "bfloat16"
        if not isinstance(dtype := getattr(torch, declared, None), torch.dtype):
            raise ValueError(f"{self.hf.path / 'config.json'}: dtype must be one of torch's, got {declared!r}")
        return torch.float32 if name.endswith(_FLOAT32) else dtype

    def produce(self, names: Sequence[str], advance: Advance) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of `names`, which come in the order of the rules, then those of the reference."""
        for name in names:
            if name not in self.rule_of:
                tensor = self.hf.read(name)
            else:
                if name not in self.ready:
                    self.ready.update(self._converted(self.rule_of[name]))
                tensor = self.ready.pop(name).to(self.dtype(name))
            advance(tensor.nbytes)
            yield name, tensor

    def parameter(self, name: str) -> torch.Tensor:
        """Megatron's parameter `name`, whole, in the dtype in which it was saved."""
        return self.megatron.joined(name, self.checkpoint.read(self.pieces[name]))

    def _converted(self, rule: Rule) -> Tensors:
        stored = {name: self.parameter(name) for name in rule.megatron}
        made = rule.convert(stored, to_megatron=False)
        sources = [self.source_name(name) for name in rule.hf]
        if not rule.rounds or any(source not in self.hf.tensors for source in sources):
            return made
        # What rounding hides: where the reference's number imports to the stored one, it is the stored one.
        before = {name: self.hf.read(source) for name, source in zip(rule.hf, sources, strict=True)}
        again = rule.convert(before, to_megatron=True)
        [name], [parameter] = rule.hf, rule.megatron
        is_unchanged = again[parameter].to(stored[parameter].dtype) == stored[parameter]
        return {name: torch.where(is_unchanged, before[name].to(made[name].dtype), made[name])}

    def left_over(self, *, drops_mtp: bool) -> list[Part]:
        """The checkpoint's other tensors, which no model in Hugging Face's format has: the optimizer's.

        Raises:
            ValueError: there are tensors of a model among them that the reference's model does not have.
        """
        used = {piece.key for pieces in self.pieces.values() for piece in pieces}
        left = {key: entry for key, entry in self.checkpoint.tensors.items() if key not in used}
        more = [key for key in left if key.startswith(_MODEL_KEYS) and not (drops_mtp and key.startswith(MTP))]
        if more:
            raise ValueError(f"{self.checkpoint.path} must hold the reference's model, got {', '.join(more[:4])} too")
        sizes: dict[str, list[int]] = {}
        for key, entry in left.items():
            what = "MTP layer" if key.startswith(MTP) else f"{key.split('.')[0]} state"
            sizes.setdefault(what, []).append(entry.size.numel() * entry.properties.dtype.itemsize)
        return [Part(what, len(found), sum(found), "of the checkpoint; left out") for what, found in sizes.items()]


def _is_left_out(name: str, out: Tensors) -> bool:
    return name.startswith((VISION, MTP)) and name not in out


def exported_config(config: dict[str, Any], *, text_only: bool, has_mtp: bool, had_mtp: bool) -> dict[str, Any]:
    """config.json of what is written: the reference's, or its text_config, with the MTP layer that is there now."""
    text = dict(config.get("text_config") or config)
    if (declares_mtp(config) and not has_mtp) or (has_mtp and not had_mtp):
        text["mtp_num_hidden_layers"] = int(has_mtp)
    if "text_config" not in config:
        return text
    if not text_only:
        return config | {"text_config": text}
    family = "Qwen3_5Moe" if text.get("num_experts") else "Qwen3_5"
    tied = ties_embeddings(config)
    return text | {"architectures": [f"{family}ForCausalLM"]} | ({} if tied is None else {"tie_word_embeddings": tied})
