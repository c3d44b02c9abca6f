"""Whole documents of a Megatron `.bin/.idx` dataset, packed into sequences with aligned document boundaries.

Every document is rounded up to a multiple of `align`, and the documents of an epoch, in a shuffled order, form one
virtual stream of token slots. Sample w of the epoch is the window `[w S, (w + 1) S)` of that stream. As S is a
multiple of `align`, so is every piece of every sample: whatever needs aligned pieces (context parallelism splits each
of them into 2 CP chunks, the kernels work in chunks of 64) gets them without a second pass over the data, and nothing
is stored that could be stale when the alignment changes. A document that crosses a window's end goes on in another
sample, as a document of its own: attention and recurrent state start anew there.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split

CHUNK = 64
"""Tokens in a chunk of the gated delta rule: aligned documents leave no partly filled chunk."""


def packing_alignment(
    context_parallel: int = 1, tensor_parallel: int = 1, *, sequence_parallel: bool = False, chunk: int = CHUNK
) -> int:
    """The number of tokens that every document of a pack is rounded up to.

    Context parallelism cuts each document into 2 CP chunks; sequence parallelism cuts the sequence into TP parts.

    Raises:
        ValueError: a size is below 1.
    """
    sizes = {"context_parallel": context_parallel, "tensor_parallel": tensor_parallel, "chunk": chunk}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    return math.lcm(
        2 * context_parallel if context_parallel > 1 else 1, tensor_parallel if sequence_parallel else 1, chunk
    )


def check_alignment(sequence_length: int, align: int) -> None:
    """Raise ValueError unless `align` is at least 1 and divides `sequence_length`."""
    if align < 1:
        raise ValueError(f"align must be at least 1, got {align}")
    if sequence_length < 1 or sequence_length % align:
        raise ValueError(f"sequence_length must be a positive multiple of align={align}, got {sequence_length}")


@dataclass
class PackedDatasetConfig(GPTDatasetConfig):
    """Megatron's GPTDatasetConfig, `align`, and the model's `vocab_size`: a token beyond it is an error, since
    tensor-parallel embeddings would take it for zeros (None: not looked at). The three switches on masks that Megatron
    insists on have their only sensible value here.

    Raises:
        ValueError: `sequence_length` is not a multiple of `align`.
        NotImplementedError: a dense attention mask, or one of the two ways to skip reading the index, is asked for.
    """

    reset_position_ids: bool | None = False
    reset_attention_mask: bool | None = False
    eod_mask_loss: bool | None = False
    create_attention_mask: bool = False
    inter_document_masking: bool = True
    align: int = CHUNK
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_alignment(self.sequence_length, self.align)
        for name in ("create_attention_mask", "fast_cache_load", "defer_npy_index_mmap"):
            if getattr(self, name):
                raise NotImplementedError(
                    f"{name}=True does not go with packing: cu_seqlens takes a mask's place, and "
                    "nothing is cached on disk; set it to False"
                )


class Epoch(NamedTuple):
    """The order of one epoch: documents, where each one's slots end in the virtual stream, and windows."""

    order: np.ndarray
    ends: np.ndarray
    windows: np.ndarray


