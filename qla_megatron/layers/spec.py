"""Layer specs of Qwen3.5-like models for GPTModel and HybridModel, with or without Transformer Engine.

    --spec qla_megatron.layers.spec gpt_block_spec        (GPTModel)
    --spec qla_megatron.layers.spec hybrid_stack_spec     (HybridModel)

Where the configuration's `transformer_impl` is "transformer_engine" and Transformer Engine is installed, the specs are
Megatron's own with our Gated DeltaNet in place of Megatron's. Otherwise they are made of Megatron's parallel linears,
our RMSNorm and our core attention; where Transformer Engine was asked for and is missing, that is logged.

Checkpoints of both have the same keys: Transformer Engine keeps a norm's weight in the linear behind it, and the local
layers save it under that name.
"""

import dataclasses
import functools
import logging
from importlib import import_module
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as megatron_specs
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_mtp_block_spec_for_backend,
    get_mlp_module_spec_for_backend,
)
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid import hybrid_layer_specs
from megatron.core.models.hybrid.hybrid_block import HybridStack as MegatronHybridStack
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as MegatronGatedDeltaNet
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from qla_megatron.layers.attention import CoreAttention
from qla_megatron.layers.gated_delta_net import GatedDeltaNet
from qla_megatron.layers.norms import RMSNorm

logger = logging.getLogger(__name__)

GDN_VARIANTS = ("gated_delta_net", "gdn")  # Megatron's name, and the shorter one that later versions take

# Where Transformer Engine keeps the weight of a norm that it fuses with the linear behind it.
GDN_NORM_KEYS = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
ATTENTION_NORM_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
MLP_NORM_KEYS = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def gpt_block_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage for GPTModel.

    `linear_attention_freq` places full attention among Gated DeltaNet layers, `moe_layer_freq` mixtures of experts
    among dense MLPs (with `num_moe_experts`).

    Args:
        config: Megatron's TransformerConfig, or a model configuration that holds one as `transformer`.
        vp_stage: number of this model chunk under virtual pipeline parallelism.

    Raises:
        ValueError: the configuration names no Gated DeltaNet, or no place for it.
        NotImplementedError: without Transformer Engine, what needs it.
    """
    config = getattr(config, "transformer", config)
    if config.experimental_attention_variant not in GDN_VARIANTS:
        raise ValueError(
            f"experimental_attention_variant must be one of {GDN_VARIANTS}, "
            f"got {config.experimental_attention_variant!r}"
        )
    if config.linear_attention_freq is None:
        raise ValueError(
            "linear_attention_freq must be given: N for one full-attention layer in N, or a list, got None"
        )
    if uses_transformer_engine(config):
        block = megatron_specs.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
        return swap_gdn(block)
    layers = local_layer_specs(config)
    if config.pipeline_model_parallel_layout is not None:
        here = config.pipeline_model_parallel_layout.get_layer_id_list(LayerType.decoder, vp_stage=vp_stage)
    else:
        offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
        here = range(offset, offset + get_num_layers_to_build(config, vp_stage=vp_stage))
    return TransformerBlockSubmodules(layer_specs=[layers[i] for i in here], layer_norm=RMSNorm)


def mtp_block_spec(config: Any, vp_stage: int | None = None) -> MultiTokenPredictionBlockSubmodules | None:
    """The multi-token prediction layers of this stage for GPTModel, whose inner layer is like the model's last one.

    That has to be full attention, as Megatron asks. None where `mtp_num_layers` is not set or another stage has them.
    Megatron 0.19's own builder refuses Gated DeltaNet models here: get_gpt_decoder_layer_specs asserts that there is no
    attention variant.
    """
    config = getattr(config, "transformer", config)
    if not config.mtp_num_layers:
        return None
    if uses_transformer_engine(config):
        backend = megatron_specs._get_backend_spec_provider(config)
        layers = megatron_specs.get_transformer_layer_with_experimental_attention_variant_spec(config, backend)
        return swap_gdn(get_gpt_mtp_block_spec_for_backend(config, layers[-1], backend, vp_stage=vp_stage))
    return get_gpt_mtp_block_spec_for_backend(config, local_layer_specs(config)[-1], LocalBackend(), vp_stage=vp_stage)


def uses_transformer_engine(config: TransformerConfig) -> bool:
    """Whether the layers are made of Transformer Engine's modules. Says so once where it is wanted and missing.

    Raises:
        NotImplementedError: `transformer_impl` is neither "transformer_engine" nor "local".
    """
    if config.transformer_impl not in ("transformer_engine", "local"):
        raise NotImplementedError(
            f"transformer_impl must be 'transformer_engine' or 'local', got {config.transformer_impl!r}"
        )
    if config.transformer_impl == "transformer_engine" and not HAVE_TE:
        _say_that_transformer_engine_is_missing()
    return config.transformer_impl == "transformer_engine" and HAVE_TE


@functools.cache
def _say_that_transformer_engine_is_missing() -> None:
    logger.warning(
        "transformer_impl is 'transformer_engine', but Transformer Engine is not installed: the layers are made of "
        "Megatron's parallel linears and this package's RMSNorm and attention (transformer_impl='local')"
    )


# --- swapping ---


def swap_gdn(spec: Any) -> Any:
    """`spec` with Megatron's GatedDeltaNet replaced by ours; a new object, the given one stays as it is.

    Args:
        spec: a ModuleSpec, a dataclass of submodules (TransformerBlockSubmodules, HybridStackSubmodules, ...), a module
            class, or a list of these; None stays None.

    Raises:
        TypeError: a function, which has to be called first: swap what it returns.
    """
    if isinstance(spec, (list, type, ModuleSpec)) or dataclasses.is_dataclass(spec) or spec is None:
        return _swapped(spec, {})
    raise TypeError(
        f"spec must be a ModuleSpec, a dataclass of submodules, a class or a list, got {type(spec).__name__}"
    )


def _swapped(spec: Any, done: dict[int, Any]) -> Any:
    """`done` keeps layers that share one spec sharing one."""
    if id(spec) in done:
        return done[id(spec)]
    result = spec
    is_path = isinstance(spec, tuple) and spec[1:] == ("GatedDeltaNet",)
    if (getattr(import_module(spec[0]), spec[1]) if is_path else spec) is MegatronGatedDeltaNet:
        result = GatedDeltaNet
    elif isinstance(spec, list):
        result = [_swapped(item, done) for item in spec]
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        result = dataclasses.replace(spec, **{name: _swapped(value, done) for name, value in fields.items()})
    done[id(spec)] = result
    return result


# --- layers without Transformer Engine ---


class LocalBackend(LocalSpecProvider):
    """Megatron's local modules, except its norm and attention: they know no sequence parallelism and no packing."""

    def layer_norm(self, rms_norm: bool = True, for_qk: bool = False, has_residual: bool = False) -> Any:
        """Our RMSNorm, whatever is asked for: Megatron's MTP asks for the default norm."""
        return RMSNorm

    def core_attention(self) -> type:
        """Our core attention."""
        return CoreAttention


