"""PackedDataset: what every sample must hold, by comparison with the documents themselves."""

import contextlib
import itertools
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers import MegatronTokenizer

from qla_megatron.data.packed import PackedDataset, PackedDatasetConfig, packing_alignment, packing_statistics

STEP = 10_000  # document d holds the tokens d * STEP + 1, d * STEP + 2, ...: 0 is padding and every token is unique
TOKENIZER = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=1_000_000)

# lengths around the alignment; nothing and one token; several sequences long; a multiple of the sequence
LENGTHS = [63, 64, 65, 0, 1, 2, 127, 128, 129, 1000, 1, 512, 7, 300, 2048, 5]
GRID = [
    (256, 64, LENGTHS),
    (512, 64, LENGTHS),
    (64, 64, LENGTHS),
    (192, 24, LENGTHS),
    (256, 1, LENGTHS),
    (64, 64, [64]),
]


def documents_of(lengths: list[int], first: int = 1) -> list[np.ndarray]:
    return [np.arange(1, n + 1) + STEP * d for d, n in enumerate(lengths, start=first)]


def write(prefix: Path, documents: list[np.ndarray]) -> str:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def config_of(sequence_length: int, align: int, **changes: object) -> PackedDatasetConfig:
    settings = {"random_seed": 5, "blend": (["unused"], None), "split": "1", "tokenizer": TOKENIZER} | changes
    return PackedDatasetConfig(sequence_length=sequence_length, align=align, **settings)


def dataset_of(
    prefix: str, sequence_length: int, align: int, samples: int | None = None, seed: int = 5
) -> PackedDataset:
    low = IndexedDataset(prefix)
    config = config_of(sequence_length, align, random_seed=seed)
    return PackedDataset(low, prefix, np.arange(len(low), dtype=np.int32), samples, Split.train, config)


def pieces_of(sample: dict[str, torch.Tensor]) -> list[tuple[int, int]]:
    return [(a, b) for a, b in itertools.pairwise(sample["cu_seqlens"].tolist()) if a < b]


