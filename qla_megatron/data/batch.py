"""One micro-batch for a forward step: read on tensor-parallel rank 0, broadcast, described and sharded for the
layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank

from qla_megatron.data.zigzag import zigzag_index

SEQUENCE_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
_FIELDS = (*SEQUENCE_FIELDS, "attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen")


@dataclass(frozen=True)
class MicroBatch:
    """What a forward step hands to the model, on this rank's device.

    `tokens`, `labels`, `position_ids` int64 and `loss_mask` float32, all [B, S / CP]; None where the pipeline stage has
    no use for them. `packed_seq_params` is None for unpacked batches.
    """

    tokens: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    packed_seq_params: PackedSeqParams | None = None


def next_micro_batch(
    data_iterator: Iterator[dict[str, Any]] | None,
    *,
    sequence_length: int,
    micro_batch_size: int = 1,
    packed: bool = True,
    mtp_on_this_rank: bool = False,
    vp_stage: int | None = None,
) -> MicroBatch:
    """The next micro-batch, the same on every rank of a tensor-parallel group. A collective of that group.

    Megatron broadcasts from tensor-parallel rank 0, the one rank that reads `data_iterator` (the others pass None).
    With packing every pipeline stage needs the offsets, so that every stage needs an iterator; without, only the
    first and last do. Context parallelism shards in zigzag: per document when packed, else per sequence.

    Args:
        data_iterator: yields collated samples of PackedDataset, or of GPTDataset when not `packed`.
        sequence_length: S, tokens of a sequence before sharding.
        micro_batch_size: B; 1 when packed.
        packed: whether the samples carry `cu_seqlens`.
        mtp_on_this_rank: whether this rank holds multi-token prediction layers, which need tokens and labels.
        vp_stage: this chunk's number under virtual pipeline parallelism.

    Raises:
        NotImplementedError: packed with `micro_batch_size` above 1.
        ValueError: the iterator is missing on rank 0, or yields another shape than `[B, S]`, or no `cu_seqlens`.
    """
    if packed and micro_batch_size != 1:
        raise NotImplementedError(
            f"micro_batch_size must be 1 with packing, got {micro_batch_size}; a longer sequence_length packs more"
        )
    first, last = (
        stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
        for stage in (parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage)
    )
    if not (first or last or packed or mtp_on_this_rank):
        return MicroBatch()
    rank = parallel_state.get_tensor_model_parallel_rank()
    batch = get_batch_on_this_tp_rank(
        _read(data_iterator, (micro_batch_size, sequence_length), packed) if rank == 0 else {},
        has_cu_seqlens=packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=1,  # more would broadcast cu_seqlens_padded, which equals cu_seqlens here
        tp_rank=rank,
        micro_batch_size=micro_batch_size,
        seq_length=sequence_length,
        mtp_on_this_rank=mtp_on_this_rank,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        is_pipeline_first_stage=first,
        is_pipeline_last_stage=last,
    )
    return _packed(batch, sequence_length) if packed else _unpacked(batch)


def _read(data_iterator: Iterator[dict[str, Any]] | None, shape: tuple[int, int], packed: bool) -> dict[str, Any]:
    """The next batch of the iterator on this rank's device, checked, since the receivers allocate by `shape`."""
    if data_iterator is None:
        raise ValueError("data_iterator must be given on tensor-parallel rank 0, got None")
    batch = next(data_iterator)
    if tuple(batch["tokens"].shape) != shape:
        raise ValueError(f"tokens must have shape [B, S] = {shape}, got {tuple(batch['tokens'].shape)}")
    if packed and batch.get("cu_seqlens") is None:
        raise ValueError("a packed batch must have cu_seqlens, got none: is the dataset a PackedDataset?")
    device = torch.cuda.current_device()
    moved = {name: batch.get(name) for name in _FIELDS}
    return {name: None if t is None else t.to(device, non_blocking=True) for name, t in moved.items()}


def _unpacked(batch: dict[str, Any]) -> MicroBatch:
    batch = {name: batch[name] for name in SEQUENCE_FIELDS}
    group = parallel_state.get_context_parallel_group()
    return MicroBatch(**get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group))


def _packed(batch: dict[str, Any], sequence_length: int) -> MicroBatch:
    # The one read of device memory per micro-batch. It drops the filling of cu_seqlens, for which attention kernels
    # would start a grid of empty documents; the longest document and the zigzag need the offsets on the host anyway.
    offsets = batch["cu_seqlens"][0].cpu()
    offsets = offsets[: int(torch.searchsorted(offsets, sequence_length)) + 1]
    cu_seqlens = batch["cu_seqlens"][0, : len(offsets)]
    longest = int(offsets.diff().max())
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pad_between_seqs=False,  # padding is part of its document; unset, Transformer Engine compares on the device
    )
    fields = {name: batch[name] for name in SEQUENCE_FIELDS}
    size = parallel_state.get_context_parallel_world_size()
    if size > 1:
        index = zigzag_index(offsets, size, parallel_state.get_context_parallel_rank()).to(cu_seqlens.device)
        fields = {name: None if t is None else t.index_select(1, index) for name, t in fields.items()}
    return MicroBatch(**fields, packed_seq_params=params)
