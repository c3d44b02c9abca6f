"""Weights of one tensor-parallel rank <-> those of each of several ranks, as functions of dicts.

split_over_tensor_parallel(state, layout, ranks)  one rank's tensors (hf_weights.py) -> those of each of `ranks`
merge_tensor_parallel(shards, layout)             back to one
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import torch

from qla_megatron.layers.hf_weights import Layout, Tensors, some, without_extra_state
from qla_megatron.layers.projections import join_from_ranks, split_over_ranks


def split_over_tensor_parallel(
    state: Mapping[str, torch.Tensor], layout: Layout, ranks: int, *, splits_experts: bool = False
) -> list[Tensors]:
    """The tensors of each of `ranks` tensor-parallel ranks from those of a single one.

    `splits_experts`: whether the routed experts are split too (expert tensor parallel size = `ranks`), or whole (1).

    Raises:
        ValueError: a part does not divide by `ranks`, or the name is none of Megatron's.
    """
    shards: list[Tensors] = [{} for _ in range(ranks)]
    for name, tensor in without_extra_state(state).items():
        dim, parts = _how_split(name, tensor, layout, splits_experts)
        if dim is None:
            pieces = [tensor] * ranks
        elif parts:
            pieces = split_over_ranks(tensor, parts, ranks)
        elif tensor.shape[dim] % ranks:
            raise ValueError(f"{name} must have a multiple of {ranks} in dimension {dim}, got {tuple(tensor.shape)}")
        else:
            pieces = list(tensor.chunk(ranks, dim))
        for shard, piece in zip(shards, pieces, strict=True):
            shard[name] = piece
    return shards


def merge_tensor_parallel(
    shards: Sequence[Mapping[str, torch.Tensor]], layout: Layout, *, splits_experts: bool = False
) -> Tensors:
    """The inverse of `split_over_tensor_parallel`.

    Raises:
        ValueError: the ranks have different names, or different values of a replicated tensor.
    """
    states = [without_extra_state(shard) for shard in shards]
    merged: Tensors = {}
    for name in _same_names(states):
        pieces = [state[name] for state in states]
        whole = pieces[0].shape[0] * len(pieces)
        dim, parts = _how_split(name, pieces[0].new_empty(whole, 0), layout, splits_experts)
        if dim is None:
            if any(not torch.equal(pieces[0], piece) for piece in pieces[1:]):
                raise ValueError(f"{name} must be the same on every tensor-parallel rank, got different values")
            merged[name] = pieces[0]
        else:
            merged[name] = join_from_ranks(pieces, parts) if parts else torch.cat(pieces, dim)
    return merged


def _same_names(states: Sequence[Tensors]) -> Iterable[str]:
    for state in states[1:]:
        if state.keys() != states[0].keys():
            different = sorted(state.keys() ^ states[0].keys())
            raise ValueError(f"shards must have the same names, got {some(different)} on some ranks only")
    return states[0]


_FIRST_DIMENSION = (
    "word_embeddings.weight",
    "output_layer.weight",
    "linear_qkv.weight",
    "A_log",
    "dt_bias",
    "eh_proj.weight",
)
_SECOND_DIMENSION = ("out_proj.weight", "linear_proj.weight", "linear_fc2.weight")
_REPLICATED = ("norm.weight", "layer_norm_weight", "router.weight", "gate_weight")


def _how_split(
    name: str, whole: torch.Tensor, layout: Layout, splits_experts: bool
) -> tuple[int | None, tuple[int, ...]]:
    """(dimension split over ranks or None if replicated, rows of the parts that are split one by one)."""
    kind = re.sub(r"weight\d+$", "weight", name)
    if ".experts." in name and not splits_experts:
        return None, ()
    if kind.endswith("self_attention.in_proj.weight"):
        return 0, layout.gdn_heads.projection
    if kind.endswith("self_attention.conv1d.weight"):
        return 0, layout.gdn_heads.convolution
    if kind.endswith("linear_fc1.weight"):
        return 0, (whole.shape[0] // 2,) * 2
    if kind.endswith(_FIRST_DIMENSION):
        return 0, ()
    if kind.endswith(_SECOND_DIMENSION):
        return 1, ()
    if kind.endswith(_REPLICATED):
        return None, ()
    raise ValueError(f"names must be those of a Megatron GPTModel with Gated DeltaNet layers, got {name}")