class PackedDataset(MegatronDataset):
    """Packed sequences for Megatron's BlendedMegatronDatasetBuilder.

    A sample is a dict: `tokens`, `labels`, `position_ids` [S] int64 and `loss_mask` [S] float32, with `labels[t]` the
    token after `tokens[t]` and loss_mask 0 on padding and on the last token of a document, which predicts nothing;
    `position_ids` start at 0 in each piece. `cu_seqlens` and `cu_seqlens_padded`, both [S / align + 1] int32 and
    equal (padding belongs to the document before it, where causality makes it harmless), hold the offsets of the
    pieces and are filled up with S, so that samples collate. `max_seqlen` [] int32 is the longest piece.

    An epoch takes every document once, and ends with one window filled up with padding (in pieces of `align`). Order
    is a function of (seed, epoch) and of the index alone: sample i is the same in every process and after every
    restart. Documents of one token or none have nothing to predict and are left out.

    Memory, a process: 8 bytes a document, and for each of the two epochs read last, built when its first sample is
    read, 12 more and 8 a sample (0.3 s for a million documents). Jumping between more epochs builds them each time, so
    read samples in order, as Megatron's dataloader type "single" does.

    Args:
        dataset: the documents, one a sequence.
        dataset_path: its prefix, for messages and Megatron's caches.
        indices: the documents to use; the split.
        num_samples: how many samples are needed at least; None means one epoch.
        index_split: which split this is.
        config: a PackedDatasetConfig.

    Raises:
        TypeError: `config` has no `align`.
        ValueError: the documents do not fill one sequence.
    """

    config: PackedDatasetConfig

    def __init__(
        self,
        dataset: IndexedDataset,
        dataset_path: str | None,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: PackedDatasetConfig,
    ) -> None:
        if not isinstance(config, PackedDatasetConfig):
            raise TypeError(f"config must be a PackedDatasetConfig, got {type(config).__name__}")
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        lengths = dataset.sequence_lengths[indices]
        useful = lengths >= 2
        self.documents = np.asarray(indices)[useful]
        self.lengths = lengths[useful]
        self.slots = int(padded_lengths(self.lengths, config.align).sum())
        self.samples_per_epoch = -(-self.slots // config.sequence_length)
        if self.slots < config.sequence_length and num_samples != 0:
            raise ValueError(
                f"the {index_split.name} split of {dataset_path} must fill one sequence of "
                f"{config.sequence_length} tokens, got {self.slots} slots ({len(lengths)} documents, "
                f"{int(self.lengths.sum())} tokens); give it more documents or a shorter sequence_length"
            )
        epochs = 1 if num_samples is None else -(-num_samples // self.samples_per_epoch) if num_samples else 0
        self.size = epochs * self.samples_per_epoch
        self._built: dict[int, Epoch] = {}

    numel_low_level_dataset = staticmethod(GPTDataset.numel_low_level_dataset)
    build_low_level_dataset = staticmethod(GPTDataset.build_low_level_dataset)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*MegatronDataset._key_config_attributes(), "align"]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Sample `idx`; None gives a sample of the right form whose loss is masked everywhere, as Megatron's batch
        padding.

        Raises:
            IndexError: `idx` is outside `[0, len(self))`.
            ValueError: a token id is not in the model's vocabulary.
        """
        epoch, position = divmod(self._checked(0 if idx is None else idx), self.samples_per_epoch)
        sample = self._window(self.epoch(epoch), position)
        if idx is None:
            sample["loss_mask"].zero_()
        return sample

    def _checked(self, idx: int) -> int:
        if not 0 <= int(idx) < self.size:
            raise IndexError(f"idx must be in [0, {self.size}), got {idx}")
        return int(idx)

    def epoch(self, number: int) -> Epoch:
        """The order of epoch `number`. The last two are kept: a step's samples may lie in both."""
        if number not in self._built:
            # RandomState's streams are frozen by numpy's policy; the newer Generator's may change between versions.
            random = np.random.RandomState([self.config.random_seed, number])
            order = random.permutation(len(self.documents)).astype(np.int32)
            ends = np.cumsum(padded_lengths(self.lengths[order], self.config.align))
            self._built = dict(list(self._built.items())[-1:])
            self._built[number] = Epoch(order, ends, random.permutation(self.samples_per_epoch))
        return self._built[number]

    def document_lengths(self, idx: int) -> np.ndarray:
        """Lengths of the pieces of sample `idx`, padding included, int64: the differences of its `cu_seqlens`, without
        reading tokens."""
        number, position = divmod(self._checked(idx), self.samples_per_epoch)
        epoch, S = self.epoch(number), self.config.sequence_length
        begin = int(epoch.windows[position]) * S
        first, last = np.searchsorted(epoch.ends, [begin, begin + S], side="right")
        offsets = epoch.ends[first:last] - begin
        left = S - (int(offsets[-1]) if last > first else 0)
        if begin + S > epoch.ends[-1]:  # the filling at the end of the epoch
            rest = np.full(left // self.config.align, self.config.align)
        else:
            rest = np.full(min(left, 1), left)
        return np.concatenate([np.diff(offsets, prepend=0), rest])

    def _window(self, epoch: Epoch, position: int) -> dict[str, torch.Tensor]:
        S, align = self.config.sequence_length, self.config.align
        tokens, labels, positions = (np.zeros(S, np.int64) for _ in range(3))
        loss_mask = np.zeros(S, np.float32)
        begin = int(epoch.windows[position]) * S
        offsets, longest = [0], 0
        k = int(np.searchsorted(epoch.ends, begin, side="right"))
        while offsets[-1] < S and k < len(epoch.ends):
            left, right = offsets[-1], min(S, int(epoch.ends[k]) - begin)
            document_begin = int(epoch.ends[k - 1]) if k else 0
            piece = self._tokens(int(epoch.order[k]), begin + left - document_begin, right - left + 1)
            real = min(len(piece), right - left)
            tokens[left : left + real] = piece[:real]
            labels[left : left + len(piece) - 1] = piece[1:]
            loss_mask[left : left + len(piece) - 1] = 1
            positions[left:right] = np.arange(right - left)
            longest = max(longest, right - left)
            offsets.append(right)
            k += 1
        for left in range(offsets[-1], S, align):
            positions[left : left + align] = np.arange(align)
            offsets.append(left + align)
        cu_seqlens = np.full(S // align + 1, S, np.int32)
        cu_seqlens[: len(offsets)] = offsets
        arrays = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": positions}
        arrays |= {"cu_seqlens": cu_seqlens, "cu_seqlens_padded": cu_seqlens.copy()}
        sample = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return sample | {"max_seqlen": torch.tensor(longest, dtype=torch.int32)}

    def _tokens(self, k: int, offset: int, count: int) -> np.ndarray:
        """Up to `count` tokens of the k-th document from `offset` on, fewer at its end."""
        count = min(count, int(self.lengths[k]) - offset)
        tokens = self.dataset.get(int(self.documents[k]), offset=offset, length=count)
        limit = self.config.vocab_size
        if limit is not None and len(tokens) and not 0 <= tokens.min() <= tokens.max() < limit:
            raise ValueError(
                f"token ids of {self.dataset_path} must be in [0, vocab_size={limit}), got {tokens.min()} to "
                f"{tokens.max()} in document {self.documents[k]}: was it made with another tokenizer?"
            )
        return tokens


def padded_lengths(lengths: np.ndarray, align: int) -> np.ndarray:
    """`lengths` rounded up to multiples of `align`, int64."""
    return -(-lengths.astype(np.int64) // align) * align


def packing_statistics(lengths: np.ndarray, sequence_length: int, align: int) -> dict[str, Any]:
    """What packing documents of these `lengths` [N] gives: samples an epoch, fill, loss share, pieces a sample.

    `fill` is the share of slots that hold a token, `loss_share` the share that has a loss. Pieces are counted in the
    order of the file; a shuffled order changes them a little.

    Raises:
        ValueError: `sequence_length` is not a multiple of `align`, or no document has two tokens.
    """
    check_alignment(sequence_length, align)
    useful = lengths[lengths >= 2]
    if not len(useful):
        raise ValueError(f"lengths must hold a document of two tokens or more, got {len(lengths)} shorter ones")
    ends = np.cumsum(padded_lengths(useful, align))
    samples = -(-int(ends[-1]) // sequence_length)
    slots = samples * sequence_length
    cuts = np.setdiff1d(np.arange(1, samples) * sequence_length, ends)
    return {
        "documents": len(lengths),
        "too_short": len(lengths) - len(useful),
        "tokens": int(lengths.sum()),
        "samples": samples,
        "fill": float(useful.sum() / slots),
        "loss_share": float((useful - 1).sum() / slots),
        "pieces_per_sample": (len(useful) + len(cuts)) / samples,
    }
