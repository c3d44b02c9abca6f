"""Hugging Face weights -> Megatron -> back: names, rows, ranks, and the same logits from both models."""

from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

from qla_megatron.layers.hf_shards import merge_tensor_parallel, split_over_tensor_parallel
from qla_megatron.layers.hf_weights import Layout, hf_to_megatron, layout_from_hf, megatron_to_hf
from qla_megatron.layers.spec import gpt_block_spec, mtp_block_spec
from qla_megatron.testing.distributed import run_ranks

# Every size differs from every other, where the model allows it; two value heads a key head, three query heads a group.
SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
}
DENSE = SIZES | {"intermediate_size": 64}
MOE = SIZES | {
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
KINDS = {
    "dense": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, DENSE),
    "moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, MOE),
}


def hugging_face_model(kind: str) -> torch.nn.Module:
    """A random model in float32 whose every tensor is far from its initial value."""
    model_class, config_class, sizes = KINDS[kind]
    config = config_class(**sizes)
    config._attn_implementation = "eager"
    model = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("linear_attn.norm.weight"):
                parameter.copy_(1 + 0.2 * noise.clamp(-2, 4))
            else:
                parameter.copy_(noise * (0.3 if parameter.ndim > 1 else 0.2))
    return model


def with_mtp(hf: dict[str, torch.Tensor], attention_layer: int, packs_experts: bool) -> dict[str, torch.Tensor]:
    """The tensors of a multi-token prediction layer, which transformers does not have, beside those of a model."""
    hidden = hf["model.norm.weight"].shape[0]
    mtp = {
        f"mtp.{name}.weight": torch.randn(hidden) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    mtp["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden)
    prefix = f"model.layers.{attention_layer}."
    for name in [name for name in hf if name.startswith(prefix)]:
        tensor = torch.randn_like(hf[name])
        inner = f"mtp.layers.0.{name.removeprefix(prefix)}"
        if ".experts." not in name or packs_experts:
            mtp[inner] = tensor
            continue
        for e, expert in enumerate(tensor):
            of_expert = inner.replace("experts.", f"experts.{e}.")
            if name.endswith("gate_up_proj"):
                gate, up = expert.chunk(2)
                mtp |= {
                    of_expert.replace("gate_up_proj", f"{n}_proj.weight"): t for n, t in (("gate", gate), ("up", up))
                }
            else:
                mtp[f"{of_expert}.weight"] = expert
    return hf | mtp


def tensors_of(kind: str, packs_mtp_experts: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    model = hugging_face_model(kind)
    hf = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return with_mtp(hf, 3, packs_mtp_experts), model.config.to_dict()


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"fuses_norms": True, "groups_experts": True}, {"padded_vocab_size": 128}],
    ids=["local", "transformer_engine", "padded"],
)
@pytest.mark.parametrize("packs_mtp_experts", [True, False])
def test_there_and_back_is_bitwise(kind: str, changes: dict[str, Any], packs_mtp_experts: bool) -> None:
    hf, config = tensors_of(kind, packs_mtp_experts)
    layout = layout_from_hf(config, hf, **changes)
    assert layout.packs_mtp_experts == (packs_mtp_experts or kind == "dense")
    state = hf_to_megatron(hf, layout)
    assert_same(megatron_to_hf(state | {"decoder.layers.0.mlp._extra_state": None}, layout), hf)
    assert sum(t.numel() for t in state.values()) - sum(t.numel() for t in hf.values()) == 2 * 48 * (
        layout.padded_vocab_size - 90
    )
    for ranks in (1, 2):
        for splits_experts in (False, True):
            shards = split_over_tensor_parallel(state, layout, ranks, splits_experts=splits_experts)
            assert_same(merge_tensor_parallel(shards, layout, splits_experts=splits_experts), state)


