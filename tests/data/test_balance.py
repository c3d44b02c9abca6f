"""Even work for data-parallel ranks: the same samples in each step, dealt out evenly, the same after a restart."""

from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers import MegatronTokenizer
from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

from qla_megatron.data.balance import BalancedDataset, attention_cost, even_order, imbalance
from qla_megatron.data.packed import PackedDataset, PackedDatasetConfig
from qla_megatron.data.zigzag import zigzag_index

TOKENIZER = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=248_320)
RANKS, BLOCK, S = 4, 16, 1024


def write(prefix: Path, seed: int) -> str:
    """Documents from short to longer than a sequence, as real ones: log-normal lengths."""
    random = np.random.RandomState(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for length in np.exp(random.normal(5.0, 1.5, 300)).astype(int) + 2:
        builder.add_document(random.randint(1, 1000, length), [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> torch.utils.data.Dataset:
    """Two data sets, 3 : 1, read for more than one epoch."""
    folder = tmp_path_factory.mktemp("blend")
    prefixes = [write(folder / name, seed) for seed, name in enumerate("ab")]
    config = PackedDatasetConfig(
        random_seed=5, sequence_length=S, blend=(prefixes, [0.75, 0.25]), split="1,0,0", tokenizer=TOKENIZER,
        path_to_cache=str(folder / "cache"),
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(PackedDataset, [20 * BLOCK, 0, 0], lambda: True, config).build()[0]


def test_lengths_are_those_of_the_sample(blend: torch.utils.data.Dataset) -> None:
    for dataset in blend.datasets:
        for i in range(len(dataset)):
            assert dataset.document_lengths(i).tolist() == [n for n in dataset[i]["cu_seqlens"].diff().tolist() if n]
    offsets = blend[7]["cu_seqlens"].diff().tolist()
    assert attention_cost(blend, 7) == sum(n * (n + 1) // 2 for n in offsets)


def test_each_step_keeps_its_samples_and_gets_even(blend: torch.utils.data.Dataset) -> None:
    balanced = BalancedDataset(blend, ranks=RANKS, block=BLOCK)
    assert len(balanced) == len(blend)
    before, after = [], []
    for step in range(len(blend) // BLOCK):
        places = list(range(step * BLOCK, (step + 1) * BLOCK))
        permuted = [balanced.place(i) for i in places]
        assert sorted(permuted) == places
        for order, found in ((places, before), (permuted, after)):
            found.append(imbalance(np.array([attention_cost(blend, i) for i in order]), RANKS))
    assert np.mean(after) - 1 < 0.2 * (np.mean(before) - 1), f"{np.mean(before)} {np.mean(after)}"
    i = BLOCK + 3
    assert torch.equal(balanced[i]["tokens"], blend[balanced.place(i)]["tokens"])


def samples(dataset: BalancedDataset, rank: int, consumed: int, ranks: int = RANKS) -> list[torch.Tensor]:
    """What Megatron's loader gives a rank from `consumed` samples on."""
    sampler = MegatronPretrainingSampler(len(dataset), consumed, 1, rank, ranks)
    return [dataset[i]["tokens"] for batch in sampler for i in batch]


def test_a_restart_in_the_middle_of_an_epoch_goes_on_exactly(blend: torch.utils.data.Dataset) -> None:
    consumed = 7 * BLOCK
    assert consumed % blend.datasets[1].samples_per_epoch
    for rank in range(RANKS):
        whole = samples(BalancedDataset(blend, ranks=RANKS, block=BLOCK), rank, 0)
        rest = samples(BalancedDataset(blend, ranks=RANKS, block=BLOCK, origin=consumed), rank, consumed)
        assert len(rest) == len(whole) - consumed // RANKS
        assert all(torch.equal(a, b) for a, b in zip(whole[consumed // RANKS :], rest, strict=True))


def test_another_layout_or_batch_leaves_out_and_repeats_nothing(blend: torch.utils.data.Dataset) -> None:
    consumed = 5 * BLOCK
    first = {BalancedDataset(blend, ranks=RANKS, block=BLOCK).place(i) for i in range(consumed)}
    later = BalancedDataset(blend, ranks=3, block=21, origin=consumed)
    second = [later.place(i) for i in range(consumed, len(later))]
    assert sorted([*first, *second]) == list(range(len(blend)))
    assert later.place(consumed - 1) == consumed - 1


def test_rounds_hold_packs_of_about_equal_cost() -> None:
    costs = np.random.RandomState(0).lognormal(0, 1.5, 64)
    order = even_order(costs, 4)
    assert sorted(order) == list(range(64))
    rounds = costs[order].reshape(-1, 4)
    assert (rounds.min(axis=1)[:-1] >= rounds.max(axis=1)[1:]).all()
    assert imbalance(costs[order], 4) < 1.05 < imbalance(costs, 4)


def test_context_parallel_ranks_see_equally_much() -> None:
    lengths = [64, 512, 0, 128, 4096]
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    position = torch.cat([torch.arange(n) for n in lengths])
    seen = [int((position[zigzag_index(offsets, 4, rank)] + 1).sum()) for rank in range(4)]
    assert len(set(seen)) == 1


def test_bad_input_is_refused(blend: torch.utils.data.Dataset) -> None:
    with pytest.raises(ValueError, match="block must be a multiple of ranks=4, got 6"):
        BalancedDataset(blend, ranks=4, block=6)
    with pytest.raises(TypeError, match="dataset must be a PackedDataset or a blend of them, got list"):
        BalancedDataset([], ranks=4, block=8)


def test_long_packs(tmp_path: Path) -> None:
    """262,144 tokens aligned to 128: documents from a few tokens to longer than a sequence, a million tokens in all."""
    random, length = np.random.RandomState(0), 262_144
    lengths = [*np.exp(random.normal(7.0, 1.5, 200)).astype(int) + 2, 300_000, length, 200_000]
    builder = IndexedDatasetBuilder(f"{tmp_path}/d.bin", dtype=np.int32)
    for n in lengths:
        builder.add_document(random.randint(1, 248_320, n), [n])
    builder.finalize(f"{tmp_path}/d.idx")
    config = PackedDatasetConfig(
        random_seed=5, sequence_length=length, blend=(["unused"], None), split="1", align=128, vocab_size=248_320,
        tokenizer=TOKENIZER,
    )  # fmt: skip
    low = IndexedDataset(f"{tmp_path}/d")
    dataset = PackedDataset(low, "d", np.arange(len(low), dtype=np.int32), None, Split.train, config)
    tokens = 0
    for i in range(len(dataset)):
        sample = dataset[i]
        assert sample["cu_seqlens"].shape == (length // 128 + 1,)
        assert (sample["cu_seqlens"] % 128 == 0).all()
        assert dataset.document_lengths(i).tolist() == [n for n in sample["cu_seqlens"].diff().tolist() if n]
        assert sample["max_seqlen"] <= length
        tokens += int((sample["tokens"] > 0).sum())
    assert tokens == sum(lengths)
