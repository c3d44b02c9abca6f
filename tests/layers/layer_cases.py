"""A small Gated DeltaNet, whole and split over ranks, for the tests of the layer."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as MegatronGatedDeltaNet
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.ssm.gated_delta_net import common as megatron_common
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from qla_megatron.layers import GatedDeltaNet
from qla_megatron.layers.norms import RMSNorm

HIDDEN, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 64, 8, 16, 16, 8  # 8 key heads: tensor parallel size 8 divides
QUERIES, VALUES = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
PARTS = {  # rows of the fused tensors, part by part
    "in_proj.weight": (QUERIES, QUERIES, VALUES, VALUES, VALUE_HEADS, VALUE_HEADS),
    "conv1d.weight": (QUERIES, QUERIES, VALUES),
    "conv1d.bias": (QUERIES, QUERIES, VALUES),
    "in_proj.bias": (QUERIES, QUERIES, VALUES, VALUES, VALUE_HEADS, VALUE_HEADS),
    "A_log": (VALUE_HEADS,),
    "dt_bias": (VALUE_HEADS,),
}
WHOLE = {  # shapes of the whole layer's parameters
    "in_proj.weight": (sum(PARTS["in_proj.weight"]), HIDDEN),
    "in_proj.bias": (sum(PARTS["in_proj.weight"]),),
    "conv1d.weight": (sum(PARTS["conv1d.weight"]), 1, 4),
    "conv1d.bias": (sum(PARTS["conv1d.weight"]),),
    "A_log": (VALUE_HEADS,),
    "dt_bias": (VALUE_HEADS,),
    "out_norm.weight": (VALUE_DIM,),
    "out_proj.weight": (HIDDEN, VALUES),
    "out_proj.bias": (HIDDEN,),
}
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["gdn_norm_out"]}
COLUMNS = ("out_proj.weight",)  # split over columns; what is in neither table is replicated


def make_config(**changes: Any) -> TransformerConfig:
    """The layer's configuration, float32, made on the CPU."""
    settings: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 8,
        "num_query_groups": 8,
        "kv_channels": 16,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [1],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": KEY_DIM,
        "linear_value_head_dim": VALUE_DIM,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": True,
        "layernorm_epsilon": 1e-6,
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_output_gate": True,
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "transformer_impl": "local",
    }
    return TransformerConfig(**(settings | changes))


@functools.cache
def alone() -> ProcessGroupCollection:
    """Groups of this rank alone, for the whole layer beside the split one. A collective at first call."""
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return ProcessGroupCollection(tp=own, cp=own)


def split_groups() -> ProcessGroupCollection:
    """The groups that Megatron was initialised with."""
    return ProcessGroupCollection(
        tp=parallel_state.get_tensor_model_parallel_group(), cp=parallel_state.get_context_parallel_group()
    )


def make_layer(config: TransformerConfig, groups: ProcessGroupCollection | None, **arguments: Any) -> GatedDeltaNet:
    """The layer from local modules."""
    submodules = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=RMSNorm, out_proj=RowParallelLinear)
    return GatedDeltaNet(config, submodules, layer_number=1, pg_collection=groups, **arguments)


def make_megatrons_layer(
    config: TransformerConfig, groups: ProcessGroupCollection, **arguments: Any
) -> torch.nn.Module:
    """Megatron's own layer, on its torch rule (`deterministic_mode`) and a stand-in for the one function of
    flash-linear-attention that it calls even so."""
    megatron_common.HAVE_FLA, megatron_common.l2norm = True, _l2norm
    submodules = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=RMSNorm, out_proj=RowParallelLinear)
    return MegatronGatedDeltaNet(config, submodules, layer_number=1, pg_collection=groups, **arguments)


def _l2norm(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim, keepdim=True) + eps)


def random_weights(seed: int = 0) -> dict[str, Tensor]:
    """Weights for a whole layer that leave no part of it idle: every gate open, every norm weight different."""
    generator = torch.Generator().manual_seed(seed)
    scale = {"conv1d.weight": 0.5, "A_log": 1.0, "dt_bias": 1.0, "out_norm.weight": 0.5}
    return {name: torch.randn(shape, generator=generator) * scale.get(name, 0.15) for name, shape in WHOLE.items()}


def share(name: str, whole: Tensor, rank: int, ranks: int) -> Tensor:
    """What tensor parallel rank `rank` of `ranks` holds of a whole parameter."""
    if name in COLUMNS:
        return whole.chunk(ranks, dim=1)[rank]
    if name in PARTS:
        return torch.cat([part.chunk(ranks)[rank] for part in whole.split(PARTS[name])])
    return whole


def load(layer: torch.nn.Module, weights: dict[str, Tensor], rank: int = 0, ranks: int = 1) -> None:
    """Give the layer its share of the whole weights."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(share(name, weights[name], rank, ranks))


def sum_replicated_gradients(layer: torch.nn.Module, config: TransformerConfig) -> None:
    """What Megatron does with the gradients of replicated parameters at the end of a step (finalize_model_grads)."""
    layer.ddp_config = torch.nn.Module()
    layer.ddp_config.use_megatron_fsdp = False
    _allreduce_non_tensor_model_parallel_grads([layer], config, parallel_state.get_tensor_model_parallel_group())


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative L2 error in float64."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Equal shapes, and a relative L2 error below `tolerance`."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    error = relative_error(actual, expected)
    assert error < tolerance, f"{what}: relative error {error:.2e}, tolerance {tolerance:.0e}"


def packed(lengths: Sequence[int], padded: Sequence[int] | None = None, **changes: Any) -> PackedSeqParams:
    """Documents of these lengths; with `padded`, the room that each takes."""

    def offsets(sizes: Sequence[int]) -> Tensor:
        return torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)

    room = None if padded is None else offsets(padded)
    longest = max(padded or lengths)
    return PackedSeqParams(
        **{
            "qkv_format": "thd",
            "cu_seqlens_q": offsets(lengths),
            "cu_seqlens_kv": offsets(lengths),
            "cu_seqlens_q_padded": room,
            "cu_seqlens_kv_padded": room,
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
            **changes,
        }
    )
