"""Every recipe's arguments go through Megatron's own parser and validation and come out as what the recipe says."""

import contextlib
import io
import os
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qla_megatron.recipes import build, catalogue, overrides
from qla_megatron.recipes.recipe import Recipe


def parsed(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Megatron's arguments of a recipe, validated as on Hopper with all its processes."""
    from megatron.training.arguments import parse_args, validate_args

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(major=9, minor=0))
    for name, value in {"WORLD_SIZE": recipe.parallel.gpus, "RANK": 0, "CUDA_DEVICE_MAX_CONNECTIONS": 1}.items():
        monkeypatch.setitem(os.environ, name, str(value))
    monkeypatch.setattr(sys, "argv", ["megatron", *build.megatron_flags(recipe, "test")])
    with contextlib.redirect_stdout(io.StringIO()):
        args = parse_args()
        validate_args(args, {})
    return args


@pytest.mark.parametrize("name", list(catalogue.RECIPES))
def test_arguments_come_out_of_megatrons_parser(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = catalogue.find(name)
    args = parsed(recipe, monkeypatch)
    m, p, t, o = recipe.model, recipe.parallel, recipe.train, recipe.optimizer
    at_a_time = p.data * (p.pipeline if p.layers_per_virtual_stage else 1)
    said = {
        "hidden_size": m.hidden_size, "num_attention_heads": m.num_heads, "num_query_groups": m.num_kv_heads,
        "kv_channels": m.head_dim, "linear_num_key_heads": m.gdn_key_heads, "linear_num_value_heads": m.gdn_value_heads,
        "linear_key_head_dim": m.gdn_key_dim, "linear_value_head_dim": m.gdn_value_dim, "rotary_base": m.rotary_base,
        "linear_conv_kernel_dim": m.gdn_conv_width, "rotary_percent": m.rotary_fraction,
        "layernorm_epsilon": m.norm_eps, "layernorm_zero_centered_gamma": True,
        "padded_vocab_size": m.padded_vocab_size, "untie_embeddings_and_output_weights": not m.tie_embeddings,
        "num_experts": m.num_experts, "attention_output_gate": True, "qk_layernorm": True,
        "tensor_model_parallel_size": p.tensor, "context_parallel_size": p.context, "data_parallel_size": p.data,
        "pipeline_model_parallel_size": p.pipeline, "expert_model_parallel_size": p.expert,
        "sequence_parallel": p.sequence, "bf16": recipe.precision.dtype == "bf16", "micro_batch_size": 1,
        "global_batch_size": t.global_batch, "train_iters": t.steps, "seq_length": recipe.data.sequence_length,
        "eval_iters": t.evaluate_sequences // at_a_time, "lr": o.lr, "min_lr": o.min_lr,
        "lr_warmup_iters": o.warmup_steps,
        "weight_decay": o.weight_decay, "adam_beta2": o.beta2, "clip_grad": o.clip,
        "use_distributed_optimizer": o.distributed, "overlap_param_gather": o.overlap, "calculate_per_token_loss": True,
    }  # fmt: skip
    assert {key: getattr(args, key) for key in said} == said
    layers = m.num_layers * (2 if m.stack == "hybrid" else 1)
    assert args.num_layers == layers
    if m.num_experts:
        assert (args.moe_ffn_hidden_size, args.moe_router_topk) == (m.expert_hidden_size, m.experts_per_token)
        assert args.moe_shared_expert_intermediate_size == m.shared_expert_hidden_size
        assert args.moe_shared_expert_gate
    else:
        assert args.ffn_hidden_size == m.ffn_hidden_size


CHANGED = [  # every optional argument once
    pytest.param("train.recompute=norms", {"recompute_modules": ["gdn_norm_out"]}, id="recompute-norms"),
    pytest.param("train.recompute=mlp", {"recompute_modules": ["gdn_norm_out", "mlp"]}, id="recompute-mlp"),
    pytest.param(
        "model.prediction_layers=2 model.prediction_loss_weight=0.3",
        {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3},
        id="prediction",
    ),
    pytest.param("train.recompute=full", {"recompute_granularity": "full", "recompute_num_layers": 1}, id="recompute"),
    pytest.param(
        "train.tensorboard=true checkpoint.folder=there", {"tensorboard_dir": "there/tensorboard"}, id="tensorboard"
    ),
    pytest.param("train.stop_after=5", {"exit_interval": 5}, id="stop"),
    pytest.param("data.paths=[0.3,a,0.7,b]", {"data_path": ["0.3", "a", "0.7", "b"]}, id="blend"),
    pytest.param("data.cache=there", {"data_cache_path": "there"}, id="cache"),
    pytest.param("checkpoint.save=false", {"save": None}, id="no-save"),
    pytest.param("checkpoint.load=there checkpoint.load_step=7", {"load": "there", "ckpt_step": 7}, id="load"),
    pytest.param(
        "precision.reduce_gradients_in_fp32=false", {"accumulate_allreduce_grads_in_fp32": False}, id="reduce"
    ),
    pytest.param("optimizer.decay_steps=9000 optimizer.decay=linear", {"lr_decay_iters": 9000}, id="decay"),
    pytest.param(
        "parallel.tensor=2 parallel.sequence=true parallel.context=2",
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2},
        id="tensor-and-context",
    ),
    pytest.param(
        "parallel.pipeline=4 parallel.layers_per_virtual_stage=4",
        {"virtual_pipeline_model_parallel_size": 2},
        id="waves",
    ),
    pytest.param("model.tie_embeddings=true", {"untie_embeddings_and_output_weights": False}, id="tied"),
    pytest.param("model.stack=hybrid parallel.pipeline=2", {"num_layers": 64}, id="hybrid-stages"),
]


@pytest.mark.parametrize(("changes", "wanted"), CHANGED)
def test_changed_fields_reach_megatron(
    changes: str, wanted: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = overrides.apply(catalogue.find("qwen3_5_9b_pretrain_4k_8xh200"), changes.split())
    args = parsed(recipe, monkeypatch)
    assert {key: getattr(args, key) for key in wanted} == wanted


def test_checkpoint_of_the_run_folder_goes_before_that_of_another(tmp_path: Path) -> None:
    own = tmp_path / "run"
    changes = [f"checkpoint.folder={own}", "checkpoint.load=elsewhere", "checkpoint.load_step=7"]
    recipe = overrides.apply(catalogue.find("tiny_pretrain_2k_2xcpu"), changes)
    flags = build.megatron_flags(recipe, "test")
    assert flags[flags.index("--load") + 1] == "elsewhere"
    assert flags[flags.index("--ckpt-step") + 1] == "7"
    (own / "checkpoints").mkdir(parents=True)
    (own / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("5")
    flags = build.megatron_flags(recipe, "test")
    assert flags[flags.index("--load") + 1] == f"{own}/checkpoints"
    assert "--ckpt-step" not in flags  # the same command goes on from the latest, not from that step again


def test_hybrid_pattern_is_that_of_the_layers() -> None:
    recipe = catalogue.find("tiny_hybrid_pretrain_2k_2xcpu")
    assert build.hybrid_pattern(recipe) == "G-G-G-*-"
    recipe = overrides.apply(
        recipe, ["model.num_layers=8", "parallel.pipeline=2", "model.num_experts=4", "model.expert_hidden_size=8"]
    )
    assert build.hybrid_pattern(recipe) == "GEGEGE*E|GEGEGE*E"
    recipe = overrides.apply(recipe, ["model.prediction_layers=2"])
    assert build.hybrid_pattern(recipe) == "GEGEGE*E|GEGEGE*E/*E/*E"
