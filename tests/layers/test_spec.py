"""Specs: which modules stand where, with Transformer Engine and without, and models built from them."""

import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer_cases import assert_close, make_config, packed
from megatron.core import parallel_state
from megatron.core.models.gpt import experimental_attention_variant_module_specs as megatron_specs
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid import hybrid_layer_specs
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as MegatronGatedDeltaNet
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.spec_utils import ModuleSpec

from qla_megatron.layers import GatedDeltaNet, spec
from qla_megatron.layers.norms import RMSNorm
from qla_megatron.testing.distributed import run_ranks

TOLERANCE = 1e-5  # float32
VOCABULARY, TOKENS = 96, 64
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_shared_expert_gate": True,
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}


def four_layers(**changes: Any) -> TransformerConfig:
    """Three Gated DeltaNet layers and one of full attention."""
    return make_config(**{"num_layers": 4, "linear_attention_freq": 4, "ffn_hidden_size": 96, **changes})


def gpt(config: TransformerConfig, **arguments: Any) -> GPTModel:
    """GPTModel on our block spec."""
    return GPTModel(
        config,
        spec.gpt_block_spec(config),
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        position_embedding_type="rope",
        rotary_percent=0.25,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        **arguments,
    )


def hybrid(config: TransformerConfig, pattern: str) -> HybridModel:
    """HybridModel on our stack spec."""
    return HybridModel(
        config,
        spec.hybrid_stack_spec,
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        hybrid_layer_pattern=pattern,
        position_embedding_type="rope",
        rotary_percent=0.25,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def randomise(model: torch.nn.Module) -> None:
    """Weights that depend on a parameter's shape and place alone, so that two model classes get the same."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def losses(model: torch.nn.Module, params: PackedSeqParams | None = None) -> torch.Tensor:
    """Loss per token on fixed tokens."""
    tokens = torch.randint(VOCABULARY, (1, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(TOKENS)[None]
    extra = {} if params is None else {"packed_seq_params": params}
    return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:], **extra)


# --- which modules ---


def test_layers_follow_the_pattern() -> None:
    run_ranks(_check_pattern, 1)


def _check_pattern() -> None:
    for config in (four_layers(), SimpleNamespace(transformer=four_layers())):
        mixers = [layer.submodules.self_attention.module for layer in spec.gpt_block_spec(config).layer_specs]
        assert mixers == [GatedDeltaNet] * 3 + [SelfAttention]
    later = four_layers()
    later.experimental_attention_variant = "gdn"
    assert spec.gpt_block_spec(later).layer_specs[0].submodules.self_attention.module is GatedDeltaNet
    block = spec.gpt_block_spec(four_layers(linear_attention_freq=[0, 1, 1, 0], moe_layer_freq=[1, 0, 1, 0], **MOE))
    kinds = [layer.submodules.mlp.func is MoELayer for layer in block.layer_specs]
    assert kinds == [True, False, True, False]
    assert block.layer_specs[0].submodules.self_attention.module is SelfAttention


def test_specs_refuse_what_they_cannot_build() -> None:
    run_ranks(_check_refusals, 1)


def _check_refusals() -> None:
    config = four_layers()
    config.experimental_attention_variant = "dsa"
    with pytest.raises(ValueError, match=r"experimental_attention_variant must be one of .*'gdn'.*got 'dsa'"):
        spec.gpt_block_spec(config)
    config = four_layers()
    config.linear_attention_freq = None
    with pytest.raises(ValueError, match="linear_attention_freq must be given"):
        spec.gpt_block_spec(config)
    config = four_layers()
    config.transformer_impl = "inference_optimized"
    with pytest.raises(NotImplementedError, match=r"transformer_impl must be .*got 'inference_optimized'"):
        spec.gpt_block_spec(config)
    config = four_layers(**MOE)
    config.moe_grouped_gemm = True
    with pytest.raises(NotImplementedError, match="moe_grouped_gemm needs Transformer Engine"):
        spec.gpt_block_spec(config)
    with pytest.raises(NotImplementedError, match="hybrid_layer_pattern asks for mamba_layer"):
        hybrid(four_layers(), "M-")


def test_missing_transformer_engine_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(spec, "HAVE_TE", False)
    spec._say_that_transformer_engine_is_missing.cache_clear()
    config = SimpleNamespace(transformer_impl="transformer_engine")
    with caplog.at_level(logging.WARNING, logger=spec.logger.name):
        assert not spec.uses_transformer_engine(config)
        assert not spec.uses_transformer_engine(config)
    assert [r.getMessage() for r in caplog.records] == [
        "transformer_impl is 'transformer_engine', but Transformer Engine is not installed: the layers are made of "
        "Megatron's parallel linears and this package's RMSNorm and attention (transformer_impl='local')"
    ]


def test_pipeline_stages_share_the_layers_out() -> None:
    run_ranks(_check_pipeline, 2, pipeline_parallel=2)


def _check_pipeline() -> None:
    stage = parallel_state.get_pipeline_model_parallel_rank()

    def kinds(block: Any) -> list[type]:
        return [layer.submodules.self_attention.module for layer in block.layer_specs]

    plain = four_layers(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    assert kinds(spec.gpt_block_spec(plain)) == [[GatedDeltaNet] * 2, [GatedDeltaNet, SelfAttention]][stage]
    virtual = four_layers(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, pipeline_dtype=torch.float32
    )
    chunks = [kinds(spec.gpt_block_spec(virtual, vp_stage=vp)) for vp in (0, 1)]
    assert chunks == [[[GatedDeltaNet]] * 2, [[GatedDeltaNet], [SelfAttention]]][stage]
    layout = four_layers(
        pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout=[["embedding", "decoder"], ["decoder"] * 3 + ["loss"]],
        pipeline_dtype=torch.float32,
    )
    expected = [[GatedDeltaNet], [GatedDeltaNet, GatedDeltaNet, SelfAttention]]
    assert kinds(spec.gpt_block_spec(layout)) == expected[stage]


# --- models ---


@pytest.mark.parametrize("moe", [False, True])
def test_gpt_and_hybrid_models_agree(moe: bool) -> None:
    run_ranks(_check_models, 1, moe)


def _check_models(moe: bool) -> None:
    changes = MOE if moe else {}
    one, other = gpt(four_layers(**changes)), hybrid(four_layers(**changes), "GEGEGE*E" if moe else "G-G-G-*-")
    assert isinstance(other.decoder.final_norm, RMSNorm)
    results = []
    for model in (one, other):
        randomise(model)
        loss = losses(model)
        loss.mean().backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results, strict=True):
        assert_close(a, b, TOLERANCE, "GPTModel and HybridModel")


def test_full_recomputing_changes_no_bit() -> None:
    run_ranks(_check_full_recompute, 1)


def _check_full_recompute() -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    results = []
    for changes in ({}, full):
        model = gpt(four_layers(**changes)).train()
        randomise(model)
        loss = losses(model, packed([24, 40]))
        loss.mean().backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


def test_multi_token_prediction() -> None:
    run_ranks(_check_mtp, 1)


def _check_mtp() -> None:
    config = four_layers(mtp_num_layers=1)
    block = spec.mtp_block_spec(config)
    inner = block.layer_specs[0].submodules.mtp_model_layer
    assert inner.submodules.self_attention.module is SelfAttention
    assert block.layer_specs[0].submodules.enorm is RMSNorm
    assert spec.mtp_block_spec(four_layers()) is None
    model = gpt(config, mtp_block_spec=block)
    randomise(model)
    losses(model).mean().backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for p in model.mtp.parameters())
    hybrid_model = hybrid(four_layers(mtp_num_layers=1), "G-G-G-*-/*-")
    assert isinstance(hybrid_model.mtp.layers[0].enorm, RMSNorm)
    losses(hybrid_model).mean().backward()


def test_multi_token_prediction_stops_at_documents() -> None:
    run_ranks(_check_packed_mtp, 1)


def _check_packed_mtp() -> None:
    """Its loss over a pack is that of each document alone; in none does the last token have one to predict."""
    config = four_layers(mtp_num_layers=1)
    model = gpt(config, mtp_block_spec=spec.mtp_block_spec(config)).train()
    randomise(model)
    lengths = [24, 40]
    tokens, labels = torch.randint(VOCABULARY, (2, 1, TOKENS), generator=torch.Generator().manual_seed(1))

    def loss(part: slice, params: PackedSeqParams | None = None) -> torch.Tensor:
        MTPLossLoggingHelper.tracker.clear()
        positions, mask = torch.arange(TOKENS)[None, part], torch.ones_like(tokens[:, part], dtype=torch.float32)
        extra = {} if params is None else {"packed_seq_params": params}
        model(tokens[:, part], positions, None, labels=labels[:, part], loss_mask=mask, **extra)
        return MTPLossLoggingHelper.tracker["loss_values"].clone()

    first, second = loss(slice(lengths[0])), loss(slice(lengths[0], TOKENS))
    expected = (first * (lengths[0] - 1) + second * (lengths[1] - 1)) / (TOKENS - 2)
    assert_close(loss(slice(TOKENS), packed(lengths)), expected, TOLERANCE, "loss")
    assert (loss(slice(TOKENS)) - expected).abs() > 1e-3


def test_checkpoint_keys_are_those_of_transformer_engine() -> None:
    run_ranks(_check_keys, 1)


def _check_keys() -> None:
    keys = {getattr(value, "key", name) for name, value in gpt(four_layers()).sharded_state_dict().items()}
    for layer in range(3):
        assert f"decoder.layers.{layer}.self_attention.in_proj.layer_norm_weight" in keys
        assert f"decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight" in keys
    assert "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight" in keys
    assert not [key for key in keys if "input_layernorm" in key or "pre_mlp_layernorm" in key]


# --- Transformer Engine, stood in for ---


class NormedColumnParallelLinear(ColumnParallelLinear):
    """What Transformer Engine's fused module is to Megatron: a norm inside the linear, under its parameter name."""

    def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        norm = RMSNorm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.layer_norm_weight, self.norm_forward = norm.weight, norm.forward

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(self.norm_forward(x))


class StandInProvider(spec.LocalBackend):
    """Transformer Engine's provider of modules, as far as the specs here ask it."""

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormedColumnParallelLinear


@contextlib.contextmanager
def stand_in_transformer_engine() -> Iterator[None]:
    """Specs and Megatron's spec functions find Transformer Engine installed, with the modules above."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "HAVE_TE", True)
        for module in (megatron_specs, gpt_layer_specs):
            patch.setattr(module, "HAVE_TE", True)
            patch.setattr(module, "TESpecProvider", StandInProvider, raising=False)
        yield


def test_transformer_engine_specs() -> None:
    run_ranks(_check_transformer_engine_spec, 1)


def _check_transformer_engine_spec() -> None:
    with stand_in_transformer_engine():
        config = four_layers(transformer_impl="transformer_engine")
        block = spec.gpt_block_spec(config)
        gdn = block.layer_specs[0].submodules
        assert gdn.self_attention.module is GatedDeltaNet
        assert gdn.self_attention.submodules.in_proj is NormedColumnParallelLinear
        assert gdn.input_layernorm is IdentityOp
        assert block.layer_specs[3].submodules.self_attention.module is SelfAttention
        model, local = gpt(config), gpt(four_layers())
        norms = "self_attention.in_proj.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"
        assert {name.split(".", 3)[3] for name, _ in model.named_parameters() if "layers.0" in name} >= set(norms)
        # A checkpoint of one loads into the other: the same tensors under the same keys.
        one, other = (
            {v.key: v.data for v in m.sharded_state_dict().values() if isinstance(v.data, torch.Tensor)}
            for m in (model, local)
        )
        assert one.keys() == other.keys()
        randomise(model)
        with torch.no_grad():
            for key, tensor in one.items():
                other[key].copy_(tensor)
        assert_close(losses(local).detach(), losses(model).detach(), TOLERANCE, "local and fused modules")


# --- swapping ---


def test_swap_is_pure() -> None:
    run_ranks(_check_swap, 1)


def _check_swap() -> None:
    with stand_in_transformer_engine():
        config = four_layers(transformer_impl="transformer_engine")
        block = megatron_specs.get_transformer_block_with_experimental_attention_variant_spec(config)
    swapped = spec.swap_gdn(block)
    for before, after in zip(block.layer_specs[:3], swapped.layer_specs[:3], strict=True):
        assert before.submodules.self_attention.module is MegatronGatedDeltaNet
        assert after.submodules.self_attention.module is GatedDeltaNet
        assert after.submodules.self_attention.submodules == before.submodules.self_attention.submodules
        assert after.submodules.self_attention.metainfo == before.submodules.self_attention.metainfo
    assert swapped.layer_specs[3] == block.layer_specs[3]
    assert spec.swap_gdn(swapped) == swapped
    for module in (MegatronGatedDeltaNet.__module__, "megatron.core.ssm.gated_delta_net"):
        assert spec.swap_gdn(ModuleSpec(module=(module, "GatedDeltaNet"))).module is GatedDeltaNet
    ours = ModuleSpec(module=("qla_megatron.layers", "GatedDeltaNet"))
    assert spec.swap_gdn(ours) == ours
    assert spec.swap_gdn([MegatronGatedDeltaNet, RowParallelLinear]) == [GatedDeltaNet, RowParallelLinear]
    assert spec.swap_gdn(None) is None
    stack = hybrid_layer_specs.hybrid_stack_spec
    assert spec.swap_gdn(stack).submodules.gdn_layer.submodules.self_attention.module is GatedDeltaNet
    assert stack.submodules.gdn_layer.submodules.self_attention.module is MegatronGatedDeltaNet
    with pytest.raises(TypeError, match=r"spec must be a ModuleSpec.*got function"):
        spec.swap_gdn(spec.gpt_block_spec)
