"""A Hugging Face directory -> a Megatron checkpoint that any parallel layout loads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from rich.console import Console

from qla_megatron.layers.hf_weights import Layout, Rule, layout_from_hf
from qla_megatron.recipes.hugging_face import torch_dist
from qla_megatron.recipes.hugging_face.files import HfDirectory, directory_when_complete, open_directory
from qla_megatron.recipes.hugging_face.model import (
    check_is,
    known_names,
    megatron_model,
    model_from_config,
    one_process,
)
from qla_megatron.recipes.hugging_face.plan import (
    MTP,
    VISION,
    Part,
    check_shapes,
    declares_mtp,
    expected_hf,
    model_rules,
    parts,
    progress_bar,
    ties_embeddings,
)


def import_checkpoint(
    source: Path,
    target: Path,
    console: Console,
    *,
    name: str | None = None,
    mtp: Literal["keep", "drop"] = "keep",
    stack: Literal["gpt", "hybrid"] = "gpt",
    padded_vocab_size: int | None = None,
) -> list[Part]:
    """Write the Hugging Face directory `source` as the Megatron checkpoint `target`, for a recipe's `checkpoint.load`.

    One rule's tensors are in memory at a time. They keep the dtype of their file, except that the output norms of GDN
    layers become float32 (layers/hf_weights.py).

    Args:
        source: config.json and safetensors.
        target: must not exist yet; it appears when it is complete.
        console: for the progress bar.
        name: of the released model that `source` must be; None: any.
        mtp: "drop" leaves the multi-token prediction layer out.
        stack: Megatron's model class, model.stack of the recipe.
        padded_vocab_size: rows of Megatron's embedding, model.padded_vocab_size of the recipe; None: as in `source`.

    Raises:
        ValueError: something is missing, truncated, of another shape, or there is more than the model explains.
        NotImplementedError: the model is none that a recipe can describe.
    """
    hf = open_directory(source)
    skipped = (VISION, MTP) if mtp == "drop" else (VISION,)
    names = [tensor for tensor in hf.tensors if not tensor.startswith(skipped)]
    changes = {} if padded_vocab_size is None else {"padded_vocab_size": padded_vocab_size}
    layout = layout_of(hf, names, expects_mtp=mtp == "keep", **changes)
    model = replace(model_from_config(hf.config, layout), stack=stack)
    if name is not None:
        check_is(model, name)
    with one_process():
        megatron = megatron_model(model)
        table = model_rules(layout, megatron)
        check_shapes(hf, names, expected_hf(table, megatron))

        def pieces(rule: Rule, tensors: Mapping[str, torch.Tensor]) -> list[ShardedTensor]:
            converted = rule.convert(tensors, to_megatron=True)
            return [piece for parameter, data in converted.items() for piece in megatron.pieces(parameter, data)]

        steps = [pieces(rule, {tensor: hf.tensors[tensor].meta for tensor in rule.hf}) for rule in table]
        total = sum(piece.data.nbytes for step in steps for piece in step)
        with directory_when_complete(target) as folder, progress_bar(console, "importing", total) as advance:

            def produce(number: int) -> list[ShardedTensor]:
                made = pieces(table[number], {tensor: hf.read(tensor) for tensor in table[number].hf})
                advance(sum(piece.data.nbytes for piece in made))
                return made

            torch_dist.write(folder, steps, produce, megatron.objects, megatron.common)
    known = " or ".join(known_names(model)) or "not one of the released sizes"
    return [
        *parts({tensor: hf.tensors[tensor].meta for tensor in names}, f"imported; {known}"),
        *parts({tensor: t.meta for tensor, t in hf.tensors.items() if tensor.startswith(skipped)}, "skipped"),
    ]


def layout_of(hf: HfDirectory, names: Sequence[str], *, expects_mtp: bool, **changes: Any) -> Layout:
    """The layout of a directory whose tensors say what config.json says.

    Args:
        hf: the directory.
        names: those of its tensors that count.
        expects_mtp: a multi-token prediction layer that config.json names has to be there.
        changes: fields of Layout to set.

    Raises:
        ValueError: the output layer or the multi-token prediction layer is missing, or a field of config.json.
    """
    if ties_embeddings(hf.config) is False and "lm_head.weight" not in names:
        raise ValueError(f"{hf.path} must hold lm_head.weight (tie_word_embeddings is false), got none")
    if expects_mtp and declares_mtp(hf.config) and not any(name.startswith(MTP) for name in names):
        raise ValueError(
            f"{hf.path} must hold the multi-token prediction layer that config.json names (mtp_num_hidden_layers), "
            "got no tensor mtp.*. --mtp drop goes on without it"
        )
    return layout_from_hf(hf.config, names, **changes)