def test_names_with_transformer_engine() -> None:
    hf, config = tensors_of("dense")
    names = hf_to_megatron(hf, layout_from_hf(config, hf, fuses_norms=True))
    for name in (
        "decoder.layers.0.self_attention.in_proj.layer_norm_weight",
        "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.3.mlp.linear_fc1.layer_norm_weight",
        "mtp.layers.0.mtp_model_layer.self_attention.linear_qkv.layer_norm_weight",
    ):
        assert name in names
    assert not [name for name in names if "input_layernorm" in name or "pre_mlp_layernorm" in name]
    hf, config = tensors_of("moe")
    names = hf_to_megatron(hf, layout_from_hf(config, hf, fuses_norms=True, groups_experts=True))
    assert "decoder.layers.0.mlp.experts.linear_fc1.weight7" in names
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in names, "experts have no norm of their own"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_holds_its_heads(ranks: int) -> None:
    """Rows of in_proj and conv1d, put together head by head, without the functions under test."""
    hf, config = tensors_of("dense")
    layout = layout_from_hf(config, hf, padded_vocab_size=92)
    shards = split_over_tensor_parallel(hf_to_megatron(hf, layout), layout, ranks)
    qkv, z, b, a = (hf[f"model.layers.1.linear_attn.in_proj_{n}.weight"] for n in ("qkv", "z", "b", "a"))
    convolution = hf["model.layers.1.linear_attn.conv1d.weight"]
    for rank, shard in enumerate(shards):
        key_heads = range(rank * 4 // ranks, (rank + 1) * 4 // ranks)
        value_heads = range(rank * 8 // ranks, (rank + 1) * 8 // ranks)
        query_rows = [h * 16 + i for h in key_heads for i in range(16)]
        value_rows = [h * 16 + i for h in value_heads for i in range(16)]
        rows = query_rows + [64 + row for row in query_rows] + [128 + row for row in value_rows]
        expected = torch.cat([qkv[rows], z[value_rows], b[list(value_heads)], a[list(value_heads)]])
        assert torch.equal(shard["decoder.layers.1.self_attention.in_proj.weight"], expected)
        assert torch.equal(shard["decoder.layers.1.self_attention.conv1d.weight"], convolution[rows])
        assert torch.equal(
            shard["decoder.layers.1.self_attention.A_log"], hf["model.layers.1.linear_attn.A_log"][list(value_heads)]
        )


def test_output_norm_is_not_rounded() -> None:
    hf, config = tensors_of("dense")
    name = "model.layers.0.linear_attn.norm.weight"
    # bfloat16 keeps eight bits: one less than these needs more
    hf[name] = torch.logspace(-9, 2, 16, base=2).bfloat16()
    layout = layout_from_hf(config, hf)
    state = hf_to_megatron(hf, layout)
    assert state["decoder.layers.0.self_attention.out_norm.weight"].dtype == torch.float32
    assert torch.equal(megatron_to_hf(state, layout)[name].bfloat16(), hf[name])


def test_vision_prefix_and_what_may_stay_behind() -> None:
    hf, config = tensors_of("dense")
    vl = {
        name.replace("model.", "model.language_model.", 1): tensor for name, tensor in hf.items() if "mtp" not in name
    }
    vl |= {"model.visual.patch.weight": torch.ones(1)}
    layout = layout_from_hf({"text_config": config}, vl)
    assert layout.hf_prefix == "model.language_model."
    assert not layout.has_mtp
    with pytest.raises(ValueError, match=r"1 more \(model\.visual\.patch\.weight\)"):
        hf_to_megatron(vl, layout)
    state = hf_to_megatron(vl, layout, leave=("model.visual.",))
    del vl["model.visual.patch.weight"]
    assert_same(megatron_to_hf(state, layout), vl)


def test_tied_embeddings() -> None:
    hf, config = tensors_of("dense")
    del hf["lm_head.weight"]
    layout = layout_from_hf(config, hf)
    state = hf_to_megatron(hf, layout)
    assert "output_layer.weight" not in state
    assert_same(megatron_to_hf(state, layout), hf)


def broken(state: dict[str, torch.Tensor], change: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in (state | change).items() if tensor is not None}


def test_errors_name_the_tensor() -> None:
    hf, config = tensors_of("dense")
    layout = layout_from_hf(config, hf)
    z = "model.layers.0.linear_attn.in_proj_z.weight"
    for change, message in (
        ({z: None}, rf"1 missing \({z}\) and 0 more"),
        (
            {"model.layers.0.linear_attn.extra": torch.ones(1)},
            r"0 missing \(none\) and 1 more \(model.layers.0.linear_attn.extra\)",
        ),
        ({z: torch.ones(3, 48)}, rf"shapes that the layout says, got .*{z} \(3, 48\)"),
        ({"model.layers.3.self_attn.k_proj.weight": torch.ones(3, 48)}, r"k_proj.weight \(3, 48\)"),
        ({"lm_head.weight": torch.ones(91, 48)}, r"lm_head.weight \(91, 48\)"),
    ):
        with pytest.raises(ValueError, match=message):
            hf_to_megatron(broken(hf, change), layout)
    state = hf_to_megatron(hf, layout)
    with pytest.raises(ValueError, match="1 missing"):
        megatron_to_hf(broken(state, {"decoder.final_layernorm.weight": None}), layout)
    with pytest.raises(ValueError, match=r"1 more \(decoder.layers.0.unknown\)"):
        megatron_to_hf(state | {"decoder.layers.0.unknown": torch.ones(1)}, layout)
    with pytest.raises(ValueError, match="names must be those of a Megatron GPTModel"):
        split_over_tensor_parallel({"decoder.layers.0.unknown": torch.ones(1)}, layout, 2)
    with pytest.raises(ValueError, match="multiple"):
        split_over_tensor_parallel(state, layout, 3)
    shards = split_over_tensor_parallel(state, layout, 2)
    shards[1]["decoder.final_layernorm.weight"] = torch.zeros(48)
    with pytest.raises(ValueError, match=r"decoder.final_layernorm.weight must be the same on every"):
        merge_tensor_parallel(shards, layout)
    del shards[1]["decoder.final_layernorm.weight"]
    with pytest.raises(ValueError, match="shards must have the same names"):
        merge_tensor_parallel(shards, layout)
    with pytest.raises(ValueError, match="head_dim"):
        layout_from_hf({name: value for name, value in config.items() if name != "head_dim"}, hf)
    with pytest.raises(TypeError, match="fuse_norms"):
        layout_from_hf(config, hf, fuse_norms=True)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(got - expected) / torch.linalg.vector_norm(expected))


def megatron_config(
    config: dict[str, Any], tensor_parallel: int, sequence_parallel: bool, mtp_layers: int = 0
) -> TransformerConfig:
    """The configuration that Qwen models need in Megatron, as a recipe sets it by flags."""
    experts: dict[str, Any] = {}
    if "num_experts" in config:
        experts = {
            "num_moe_experts": config["num_experts"],
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_ffn_hidden_size": config["moe_intermediate_size"],
            "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
            "moe_shared_expert_gate": True,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        }
    return TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config.get("intermediate_size"),
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        attention_output_gate=True,
        qk_layernorm=True,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=4,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=config["linear_num_key_heads"],
        linear_num_value_heads=config["linear_num_value_heads"],
        linear_key_head_dim=config["linear_key_head_dim"],
        linear_value_head_dim=config["linear_value_head_dim"],
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=True,
        layernorm_epsilon=1e-6,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        transformer_impl="local",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        params_dtype=torch.float32,
        mtp_num_layers=mtp_layers or None,
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=sequence_parallel,
        **experts,
    )