def local_layer_specs(config: TransformerConfig) -> list[ModuleSpec]:
    """Every layer of the model, of all pipeline stages, from local modules."""
    _refuse_what_needs_transformer_engine(config)
    is_linear = megatron_specs.get_linear_attention_pattern(config)
    make = {True: gdn_layer, False: attention_layer}
    return [make[bool(linear)](config, is_moe) for linear, is_moe in zip(is_linear, is_moe_layer(config), strict=True)]


def is_moe_layer(config: TransformerConfig) -> list[bool]:
    """Which layers of the model are mixtures of experts."""
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    return [bool(moe) for moe in megatron_specs.get_moe_layer_pattern(config)]


def gdn_layer(config: TransformerConfig, is_moe: bool) -> ModuleSpec:
    """A Gated DeltaNet mixer and an MLP, from local modules."""
    return _layer(gdn_mixer(), GDN_NORM_KEYS, config, is_moe)


def attention_layer(config: TransformerConfig, is_moe: bool) -> ModuleSpec:
    """A full-attention mixer (its output gate follows `attention_output_gate`) and an MLP, from local modules."""
    return _layer(attention_mixer(config), ATTENTION_NORM_KEYS, config, is_moe)


def _layer(mixer: ModuleSpec, norm_keys: dict[str, str], config: TransformerConfig, is_moe: bool) -> ModuleSpec:
    backend = LocalBackend()
    if is_moe:
        mlp = get_moe_module_spec_for_backend(backend, num_experts=config.num_moe_experts)
    else:
        mlp, norm_keys = get_mlp_module_spec_for_backend(backend), norm_keys | MLP_NORM_KEYS
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=mixer,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=norm_keys,
        ),
    )


def gdn_mixer() -> ModuleSpec:
    """Our Gated DeltaNet from local modules; the norm in front of it is the layer's."""
    return ModuleSpec(
        GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=RMSNorm, out_proj=RowParallelLinear),
        metainfo={"fuse_input_layernorm": False},
    )


def attention_mixer(config: TransformerConfig) -> ModuleSpec:
    """Causal self-attention from local modules, with norms over query and key heads where `qk_layernorm` is set."""
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
        metainfo={"fuse_input_layernorm": False},
    )


