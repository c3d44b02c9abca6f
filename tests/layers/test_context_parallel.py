"""The head exchange equals cutting and joining the whole tensor by hand; there and back is the identity."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from qla_megatron.data.zigzag import inverse_order, zigzag_index, zigzag_order
from qla_megatron.layers.context_parallel import slice_sections, to_head_shards, to_sequence_shards
from qla_megatron.testing.distributed import run_ranks

DOCUMENTS = [8, 0, 64, 16, 8, 40]  # an empty one; a single token a piece at 4 ranks; lengths of many sizes
SECTIONS = [8, 8, 24, 4]
TOKENS = sum(DOCUMENTS)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def held(whole: Tensor, lengths: list[int], rank: int, cp: int) -> Tensor:
    """By hand: of each document cut into 2 cp pieces, number `rank` from the front and from the back."""
    parts = []
    for document in whole.split(lengths):
        pieces = document.split(len(document) // (2 * cp)) if len(document) else [document] * (2 * cp)
        parts += [pieces[rank], pieces[2 * cp - 1 - rank]]
    return torch.cat(parts)


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("lengths", [DOCUMENTS, [TOKENS], [0, 0, 8, 0]])
def test_zigzag_index(cp: int, lengths: list[int]) -> None:
    places = torch.arange(sum(lengths))
    ranks = [zigzag_index(offsets(lengths), cp, rank) for rank in range(cp)]
    for rank, index in enumerate(ranks):
        assert torch.equal(index, held(places, lengths, rank, cp))
    order = zigzag_order(offsets(lengths), cp, sum(lengths))
    assert torch.equal(order, torch.cat(ranks))
    assert torch.equal(order.sort().values, places)
    assert torch.equal(order[inverse_order(order)], places)


def test_zigzag_index_refuses() -> None:
    with pytest.raises(ValueError, match=r"document 1 must be a multiple of 2 \* cp = 4, got 6"):
        zigzag_index(offsets([8, 6, 2]), 2, 0)
    with pytest.raises(ValueError, match=r"rank must be in 0 .. cp - 1 with cp=2, got 2"):
        zigzag_index(offsets([8]), 2, 2)


def of_rank(whole: Tensor, rank: int, cp: int) -> Tensor:
    """By hand: each section's part for the rank, side by side."""
    return torch.cat([s.chunk(cp, -1)[rank] for s in whole.split(SECTIONS, -1)], -1)


def check_exchange() -> None:
    group, cp, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    for lengths, batch in ((DOCUMENTS, 1), ([TOKENS], 1), (None, 3)):
        cut, cu_seqlens = lengths or [TOKENS], None if lengths is None else offsets(lengths)
        generator = torch.Generator().manual_seed(0)
        whole, d_whole = (torch.randn(TOKENS, batch, sum(SECTIONS), generator=generator) for _ in range(2))
        x = held(whole, cut, rank, cp).requires_grad_()
        y = to_head_shards(x, SECTIONS, group, cu_seqlens)
        assert torch.equal(y, of_rank(whole, rank, cp))
        y.backward(of_rank(d_whole, rank, cp))
        assert torch.equal(x.grad, held(d_whole, cut, rank, cp))

        heads = whole.chunk(cp, -1)[rank].clone().requires_grad_()
        z = to_sequence_shards(heads, group, cu_seqlens)
        assert torch.equal(z, held(whole, cut, rank, cp))
        z.backward(held(d_whole, cut, rank, cp))
        assert torch.equal(heads.grad, d_whole.chunk(cp, -1)[rank])

        back = to_sequence_shards(to_head_shards(x, [sum(SECTIONS)], group, cu_seqlens), group, cu_seqlens)
        assert torch.equal(back, x)


def check_slices() -> None:
    group, cp, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    weight = torch.randn(sum(SECTIONS), 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    part = slice_sections(weight, SECTIONS, group)
    assert torch.equal(part, of_rank(weight.T, rank, cp).T)
    (part**2).sum().backward()
    dist.all_reduce(weight.grad)
    assert torch.equal(weight.grad, 2 * weight.detach())


def check_refusals() -> None:
    group, x = dist.group.WORLD, torch.zeros(8, 1, 8)
    for arguments, text in (
        ((x, [3, 5], group), "sections must be multiples of the group's size 2"),
        ((x, [4], group), r"sum to x.shape\[-1\] = 8, got \(4,\)"),
        ((x[0], [8], group), r"x must have 3 dimensions.* got shape \(1, 8\)"),
        ((x[:7], [8], group), r"multiple of 2 \* 2 ranks = 4, got 14"),
        ((x, [8], group, offsets([10, 6])), "document 0 must be a multiple of .* 4, got 10"),
        ((x, [8], group, offsets([8])), "from 0 to the number of tokens over all ranks, 16, got 0 to 8"),
        ((x.expand(8, 2, 8), [8], group, offsets([16])), "batch size 1 when packed, got 2"),
    ):
        with pytest.raises(ValueError, match=text):
            to_head_shards(*arguments)
    with pytest.raises(ValueError, match=r"parameter.shape\[0\] = 8, got \(3, 5\)"):
        slice_sections(x[:, 0], [3, 5], group)


def check_all() -> None:
    check_exchange()
    check_slices()
    if dist.get_world_size() == 2:
        check_refusals()


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_exchange(cp: int) -> None:
    run_ranks(check_all, cp, context_parallel=cp)
