"""Megatron's distributed checkpoints (torch_dist), tensor by tensor and in one process.

The format is torch.distributed.checkpoint's: files of pickled chunks, and `.metadata` with each tensor's global shape
and the place of its chunks. Megatron 0.19 adds metadata.json and one object, common_state
(megatron/core/dist_checkpointing). Writing and reading go through torch's own storage classes.
"""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

TRACKER = "latest_checkpointed_iteration.txt"
FILE_BYTES = 2 << 30  # a new file is begun after so many: torch's writer holds on to what it has written of a file
RELEASE = "release"  # Megatron's name for weights without a run: it starts at step 0, without optimizer state

Place = tuple[str, torch.Size]
"""A tensor's key and an offset in it."""


def place(piece: ShardedTensor) -> Place:
    """Where `piece` lies."""
    return piece.key, torch.Size(piece.global_offset)


def chunk_sizes(piece: ShardedTensor) -> torch.Size:
    """The piece's shape with all of the global tensor's dimensions."""
    return torch.Size((1,) * piece.prepend_axis_num + tuple(piece.local_shape))


# --- writing ---


def write(
    folder: Path,
    steps: Sequence[Sequence[ShardedTensor]],
    produce: Callable[[int], Iterable[ShardedTensor]],
    objects: Iterable[ShardedObject],
    common: Mapping[str, Any],
) -> None:
    """Write a checkpoint for Megatron's `--load`: `folder`/release and the file that names it.

    Args:
        folder: an existing one.
        steps: what there will be, over meta tensors; the tensors of one step come together.
        produce: step number -> the same pieces with their values. Called once a step, in order.
        objects, common: see MegatronModel.
    """
    release = folder / RELEASE
    release.mkdir()
    writer = FileSystemWriter(release)
    planner = _Producer(steps, produce, [*objects, ShardedObject("common_state", dict(common), (1,), (0,))])
    plans, metadata = create_default_global_save_plan(planner.plans(FILE_BYTES))
    plans = writer.prepare_global_plan(plans)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, [writer.write_data(plan, planner).wait() for plan in plans])
    strategy = TorchDistSaveShardedStrategy()
    save_config(CheckpointingConfig(strategy.backend, strategy.version), str(release))
    (folder / TRACKER).write_text(RELEASE, encoding="utf-8")