@pytest.mark.parametrize(("sequence_length", "align", "lengths"), GRID)
def test_every_piece_is_one_document_with_its_labels(
    tmp_path: Path, sequence_length: int, align: int, lengths: list[int]
) -> None:
    dataset = dataset_of(write(tmp_path / "d", documents_of(lengths)), sequence_length, align)
    for i in range(len(dataset)):
        sample = dataset[i]
        offsets = sample["cu_seqlens"]
        assert offsets[0] == 0
        assert offsets[-1] == sequence_length
        assert (offsets % align == 0).all()
        assert (offsets.diff() >= 0).all()
        assert torch.equal(offsets, sample["cu_seqlens_padded"])
        longest = 0
        for a, b in pieces_of(sample):
            tokens, labels, mask = (sample[name][a:b].tolist() for name in ("tokens", "labels", "loss_mask"))
            real = [t for t in tokens if t]
            assert tokens == real + [0] * (b - a - len(real)), "padding only at the end of a piece"
            assert sample["position_ids"][a:b].tolist() == list(range(b - a))
            if not real:
                assert mask == [0] * (b - a)
                continue
            longest = max(longest, b - a)
            assert real == list(range(real[0], real[0] + len(real))), "one document, in order"
            document_end = lengths[real[0] // STEP - 1] + STEP * (real[0] // STEP)
            for token, label, weight in zip(real, labels, mask, strict=False):
                assert (label, weight) == ((0, 0) if token == document_end else (token + 1, 1))
            assert mask[len(real) :] == [0] * (b - a - len(real))
        assert sample["max_seqlen"] == longest


@pytest.mark.parametrize(("sequence_length", "align", "lengths"), GRID)
def test_an_epoch_takes_every_token_and_every_pair_once(
    tmp_path: Path, sequence_length: int, align: int, lengths: list[int]
) -> None:
    documents = documents_of(lengths)
    epochs = 3
    prefix = write(tmp_path / "d", documents)
    per_epoch = dataset_of(prefix, sequence_length, align).samples_per_epoch
    dataset = dataset_of(prefix, sequence_length, align, samples=epochs * per_epoch)
    assert len(dataset) == epochs * per_epoch
    orders = []
    for epoch in range(epochs):
        samples = [dataset[epoch * per_epoch + i] for i in range(per_epoch)]
        tokens = torch.cat([s["tokens"] for s in samples])
        labels = torch.cat([s["labels"] for s in samples])
        kept = torch.cat([s["loss_mask"] for s in samples]).bool()
        long = [document.tolist() for document in documents if len(document) > 1]
        assert Counter(tokens[tokens > 0].tolist()) == Counter(itertools.chain(*long))
        pairs = itertools.chain(*(itertools.pairwise(document) for document in long))
        assert Counter(zip(tokens[kept].tolist(), labels[kept].tolist(), strict=True)) == Counter(pairs)
        orders.append(tokens.tolist())
    if len(lengths) > 1:
        assert orders[0] != orders[1] != orders[2]


def test_a_sample_depends_on_seed_and_index_alone(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", documents_of(LENGTHS))
    whole = dataset_of(prefix, 256, 64, samples=100)
    samples = [whole[i] for i in range(len(whole))]
    longer = dataset_of(prefix, 256, 64, samples=150)
    copied = pickle.loads(pickle.dumps(whole))
    for i in (70, 3, 69, 44):  # as after a restart, and in no order
        for other in (dataset_of(prefix, 256, 64, samples=100)[i], longer[i], copied[i]):
            assert all(torch.equal(samples[i][name], other[name]) for name in samples[i])
    assert any(
        not torch.equal(samples[i]["tokens"], dataset_of(prefix, 256, 64, seed=6)[i]["tokens"]) for i in range(5)
    )


def test_a_long_document_is_not_read_in_order(tmp_path: Path) -> None:
    dataset = dataset_of(write(tmp_path / "d", documents_of([64 * 40])), 64, 64, samples=80)
    begins = [int(dataset[i]["tokens"][0]) for i in range(80)]
    assert sorted(begins[:40]) == sorted(begins[40:])
    assert sorted(begins[:40]) != begins[:40] != begins[40:]


def test_samples_collate_for_megatron(tmp_path: Path) -> None:
    dataset = dataset_of(write(tmp_path / "d", documents_of(LENGTHS)), 256, 64)
    batch = next(iter(torch.utils.data.DataLoader(dataset, batch_size=2)))
    for name in ("tokens", "labels", "position_ids"):
        assert batch[name].shape == (2, 256)
        assert batch[name].dtype == torch.int64
    assert batch["loss_mask"].dtype == torch.float32
    assert batch["cu_seqlens"].shape == batch["cu_seqlens_padded"].shape == (2, 256 // 64 + 1)
    assert batch["cu_seqlens"].dtype == batch["max_seqlen"].dtype == torch.int32
    assert batch["max_seqlen"].shape == (2,)


def test_none_is_a_sample_without_loss(tmp_path: Path) -> None:
    dataset = dataset_of(write(tmp_path / "d", documents_of(LENGTHS)), 256, 64)
    sample = dataset[None]
    assert sample["loss_mask"].sum() == 0
    assert torch.equal(sample["tokens"], dataset[0]["tokens"])
    assert dataset[0]["loss_mask"].sum() > 0


def test_token_beyond_the_vocabulary_is_an_error(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [np.arange(100), np.arange(100) + 200])
    low = IndexedDataset(prefix)
    for vocab_size, fails in ((300, False), (299, True)):
        config = config_of(256, 64, vocab_size=vocab_size)
        dataset = PackedDataset(low, prefix, np.arange(2, dtype=np.int32), None, Split.train, config)
        context = pytest.raises(ValueError, match=r"vocab_size=299.*200 to 299 in document 1")
        with context if fails else contextlib.nullcontext():
            dataset[0]


def test_splits_share_no_document(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", documents_of([100] * 40))
    config = config_of(256, 64, blend=([prefix], None), split="80,10,10")
    parts = BlendedMegatronDatasetBuilder(PackedDataset, [30, 3, 0], lambda: True, config).build()
    seen = [{int(t) // STEP for i in range(len(part)) for t in part[i]["tokens"] if t} for part in parts]
    assert [len(s) for s in seen] == [32, 4, 0]
    assert not seen[0] & seen[1]
    assert len(parts[0]) >= 30
    assert len(parts[2]) == 0


@pytest.mark.parametrize("weights", [[0.25, 0.75], None])
def test_blends(tmp_path: Path, weights: list[float] | None) -> None:
    prefixes = [write(tmp_path / name, documents_of([200] * 30, first)) for name, first in (("a", 1), ("b", 41))]
    config = config_of(256, 64, blend=(prefixes, weights), split="1,0,0", path_to_cache=str(tmp_path / "cache"))
    train = BlendedMegatronDatasetBuilder(PackedDataset, [40, 0, 0], lambda: True, config).build()[0]
    assert len(train) == 40
    from_b = sum(bool(train[i]["tokens"].max() > 40 * STEP) for i in range(40))
    assert from_b == (30 if weights else 20)


def test_the_alignment_is_part_of_the_cache_key(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", documents_of(LENGTHS))
    keys = {dataset_of(prefix, 256, align).unique_description_hash for align in (32, 64, 128)}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, 64),
        ({"context_parallel": 4, "tensor_parallel": 8, "sequence_parallel": True}, 64),
        ({"context_parallel": 64}, 128),
        ({"context_parallel": 3}, 192),
        ({"context_parallel": 2, "tensor_parallel": 6, "sequence_parallel": True, "chunk": 1}, 12),
        ({"tensor_parallel": 6, "chunk": 1}, 1),
    ],
)
def test_packing_alignment(sizes: dict[str, int], expected: int) -> None:
    assert packing_alignment(**sizes) == expected


def test_statistics_count_what_the_dataset_gives(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", documents_of(LENGTHS))
    dataset = dataset_of(prefix, 256, 64)
    statistics = packing_statistics(np.array(LENGTHS), 256, 64)
    samples = [dataset[i] for i in range(len(dataset))]
    slots = len(samples) * 256
    assert statistics["samples"] == len(samples)
    assert statistics["too_short"] == 3
    assert statistics["fill"] == sum(int((s["tokens"] > 0).sum()) for s in samples) / slots
    assert statistics["loss_share"] == sum(float(s["loss_mask"].sum()) for s in samples) / slots


def test_errors_name_the_fault(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sequence_length must be a positive multiple of align=64, got 200"):
        config_of(200, 64)
    with pytest.raises(ValueError, match="align must be at least 1, got 0"):
        config_of(64, 0)
    with pytest.raises(NotImplementedError, match="create_attention_mask"):
        config_of(64, 64, create_attention_mask=True)
    with pytest.raises(ValueError, match="context_parallel must be at least 1"):
        packing_alignment(context_parallel=0)
    with pytest.raises(ValueError, match="two tokens"):
        packing_statistics(np.array([1, 0]), 64, 64)
    prefix = write(tmp_path / "d", documents_of([100, 1, 50]))
    with pytest.raises(ValueError, match=r"train split of .*/d must fill one sequence of 256 .* got 192 slots"):
        dataset_of(prefix, 256, 64)
    assert len(dataset_of(prefix, 256, 64, samples=0)) == 0
    dataset = dataset_of(prefix, 64, 64)
    for idx in (-1, len(dataset)):
        with pytest.raises(IndexError, match=r"idx must be in \[0, 3\)"):
            dataset[idx]
    with pytest.raises(TypeError, match="PackedDatasetConfig"):
        PackedDataset(dataset.dataset, prefix, dataset.indices, 1, Split.train, config=None)
