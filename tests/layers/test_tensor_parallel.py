"""The layer split over tensor parallel ranks equals the whole layer: outputs and every gradient."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from layer_cases import (
    COLUMNS,
    HIDDEN,
    PARTS,
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
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads

from qla_megatron.testing.distributed import launch_torchrun, run_ranks

TOLERANCE = 1e-5  # float32
TOKENS, BATCH = 80, 2  # a whole chunk of 64 and a rest; a multiple of 8 ranks for sequence parallelism


def whole_and_split(sequence_parallel: bool, documents: list[int] | None, **config_changes: Any):
    """One step of the whole layer and of the split one on the same data; what of the whole each rank should see."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batch = 1 if documents else BATCH
    whole = make_layer(make_config(**config_changes), alone(), conv_bias=True, bias=True)
    weights = random_weights()
    load(whole, weights)
    config = make_config(tensor_model_parallel_size=ranks, sequence_parallel=sequence_parallel, **config_changes)
    split = make_layer(config, split_groups(), conv_bias=True, bias=True)
    load(split, weights, rank, ranks)

    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(TOKENS, batch, HIDDEN, generator=generator) for _ in range(2))
    here = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks) if sequence_parallel else slice(None)
    results = []
    for layer, part in ((whole, slice(None)), (split, here)):
        inputs = x[part].clone().requires_grad_()
        output, bias = layer(inputs, None, packed_seq_params=packed(documents) if documents else None)
        ((output + bias) * dy[part]).sum().backward()
        results.append((layer, output.detach(), inputs.grad))
    sum_replicated_gradients(split, config)
    return results, here


def check_split_equals_whole(
    sequence_parallel: bool, documents: list[int] | None = None, **config_changes: Any
) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ((whole, y, dx), (split, y_split, dx_split)), here = whole_and_split(sequence_parallel, documents, **config_changes)
    assert_close(y_split, y[here], TOLERANCE, "output")
    assert_close(dx_split, dx[here], TOLERANCE, "input gradient")
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    assert set(gradients) == {*PARTS, *COLUMNS, "out_norm.weight", "out_proj.bias"}
    for name, parameter in split.named_parameters():
        assert_close(parameter.grad, share(name, gradients[name], rank, ranks), TOLERANCE, f"gradient of {name}")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_split_equals_whole(ranks: int) -> None:
    run_ranks(_check_with_and_without_sequence_parallel, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_split_equals_whole_under_torchrun(ranks: int) -> None:
    launch_torchrun(_check_with_and_without_sequence_parallel, ranks)


def _check_with_and_without_sequence_parallel() -> None:
    for sequence_parallel in (False, True):
        check_split_equals_whole(sequence_parallel)
        # Under sequence parallelism a rank sees a piece of a document; offsets are those of the gathered sequence.
        check_split_equals_whole(sequence_parallel, documents=[1, 30, 49])
    # The norm's gradient is summed where the norm is computed: with recomputing, inside the backward pass.
    check_split_equals_whole(sequence_parallel=False, **RECOMPUTE)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_summed_once_by_megatrons_own_step(sequence_parallel: bool) -> None:
    """Two micro-batches through Megatron's DistributedDataParallel and finalize_model_grads."""
    run_ranks(_check_accumulated_gradients, 2, sequence_parallel)


def _check_accumulated_gradients(sequence_parallel: bool) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = make_layer(make_config(), alone())
    weights = random_weights()
    load(whole, weights)
    config = make_config(tensor_model_parallel_size=ranks, sequence_parallel=sequence_parallel)
    split = make_layer(config, split_groups())
    load(split, weights, rank, ranks)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), split)
    wrapped.zero_grad_buffer()
    here = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks) if sequence_parallel else slice(None)
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        x = torch.randn(TOKENS, BATCH, HIDDEN, generator=generator)
        whole(x, None)[0].square().sum().backward()
        wrapped(x[here], None)[0].square().sum().backward()
    finalize_model_grads([wrapped])
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    for name, parameter in split.named_parameters():
        expected = share(name, gradients[name], rank, ranks)
        assert_close(parameter.main_grad, expected, TOLERANCE, f"gradient of {name}")


def test_start_values_do_not_depend_on_the_parallel_size_and_differ_between_ranks() -> None:
    run_ranks(_check_start_values, 2)


def _check_start_values() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    whole = dict(make_layer(make_config(), alone()).named_parameters())
    torch.manual_seed(3)
    split = dict(make_layer(make_config(tensor_model_parallel_size=ranks), split_groups()).named_parameters())
    for name in ("A_log", "dt_bias", "conv1d.weight"):
        assert torch.equal(split[name], share(name, whole[name], rank, ranks)), name
        others = [torch.empty_like(split[name]) for _ in range(ranks)]
        dist.all_gather(others, split[name].detach())
        assert name == "dt_bias" or not torch.equal(others[0], others[1]), name
    # Made on the device, the ranks draw from Megatron's tensor parallel generators.
    made = make_layer(make_config(tensor_model_parallel_size=ranks, use_cpu_initialization=False), split_groups())
    others = [torch.empty_like(made.A_log) for _ in range(ranks)]
    dist.all_gather(others, made.A_log.detach())
    assert not torch.equal(others[0], others[1])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"linear_num_key_heads": 3, "linear_num_value_heads": 6}, "linear_num_key_heads must be a multiple of"),
    ],
)
def test_heads_must_divide(changes: dict[str, int], text: str) -> None:
    run_ranks(_check_heads_must_divide, 2, changes, text)


def _check_heads_must_divide(changes: dict[str, int], text: str) -> None:
    config = make_config(**changes)
    config.tensor_model_parallel_size = 2
    with pytest.raises(ValueError, match=text):
        make_layer(config, split_groups())