class _Producer(DefaultSavePlanner):
    """Makes the values of one step when the first of them is to be written, and lets them go with the last."""

    def __init__(
        self,
        steps: Sequence[Sequence[ShardedTensor]],
        produce: Callable[[int], Iterable[ShardedTensor]],
        objects: Sequence[ShardedObject],
    ) -> None:
        super().__init__()
        self.steps, self.produce = steps, produce
        self.objects = {entry.unique_key: entry for entry in objects}
        self.step_of = {place(piece): number for number, step in enumerate(steps) for piece in step}
        self.ready: dict[Place, ShardedTensor] = {}

    def plans(self, file_bytes: int) -> list[SavePlan]:
        """One plan a file."""
        files = [[WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.objects]]
        room = file_bytes
        for step in self.steps:
            if room <= 0:
                files.append([])
                room = file_bytes
            files[-1] += [_write_item(piece) for piece in step]
            room -= sum(piece.data.nbytes for piece in step)
        return [SavePlan(items) for items in files]

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The values of an item, for the writer."""
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save([self.objects[index.fqn].data], stream)
            return stream
        assert index.offset is not None
        where = (index.fqn, index.offset)
        if where not in self.ready:
            self.ready = {place(piece): piece for piece in self.produce(self.step_of[where])}
        piece = self.ready.pop(where)
        return piece.data.reshape(chunk_sizes(piece))


def _write_item(piece: ShardedTensor) -> WriteItem:
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(torch.Size(piece.global_offset), chunk_sizes(piece)),
        properties=TensorProperties(dtype=piece.dtype),
        size=torch.Size(piece.global_shape),
    )
    return WriteItem(MetadataIndex(*place(piece)), WriteItemType.SHARD, tensor_data=data)


# --- reading ---


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose metadata has been read and whose files have been looked at.

    `tensors`: shape, dtype and chunks of each by its key.
    """

    path: Path
    tensors: dict[str, TensorStorageMetadata]
    reader: FileSystemReader

    def read(self, pieces: Sequence[ShardedTensor]) -> list[torch.Tensor]:
        """The values of `pieces`, from whatever chunks they were saved in, in the dtype in which they were saved.

        Raises:
            ValueError: a key is missing, has another shape, or not all of it is there.
        """
        result, items = {}, []
        for piece in pieces:
            self.check(piece)
            stored = self.tensors[piece.key]
            result[place(piece)] = torch.empty(chunk_sizes(piece), dtype=stored.properties.dtype)
            chunk = ChunkStorageMetadata(torch.Size(piece.global_offset), chunk_sizes(piece))
            reads = create_read_items_for_chunk_list(piece.key, stored, [chunk])
            if sum(item.lengths.numel() for item in reads) != chunk.sizes.numel():
                raise ValueError(f"{self.path}: {piece.key} must be whole, got chunks that leave out a part of it")
            items += reads
        try:
            self.reader.read_data(LoadPlan(items), _Receiver(result)).wait()
        except Exception as error:
            keys = ", ".join(sorted({piece.key for piece in pieces}))
            raise ValueError(f"{self.path}: {keys} cannot be read: {error}") from error
        return [result[place(piece)].reshape(piece.local_shape) for piece in pieces]

    def check(self, piece: ShardedTensor) -> None:
        """Refuse a piece that is not there in its shape.

        Raises:
            ValueError: names the key, the shape that was expected and the one that is there.
        """
        if piece.key not in self.tensors:
            raise ValueError(f"{self.path} must hold {piece.key}, got none")
        if (size := self.tensors[piece.key].size) != torch.Size(piece.global_shape):
            raise ValueError(f"{self.path}: {piece.key} must have shape {tuple(piece.global_shape)}, got {tuple(size)}")


def open_checkpoint(path: Path, step: int | None = None) -> Checkpoint:
    """A checkpoint by its folder of checkpoints (the latest one, or that of `step`) or by its own folder.

    Raises:
        ValueError: there is none, or a file is missing or truncated.
    """
    folder = _checkpoint_folder(path, step)
    if not (folder / ".metadata").is_file():
        raise ValueError(f"{folder} must be a torch_dist checkpoint, got no .metadata in it: it was never completed")
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, size in needed.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{folder} must hold {name} according to .metadata, got none")
        if file.stat().st_size < size:
            raise ValueError(f"{file} must have {size} bytes according to .metadata, got {file.stat().st_size}")
    entries = metadata.state_dict_metadata.items()
    tensors = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
    return Checkpoint(folder, tensors, reader)


def _checkpoint_folder(path: Path, step: int | None) -> Path:
    if (path / ".metadata").is_file() and step is None:
        return path
    tracker = path / TRACKER
    if step is not None:
        folder = path / f"iter_{step:07d}"
    elif tracker.is_file():
        latest = tracker.read_text(encoding="utf-8").strip()
        folder = path / (latest if latest == RELEASE else f"iter_{int(latest):07d}")
    else:
        raise ValueError(f"{path} must be a folder of Megatron checkpoints, got no {TRACKER} in it")
    if not folder.is_dir():
        there = ", ".join(sorted(found.name for found in path.glob("iter_*"))) or "none"
        raise ValueError(f"{folder} must be a checkpoint, got no such folder; there are {there}")
    return folder


class _Receiver(DefaultLoadPlanner):
    """Hands the reader the places where values go."""

    def __init__(self, result: dict[Place, torch.Tensor]) -> None:
        super().__init__()
        self.result = result

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of a result that an item fills."""
        assert read_item.dest_index.offset is not None
        target = self.result[read_item.dest_index.fqn, read_item.dest_index.offset]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is left to do."""