def _refuse_what_needs_transformer_engine(config: TransformerConfig) -> None:
    for name in ("multi_latent_attention", "moe_grouped_gemm", "qk_l2_norm", "use_kitchen", "fp8", "fp4"):
        if getattr(config, name, None):
            raise NotImplementedError(f"{name} needs Transformer Engine's modules, which the local layers do without")


# --- HybridModel: one layer per mixer and per MLP ---


class HybridStack(MegatronHybridStack):
    """Megatron's hybrid stack, whose final norm is Transformer Engine's even where that is missing: there, ours."""

    def __init__(self, config: TransformerConfig, *args: Any, post_layer_norm: bool = True, **kwargs: Any) -> None:
        own_norm = post_layer_norm and not uses_transformer_engine(config)
        super().__init__(config, *args, post_layer_norm=post_layer_norm and not own_norm, **kwargs)
        if own_norm:
            self.post_layer_norm = True
            if self.post_process:
                self.final_norm = RMSNorm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)


def _local_hybrid_layers(config: TransformerConfig) -> dict[str, ModuleSpec]:
    """The layers that HybridStack builds for the symbols G, *, - and E, from local modules."""
    _refuse_what_needs_transformer_engine(config)
    layers = {}
    for name, mixer, keys in (
        ("gdn_layer", gdn_mixer(), GDN_NORM_KEYS),
        ("attention_layer", attention_mixer(config), ATTENTION_NORM_KEYS),
    ):
        submodules = TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=mixer,
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        )
        layers[name] = ModuleSpec(TransformerLayer, submodules=submodules)
    mlps: list[tuple[str, type, Any, dict[str, str]]] = [
        ("mlp_layer", MLPLayer, get_mlp_module_spec_for_backend(LocalBackend()), MLP_NORM_KEYS)
    ]
    if config.num_moe_experts is not None:
        experts = get_moe_module_spec_for_backend(LocalBackend(), num_experts=config.num_moe_experts)
        mlps.append(("moe_layer", MoETransformerLayer, experts, {}))
    for name, module, mlp, keys in mlps:
        submodules = TransformerLayerSubmodules(
            pre_mlp_layernorm=RMSNorm, mlp=mlp, mlp_bda=get_bias_dropout_add, sharded_state_dict_keys_map=keys
        )
        layers[name] = ModuleSpec(module, submodules=submodules)
    return layers


def _layer_by_config(name: str) -> ModuleSpec:
    """The layer `name` of a hybrid stack, chosen when it is built: a stack's spec is made before there is a config."""

    def build(cls: type, *args: Any, config: TransformerConfig, **kwargs: Any) -> Any:
        if uses_transformer_engine(config):
            chosen = getattr(swap_gdn(hybrid_layer_specs.hybrid_stack_spec.submodules), name)
        else:
            chosen = _local_hybrid_layers(config).get(name)
        if chosen is None:
            raise NotImplementedError(f"hybrid_layer_pattern asks for {name}, which has no local modules")
        return build_module(chosen, *args, config=config, **kwargs)

    return ModuleSpec(type(name, (), {"__new__": build, "__doc__": f"Builds the {name} of a hybrid stack."}))


def _leaf_by_config(name: str, ask: str) -> type:
    """A class that builds what the backend's method `ask` names, for the modules around a hybrid model's MTP layers."""

    def build(cls: type, *args: Any, config: TransformerConfig, **kwargs: Any) -> Any:
        backend: BackendSpecProvider = (
            megatron_specs._get_backend_spec_provider(config) if uses_transformer_engine(config) else LocalBackend()
        )
        return getattr(backend, ask)()(*args, config=config, **kwargs)

    return type(name, (), {"__new__": build, "__doc__": f"Builds the backend's {ask}."})


def _hybrid_mtp_spec() -> ModuleSpec:
    norm, linear = _leaf_by_config("Norm", "layer_norm"), _leaf_by_config("Linear", "column_parallel_linear")
    layer = ModuleSpec(
        MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm, hnorm=norm, eh_proj=linear, mtp_model_layer=None, layer_norm=norm
        ),
    )
    return ModuleSpec(MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer]))


hybrid_stack_spec = ModuleSpec(
    HybridStack,
    submodules=HybridStackSubmodules(
        **{
            f.name: _layer_by_config(f.name)
            for f in dataclasses.fields(HybridStackSubmodules)
            if f.name != "mtp_block_spec"
        },
        mtp_block_spec=_hybrid_mtp_spec(),
    ),
)
