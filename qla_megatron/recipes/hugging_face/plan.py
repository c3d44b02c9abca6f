"""What import and export share: the rules of a model checked against what Megatron builds, progress, the report."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from qla_megatron.layers.hf_weights import Layout, Rule, rules
from qla_megatron.recipes.hugging_face.files import HfDirectory
from qla_megatron.recipes.hugging_face.model import MegatronModel

VISION = "model.visual."
MTP = "mtp."
EMBEDDING = "embedding.word_embeddings.weight"

MtpChoice = Literal["keep", "reference", "drop"]
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Part:
    """A line of a report: some of the tensors, their bytes, and what became of them."""

    what: str
    tensors: int
    nbytes: int
    fate: str


def parts(tensors: Mapping[str, torch.Tensor], fate: str) -> list[Part]:
    """The report's lines for these tensors (meta tensors will do): text model, multi-token prediction, vision."""
    groups: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        what = "vision tower" if name.startswith(VISION) else "MTP layer" if name.startswith(MTP) else "language model"
        groups.setdefault(what, []).append(tensor.nbytes)
    return [Part(what, len(sizes), sum(sizes), fate) for what, sizes in groups.items()]


def ties_embeddings(config: Mapping[str, Any]) -> bool | None:
    """Whether config.json says that the output layer is the embedding; None: it does not say.

    Models with vision say it at the top; their text_config may hold a class's default instead.
    """
    return config.get("tie_word_embeddings")


def declares_mtp(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that there is a multi-token prediction layer."""
    return bool((config.get("text_config") or config).get("mtp_num_hidden_layers", 0))


def model_rules(layout: Layout, megatron: MegatronModel) -> list[Rule]:
    """The rules of a model, which explain every parameter that Megatron has."""
    table = list(rules(layout))
    explained = {name for rule in table for name in rule.megatron}
    assert explained == megatron.parameters.keys(), sorted(explained ^ megatron.parameters.keys())
    return table


def expected_hf(table: Iterable[Rule], megatron: MegatronModel) -> dict[str, torch.Tensor]:
    """Hugging Face's tensors as meta tensors: names and shapes that fit Megatron's."""
    return {
        name: tensor
        for rule in table
        for name, tensor in rule.convert(
            {parameter: megatron.shape(parameter) for parameter in rule.megatron}, to_megatron=False
        ).items()
    }


def check_shapes(hf: HfDirectory, names: Iterable[str], expected: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that are not exactly `expected`.

    Args:
        hf: the directory.
        names: those of its tensors that are looked at.
        expected: the model's, under their names in the directory.

    Raises:
        ValueError: one is missing, of another shape or no plain floating-point tensor, or there are others.
    """
    names = set(names)
    if missing := [name for name in expected if name not in names]:
        raise ValueError(f"{hf.path} must hold {_several(missing)}, got none")
    if more := [name for name in hf.tensors if name in names and name not in expected]:
        raise ValueError(f"{hf.path} must hold the tensors of the model in its config.json, got {_several(more)} too")
    for name, tensor in expected.items():
        stored = hf.tensors[name]
        if stored.shape != tuple(tensor.shape):
            raise ValueError(f"{stored.file}: {name} must have shape {tuple(tensor.shape)}, got {stored.shape}")
        if not stored.dtype.is_floating_point or stored.dtype.itemsize == 1:
            raise ValueError(f"{stored.file}: {name} must be bfloat16, float16 or float32, got {stored.dtype}")


def _several(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@contextlib.contextmanager
def progress_bar(console: Console, what: str, total: int) -> Iterator[Advance]:
    """A bar over `total` bytes, on terminals; the block calls what it gets with every number of bytes done."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)
