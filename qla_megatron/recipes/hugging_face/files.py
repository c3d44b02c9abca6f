"""A directory in Hugging Face's format: config.json, safetensors shards and their index."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_FILES_KEPT_OPEN = 4  # a rule's tensors lie in one or two; pages of files that are closed are free again
# What a model's directory holds beside its weights: configurations, tokenizer, chat template, processors.
_SMALL_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken")


@dataclass(frozen=True)
class Stored:
    """What a shard's header says of a tensor."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def meta(self) -> torch.Tensor:
        """A tensor of this shape and dtype without data."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class HfDirectory:
    """A model's directory. Headers are read and checked when it is opened, tensors when they are asked for."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Stored]
    _open_files: dict[Path, Any] = field(default_factory=dict)

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`, mapped from its file.

        Raises:
            ValueError: the file cannot be read.
        """
        file = self.tensors[name].file
        try:
            if file not in self._open_files:
                while len(self._open_files) >= _FILES_KEPT_OPEN:
                    self._open_files.pop(next(iter(self._open_files)))
                self._open_files[file] = safe_open(file, framework="pt")
            return self._open_files[file].get_tensor(name)
        except Exception as error:  # safetensors has one type for all faults, and it is no ValueError
            raise ValueError(f"{file}: {name} cannot be read: {error}") from error

    def small_files(self) -> list[Path]:
        """The files beside the weights that belong to a model: config.json, the tokenizer's and processors' files."""
        return [
            file
            for file in sorted(self.path.iterdir())
            if file.suffix in _SMALL_FILES and file.is_file() and not file.name.endswith(".index.json")
        ]


def open_directory(path: Path, *, needs_weights: bool = True) -> HfDirectory:
    """The directory `path`; without weights only if `needs_weights` is False.

    Raises:
        ValueError: config.json, the index or a shard is missing, damaged or truncated, or they contradict each other;
            the text names the file, what was expected and what is there.
    """
    if not path.is_dir():
        raise ValueError(f"{path} must be a Hugging Face directory (config.json and safetensors), got no directory")
    config = _read_json(path / "config.json")
    index = path / INDEX
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} must hold a weight_map from tensors to files, got none")
        tensors = _indexed_tensors(path, index, weight_map)
    elif (path / SINGLE).is_file():
        tensors = read_header(path / SINGLE)
    elif needs_weights:
        raise ValueError(f"{path} must hold {INDEX} or {SINGLE}, got neither")
    else:
        tensors = {}
    return HfDirectory(path, config, tensors)


def _indexed_tensors(path: Path, index: Path, weight_map: Mapping[str, str]) -> dict[str, Stored]:
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{index}: files must lie beside the index, got {outside[0]!r}")
    if absent := [name for name in names if not (path / name).is_file()]:
        raise ValueError(f"{path} must hold the {len(names)} shards of {INDEX}, got none called {', '.join(absent)}")
    found: dict[str, Stored] = {}
    for name in names:
        here = read_header(path / name)
        listed = {tensor for tensor, file in weight_map.items() if file == name}
        if lost := sorted(listed - here.keys()):
            raise ValueError(f"{path / name} must hold {lost[0]} according to {INDEX}, got {len(here)} others")
        if unlisted := sorted(here.keys() - listed):
            raise ValueError(f"{path / name} must hold only what {INDEX} lists there, got {unlisted[0]} too")
        found |= here
    return {name: found[name] for name in weight_map}


def read_header(file: Path) -> dict[str, Stored]:
    """What a safetensors file holds, from its header.

    Format: 8 bytes, the header's length; the header in JSON, with [begin, end) of each tensor's bytes in what follows
    (https://github.com/huggingface/safetensors, README).

    Raises:
        ValueError: this is no such file, its length is not what the header says, or a dtype is unknown.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length) if length <= size else b""
    if size < 8 + length:
        raise ValueError(f"{file} must have at least {8 + length} bytes, a header's length and the header, got {size}")
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        tensors = {name: Stored(file, _DTYPES[entry["dtype"]], tuple(entry["shape"])) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} must be a safetensors file, got a header that cannot be read: {error!r}") from error
    if size != expected:
        kind = "it is truncated" if size < expected else "there is more behind its tensors"
        raise ValueError(f"{file} must have {expected} bytes according to its header, got {size}: {kind}")
    return tensors


def write_weights(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    limit: int,
    produce: Callable[[Sequence[str]], Iterator[tuple[str, torch.Tensor]]],
) -> None:
    """Write shards and index into `folder`, one shard in memory at a time.

    Args:
        folder: an existing one.
        tensors: shape and dtype of every tensor by name, as meta tensors, in the order of writing.
        limit: bytes of a shard; a larger tensor is a shard of its own.
        produce: the tensors of the given names, in their order.
    """
    shards = _shards(tensors, limit)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: _own_storage(tensor) for name, tensor in produce(names)}, folder / file, {"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors lets nobody else read it
        weight_map |= dict.fromkeys(names, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _shards(tensors: Mapping[str, torch.Tensor], limit: int) -> list[list[str]]:
    shards: list[list[str]] = []
    room = -1
    for name, tensor in tensors.items():
        if tensor.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= tensor.nbytes
    return shards


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory of its own: safetensors refuses to write views of one memory."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file.parent} must hold {file.name}, got none")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} must be JSON, got: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content


@contextlib.contextmanager
def directory_when_complete(path: Path) -> Iterator[Path]:
    """A new directory beside `path`, which becomes `path` at the end of the block, or is removed if that raises.

    Raises:
        ValueError: `path` exists and is no empty directory.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path} must not exist yet or be an empty directory: nothing is overwritten")
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        yield partial
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial)
        raise
