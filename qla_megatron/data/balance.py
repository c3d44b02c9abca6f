"""Even work for data-parallel ranks: which of a step's packs each rank takes.

Packs are equally long, so that all that is linear in tokens is even from the start. Full attention is not: a document
of L tokens costs about L^2 / 2, and a pack of one long document many times one of short ones. All ranks wait for the
slowest at the end of a step, and with expert parallelism at each layer.

The packs of a step stay the same, whatever the ranks: balancing permutes them within the step. Context-parallel ranks
need nothing of it: zigzag gives each of them the same number of (token, seen token) pairs of every document, and the
exchange of heads gives each rank all tokens of its heads.
"""

from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.utils import Split

from qla_megatron.data.packed import PackedDataset


class BalancedDataset(torch.utils.data.Dataset):
    """A training data set in which the samples of each step are permuted so that ranks get even work.

    Sample i belongs to step (i - origin) // block; Megatron's sampler gives sample `origin + step block + m ranks + r`
    to rank r as its micro-batch m. Like that of the data set underneath, the order is a function of the index alone.

    Args:
        dataset: PackedDataset, or Megatron's blend of some.
        ranks: data parallel size.
        block: samples of a step, a multiple of `ranks`.
        origin: the first sample of this run's first step: what was consumed before it. With an unchanged `block` any
            run's is a multiple of it, so that a resumed run has the same steps.

    Raises:
        TypeError: another data set.
        ValueError: `block` is not a multiple of `ranks`.
    """

    def __init__(self, dataset: Any, *, ranks: int, block: int, origin: int = 0) -> None:
        if not isinstance(dataset, PackedDataset | BlendedDataset):
            raise TypeError(f"dataset must be a PackedDataset or a blend of them, got {type(dataset).__name__}")
        if ranks < 1 or block < 1 or block % ranks:
            raise ValueError(f"block must be a multiple of ranks={ranks}, got {block}")
        self.dataset, self.ranks, self.block, self.origin = dataset, ranks, block, origin
        self.split = Split.train  # by which Megatron's loader chooses between batch sizes
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """Sample `idx` of the permuted order; None as the data set underneath takes it."""
        return self.dataset[None if idx is None else self.place(int(idx))]

    def place(self, idx: int) -> int:
        """Which sample of the data set underneath stands at `idx`; an incomplete step at the end stays as it is."""
        step = (idx - self.origin) // self.block
        begin = self.origin + step * self.block
        if idx < self.origin or begin + self.block > len(self.dataset):
            return idx
        if self._order is None or self._order[0] != step:
            costs = np.array([attention_cost(self.dataset, begin + i) for i in range(self.block)])
            self._order = step, even_order(costs, self.ranks)
        return begin + int(self._order[1][idx - begin])


def attention_cost(dataset: Any, idx: int) -> int:
    """Pairs of a token and one that it sees, over the documents of a sample: sum L (L + 1) / 2."""
    if isinstance(dataset, BlendedDataset):
        return attention_cost(dataset.datasets[dataset.dataset_index[idx]], int(dataset.dataset_sample_index[idx]))
    lengths = dataset.document_lengths(idx)
    return int((lengths * (lengths + 1)).sum() // 2)


def even_order(costs: np.ndarray, ranks: int) -> np.ndarray:
    """An order of packs in which place m ranks + r is rank r's m-th, with sums over the ranks as even as may be.

    Packs of about equal cost make one round of micro-batches, since ranks that share experts wait for one another in
    each; within a round the most costly pack goes to the rank with the least so far.

    Args:
        costs: [n] of the packs; n is a multiple of `ranks`.

    Returns:
        [n], the pack at each place.
    """
    rounds = np.argsort(-costs, kind="stable").reshape(-1, ranks)
    order, load = np.empty_like(rounds), np.zeros(ranks)
    for here, packs in zip(order, rounds, strict=True):
        idle_first = np.argsort(load, kind="stable")
        here[idle_first] = packs
        load[idle_first] += costs[packs]
    return order.reshape(-1)


def imbalance(costs: np.ndarray, ranks: int) -> float:
    """Work of the busiest rank over the mean, of packs [n] in the order of places: 1 is even."""
    load = costs.reshape(-1, ranks).sum(axis=0)
    return float(load.max() / load.mean())