def megatron_model(layout: Layout, config: dict[str, Any], settings: TransformerConfig) -> GPTModel:
    return GPTModel(
        config=settings,
        transformer_layer_spec=gpt_block_spec(settings),
        mtp_block_spec=mtp_block_spec(settings),
        vocab_size=layout.padded_vocab_size,
        max_sequence_length=256,
        position_embedding_type="rope",
        rotary_percent=config["rope_parameters"]["partial_rotary_factor"],
        rotary_base=config["rope_parameters"]["rope_theta"],
    ).eval()


def tensor_parallel() -> tuple[int, int]:
    group = parallel_state.get_tensor_model_parallel_group()
    return group.size(), group.rank()


def shapes_of_built_models(splits_experts: bool) -> None:
    """On a rank: the converted tensors have the names and shapes of a built model's, MTP layers too."""
    ranks, rank = tensor_parallel()
    for kind in KINDS:
        hf, config = tensors_of(kind)
        layout = layout_from_hf(config, hf)
        shard = split_over_tensor_parallel(hf_to_megatron(hf, layout), layout, ranks, splits_experts=splits_experts)[
            rank
        ]
        built = megatron_model(layout, config, megatron_config(config, ranks, False, mtp_layers=1)).state_dict()
        expected = {name: t.shape for name, t in built.items() if not name.endswith("_extra_state")}
        assert {name: tensor.shape for name, tensor in shard.items()} == expected


@pytest.mark.parametrize("splits_experts", [False, True])
def test_names_and_shapes_are_those_of_the_model(splits_experts: bool) -> None:
    run_ranks(shapes_of_built_models, 2, splits_experts, expert_tensor_parallel=2 if splits_experts else 1)


def run_converted(
    hf: dict[str, torch.Tensor], config: dict[str, Any], tokens: torch.Tensor, with_sequence: bool, splits_experts: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """On a rank: our GPTModel from converted weights: its share of the logits of `tokens` [B, T], and its weights."""
    ranks, rank = tensor_parallel()
    layout = layout_from_hf(config, hf)
    model = megatron_model(layout, config, megatron_config(config, ranks, with_sequence))
    shards = split_over_tensor_parallel(hf_to_megatron(hf, layout), layout, ranks, splits_experts=splits_experts)
    missing, unexpected = model.load_state_dict(shards[rank], strict=False)
    assert not [name for name in missing + unexpected if not name.endswith("_extra_state")]
    with torch.no_grad():
        return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None).clone(), model.state_dict()


@pytest.mark.parametrize(
    ("kind", "ranks", "length", "sequence_parallel", "splits_experts"),
    [
        ("dense", 1, 75, False, False),  # one chunk and a bit
        ("dense", 2, 200, True, False),  # four chunks, the last one short
        ("moe", 1, 200, False, False),
        ("moe", 2, 75, False, True),
        ("moe", 2, 200, True, False),
    ],
)
def test_both_models_give_the_same_logits(
    kind: str, ranks: int, length: int, sequence_parallel: bool, splits_experts: bool
) -> None:
    model = hugging_face_model(kind)
    hf = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    tokens = torch.randint(0, 90, (2, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
    config = model.config.to_dict()
    arguments = (hf, config, tokens, sequence_parallel, splits_experts)
    results = run_ranks(run_converted, ranks, *arguments, expert_tensor_parallel=ranks if splits_experts else 1)
    layout = layout_from_hf(config, hf)
    merged = merge_tensor_parallel([weights for _, weights in results], layout, splits_experts=splits_experts)
    assert_same(megatron_to_hf(merged, layout), hf)
    got = torch.cat([logits for logits, _ in results], -1)
    assert got.shape == expected.shape
    assert relative_error(got, expected) < 1e-4
    # and no single token is off, as at a chunk's edge; one token alone has the cancellation of one sum
    assert max(relative_error(g, e) for g, e in zip(got.flatten(0, 1), expected.flatten(0, 1), strict=True)) < 1e-3
