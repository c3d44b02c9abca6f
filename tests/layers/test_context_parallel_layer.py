"""The layer under context parallelism equals the layer on the whole sequence, dense and packed, zigzag in and out."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from layer_cases import (
    HIDDEN,
    RECOMPUTE,
    alone,
    assert_close,
    load,
    make_config,
    make_layer,
    packed,
    random_weights,
    share,
    split_groups,
    sum_replicated_gradients,
)
from megatron.core import parallel_state
from torch import Tensor

from qla_megatron.testing.distributed import run_ranks

TOLERANCE = 1e-5  # float32
DOCUMENTS = [8, 64, 16, 136]  # one piece per rank of 1 token at CP 4, one chunk exactly, less than one, more than two
TOKENS = sum(DOCUMENTS)


def zigzag(tokens: Tensor, lengths: list[int], rank: int, ranks: int) -> Tensor:
    """The tokens that a context parallel rank holds: of each document's 2 `ranks` pieces, the r-th from either end."""
    held = []
    for document in tokens.split(lengths):
        pieces = document.chunk(2 * ranks)
        held += [pieces[rank], pieces[2 * ranks - 1 - rank]]
    return torch.cat(held)


def check_shards_equal_whole(
    documents: list[int] | None, sequence_parallel: bool = False, **config_changes: Any
) -> None:
    tp, cp = (parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_context_parallel_world_size())
    tp_rank, cp_rank = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank())
    whole = make_layer(make_config(), alone(), conv_bias=True)
    weights = random_weights()
    load(whole, weights)
    config = make_config(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        sequence_parallel=sequence_parallel and tp > 1,
        **config_changes,
    )
    split = make_layer(config, split_groups(), conv_bias=True, cp_comm_type="p2p")
    load(split, weights, tp_rank, tp)

    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(TOKENS, 1 if documents else 2, HIDDEN, generator=generator) for _ in range(2))
    params = packed(documents) if documents else None
    inputs = x.clone().requires_grad_()
    y, _ = whole(inputs, None, packed_seq_params=params)
    (y * dy).sum().backward()

    def here(tensor: Tensor) -> Tensor:
        held = zigzag(tensor.detach(), documents or [TOKENS], cp_rank, cp)
        return held.chunk(tp)[tp_rank] if config.sequence_parallel else held

    shard = here(x).requires_grad_()
    y_shard, _ = split(shard, None, packed_seq_params=params)
    (y_shard * here(dy)).sum().backward()
    sum_replicated_gradients(split, config)

    assert_close(y_shard.detach(), here(y), TOLERANCE, "output")
    assert_close(shard.grad, here(inputs.grad), TOLERANCE, "input gradient")
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    for name, parameter in split.named_parameters():
        # Megatron's gradient reduction runs over data and context parallel ranks together.
        dist.all_reduce(parameter.grad, group=parallel_state.get_context_parallel_group())
        assert_close(parameter.grad, share(name, gradients[name], tp_rank, tp), TOLERANCE, f"gradient of {name}")


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (1, 4), (2, 2)])
def test_shards_equal_whole(tp: int, cp: int) -> None:
    run_ranks(_check_dense_and_packed, tp * cp, tensor_parallel=tp, context_parallel=cp)


def _check_dense_and_packed() -> None:
    for documents in (None, DOCUMENTS):
        check_shards_equal_whole(documents)
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        check_shards_equal_whole(DOCUMENTS, sequence_parallel=True)
    check_shards_equal_whole(DOCUMENTS, **RECOMPUTE)  # with the way back of the exchange inside


def test_what_cannot_be_cut_is_refused() -> None:
    run_ranks(_check_refusals, 2, context_parallel=2)


def _check_refusals() -> None:
    layer = make_layer(make_config(context_parallel_size=2), split_groups())
    with pytest.raises(ValueError, match=r"lengths in cu_seqlens_q must be divisible by cp_size.*4, got \[0, 6, 16\]"):
        layer(torch.zeros(8, 1, HIDDEN), None, packed_seq_params=packed([6, 10]))
    with pytest.raises(NotImplementedError, match="local_cp_size must be None or 2, got 1"):
        layer(torch.zeros(8, 1, HIDDEN), None, packed_seq_params=packed([8, 8], local_cp_size=1))
    with pytest.raises(ValueError, match="tensor times context parallel size = 2"):
        make_layer(
            make_config(
                linear_num_key_heads=3,
                linear_num_value_heads=6,
                linear_attention_freq=None,
                experimental_attention_variant=None,
            ),
            split_groups(),
        )
