"""Micro-batches on several ranks: who reads, who receives, how the tokens are sharded, what the layers are told."""

from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from qla_megatron.data.batch import SEQUENCE_FIELDS, MicroBatch, next_micro_batch
from qla_megatron.testing.distributed import run_ranks

OFFSETS = [0, 64, 192, 256]  # documents of one and two chunks
SAMPLE_OFFSETS = OFFSETS + [256] * 2  # as PackedDataset fills them up


def samples(batch: int = 1, length: int = 256, packed: bool = True) -> Any:
    """Two batches of distinct numbers, as the collated samples of a data set."""
    for number in (1, 2):
        ramp = torch.arange(batch * length).view(batch, length) + 1000 * number
        fields = {"tokens": ramp, "labels": ramp + 1, "loss_mask": (ramp % 3).float(), "position_ids": ramp % 64}
        if packed:
            offsets = torch.tensor([SAMPLE_OFFSETS] * batch, dtype=torch.int32)
            fields |= {"cu_seqlens": offsets, "cu_seqlens_padded": offsets.clone()}
            fields["max_seqlen"] = torch.tensor([128] * batch, dtype=torch.int32)
        yield fields | {"dataset_id": torch.zeros(batch)}


def described(micro: MicroBatch) -> dict[str, Any]:
    result = {name: getattr(micro, name) for name in SEQUENCE_FIELDS}
    params = micro.packed_seq_params
    if params is not None:
        offsets = params.cu_seqlens_q
        assert all(
            offsets is o for o in (params.cu_seqlens_kv, params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded)
        )
        assert params.max_seqlen_q == params.max_seqlen_kv
        assert params.qkv_format == "thd"
        result |= {"offsets": offsets.tolist(), "longest": params.max_seqlen_q, "dtype": offsets.dtype}
    return result


def read_two(packed: bool, batch: int) -> list[dict[str, Any]]:
    reads = parallel_state.get_tensor_model_parallel_rank() == 0
    iterator = samples(batch, packed=packed) if reads else None
    settings = {"sequence_length": 256, "micro_batch_size": batch, "packed": packed}
    return [described(next_micro_batch(iterator, **settings)) for _ in range(2)]


def assert_fields(got: dict[str, Any], expected: dict[str, Any], names: tuple[str, ...] = SEQUENCE_FIELDS) -> None:
    for name in SEQUENCE_FIELDS:
        if name in names:
            assert got[name].dtype == expected[name].dtype
            assert torch.equal(got[name], expected[name])
        else:
            assert got[name] is None


def per_document(tensor: torch.Tensor, lengths: list[int], rank: int, ranks: int) -> torch.Tensor:
    pieces = [document.chunk(2 * ranks, 1) for document in tensor.split(lengths, 1)]
    return torch.cat([p for document in pieces for p in (document[rank], document[-1 - rank])], 1)


@pytest.mark.parametrize("packed", [True, False])
def test_all_tensor_parallel_ranks_hold_the_batch(packed: bool) -> None:
    batch = 1 if packed else 3
    for rank in run_ranks(read_two, 2, packed, batch):
        for got, expected in zip(rank, samples(batch, packed=packed), strict=True):
            assert_fields(got, expected)
            if packed:
                assert (got["offsets"], got["longest"], got["dtype"]) == (OFFSETS, 128, torch.int32)


@pytest.mark.parametrize("packed", [True, False])
def test_context_parallel_shards_are_zigzag(packed: bool) -> None:
    ranks = run_ranks(read_two, 2, packed, 1, context_parallel=2)
    for number, whole in enumerate(samples(packed=packed)):
        for rank, got in enumerate(ranks):
            lengths = [64, 128, 64] if packed else [256]
            assert_fields(got[number], {n: per_document(whole[n], lengths, rank, 2) for n in SEQUENCE_FIELDS})
            if packed:
                assert got[number]["offsets"] == OFFSETS, "offsets stay those of the whole sequence"


def test_pipeline_stages_hold_what_they_need() -> None:
    needs = [("tokens", "position_ids"), (), ("labels", "loss_mask")]
    for names, rank in zip(needs, run_ranks(read_two, 3, True, 1, pipeline_parallel=3), strict=True):
        for got, expected in zip(rank, samples(), strict=True):
            assert_fields(got, expected, names)
            assert got["offsets"] == OFFSETS


def read_with_faults() -> list[str]:
    messages = []
    for iterator, settings in (
        (None, {}),
        (samples(length=128), {}),
        (samples(packed=False), {}),
        (samples(2), {"micro_batch_size": 2}),
    ):
        with pytest.raises((ValueError, NotImplementedError)) as error:
            next_micro_batch(iterator, sequence_length=256, **settings)
        messages.append(str(error.value))
    return messages


def test_errors_name_the_fault() -> None:
    messages = run_ranks(read_with_faults, 1)[0]
    expected = (
        "data_iterator must be given",
        "[B, S] = (1, 256), got (1, 128)",
        "must have cu_seqlens",
        "must be 1 with",
    )
    assert all(part in message for part, message in zip(expected, messages, strict=True))
