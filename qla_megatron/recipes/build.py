"""Recipe -> Megatron: the one file that knows the names of Megatron's arguments.

`megatron_flags(recipe)` is the command line that Megatron's own parser reads; nothing else decides anything, so that
`run NAME --print` shows the whole truth. Three things have no argument and are set on the model's configuration: the
range that A_log starts from, the backend of the gated delta rule, and the chunked loss.
"""

import copy
import importlib
import importlib.util
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from qla_megatron.recipes.recipe import Recipe


def run_folder(recipe: Recipe, name: str) -> Path:
    """Where the run called `name` writes."""
    return Path(recipe.checkpoint.folder or f"runs/{name}")


def has_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint was completed in a folder of checkpoints."""
    return (folder / "latest_checkpointed_iteration.txt").is_file()


def evaluation_batch(recipe: Recipe) -> int:
    """Held-out sequences that all processes take at a time: one each, or as many as the interleaved schedule needs."""
    p = recipe.parallel
    return p.data * (p.pipeline if p.layers_per_virtual_stage else 1)


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed (it is optional)."""
    return importlib.util.find_spec("transformer_engine") is not None


def hybrid_pattern(recipe: Recipe) -> str:
    """HybridModel's pattern: G is a GDN mixer, * attention, - a dense MLP, E a mixture of experts; | ends a pipeline
    stage, / begins a multi-token prediction block."""
    model, parallel = recipe.model, recipe.parallel
    mlp = "E" if model.num_experts else "-"
    layers = [("*" if (i + 1) % model.attention_interval == 0 else "G") + mlp for i in range(model.num_layers)]
    stage = model.num_layers // parallel.pipeline
    stages = "|".join("".join(layers[i : i + stage]) for i in range(0, model.num_layers, stage))
    return stages + f"/*{mlp}" * model.prediction_layers


def megatron_flags(recipe: Recipe, name: str) -> list[str]:
    """The command line for Megatron's parser. `name` is the run's name, for its folder."""
    flags = _model(recipe) + _experts(recipe) + _parallel(recipe) + _precision(recipe) + _data(recipe, name)
    return flags + _train(recipe, name) + _optimizer(recipe) + _checkpoint(recipe, name)


def _model(recipe: Recipe) -> list[str]:
    m = recipe.model
    flags = [
        *("--hidden-size", m.hidden_size, "--num-attention-heads", m.num_heads, "--kv-channels", m.head_dim),
        *("--group-query-attention", "--num-query-groups", m.num_kv_heads, "--attention-output-gate", "--qk-layernorm"),
        *("--normalization", "RMSNorm", "--apply-layernorm-1p", "--norm-epsilon", m.norm_eps),
        *("--swiglu", "--disable-bias-linear", "--attention-dropout", 0.0, "--hidden-dropout", 0.0),
        *("--position-embedding-type", "rope", "--rotary-percent", m.rotary_fraction, "--rotary-base", m.rotary_base),
        *("--max-position-embeddings", max(m.max_position, recipe.data.sequence_length)),
        *("--linear-num-key-heads", m.gdn_key_heads, "--linear-num-value-heads", m.gdn_value_heads),
        *("--linear-key-head-dim", m.gdn_key_dim, "--linear-value-head-dim", m.gdn_value_dim),
        *("--linear-conv-kernel-dim", m.gdn_conv_width, "--init-method-std", m.init_std),
        *("--vocab-size", m.vocab_size, "--padded-vocab-size", m.padded_vocab_size),
    ]
    if m.ffn_hidden_size is not None:
        flags += ["--ffn-hidden-size", m.ffn_hidden_size]
    if not m.tie_embeddings:
        flags += ["--untie-embeddings-and-output-weights"]
    if m.prediction_layers:
        flags += ["--mtp-num-layers", m.prediction_layers, "--mtp-loss-scaling-factor", m.prediction_loss_weight]
    flags += ["--experimental-attention-variant", "gated_delta_net", "--linear-attention-freq", m.attention_interval]
    if m.stack == "hybrid":
        flags += ["--hybrid-layer-pattern", hybrid_pattern(recipe)]
        flags += ["--spec", "qla_megatron.layers.spec", "hybrid_stack_spec"]
    else:
        flags += ["--num-layers", m.num_layers, "--spec", "qla_megatron.layers.spec", "gpt_block_spec"]
    return [str(flag) for flag in flags]


def _experts(recipe: Recipe) -> list[str]:
    m = recipe.model
    if m.num_experts is None:
        return []
    flags = [
        *("--num-experts", m.num_experts, "--moe-router-topk", m.experts_per_token),
        *("--moe-ffn-hidden-size", m.expert_hidden_size, "--moe-router-dtype", "fp32"),
        # Softmax over the chosen logits equals softmax over all, top-k, renormalised: Qwen's router.
        *("--moe-router-score-function", "softmax", "--moe-token-dispatcher-type", "alltoall"),
        *("--moe-router-load-balancing-type", "global_aux_loss", "--moe-aux-loss-coeff", m.router_balance_weight),
    ]
    if m.shared_expert_hidden_size is not None:
        flags += ["--moe-shared-expert-intermediate-size", m.shared_expert_hidden_size, "--moe-shared-expert-gate"]
    if has_transformer_engine() and recipe.parallel.device != "cpu":
        flags += ["--moe-grouped-gemm"]
    return [str(flag) for flag in flags]


def _parallel(recipe: Recipe) -> list[str]:
    p = recipe.parallel
    flags = ["--tensor-model-parallel-size", p.tensor, "--pipeline-model-parallel-size", p.pipeline]
    flags += ["--context-parallel-size", p.context, "--expert-model-parallel-size", p.expert]
    flags += ["--expert-tensor-parallel-size", 1] if recipe.model.num_experts else []
    flags += ["--sequence-parallel"] if p.sequence else []
    optional = {
        "--num-layers-per-virtual-pipeline-stage": p.layers_per_virtual_stage,
        "--decoder-first-pipeline-num-layers": p.first_stage_layers,
        "--decoder-last-pipeline-num-layers": p.last_stage_layers,
    }
    for flag, value in optional.items():
        flags += [flag, value] if value is not None else []
    flags += ["--distributed-backend", "gloo" if p.device == "cpu" else "nccl"]
    return [str(flag) for flag in flags]


def _precision(recipe: Recipe) -> list[str]:
    flags = ["--bf16"] if recipe.precision.dtype == "bf16" else []
    if recipe.precision.dtype == "bf16":
        in_fp32 = recipe.precision.reduce_gradients_in_fp32
        flags += ["--accumulate-allreduce-grads-in-fp32" if in_fp32 else "--grad-reduce-in-bf16"]
    if recipe.parallel.device != "cpu" and has_transformer_engine():
        return flags
    # These fusions live in Transformer Engine or Apex; Megatron stops, or changes its norm, where they are asked for
    # without.
    fusions = ("gradient-accumulation", "rope", "masked-softmax", "bias-swiglu", "bias-dropout")
    return [
        *flags,
        "--transformer-impl",
        "local",
        *(f"--no-{fusion}-fusion" for fusion in fusions),
        "--no-persist-layer-norm",
    ]


def _data(recipe: Recipe, name: str) -> list[str]:
    d = recipe.data
    flags = ["--seq-length", d.sequence_length, "--split", d.split, "--num-workers", d.workers]
    flags += ["--dataloader-type", "single", "--dataloader-inter-document-masking", "--tokenizer-type", "NullTokenizer"]
    flags += ["--data-cache-path", d.cache or run_folder(recipe, name) / "data_cache"]
    flags += ["--data-path", *d.paths] if d.paths else []
    return [str(flag) for flag in flags]


def _train(recipe: Recipe, name: str) -> list[str]:
    t = recipe.train
    at_a_time = evaluation_batch(recipe)
    flags = [
        *("--micro-batch-size", 1, "--global-batch-size", t.global_batch, "--train-iters", t.steps),
        *("--seed", t.seed, "--calculate-per-token-loss", "--eval-interval", t.evaluate_every),
        *("--eval-iters", t.evaluate_sequences // at_a_time),
        *("--eval-micro-batch-size", 1, "--eval-global-batch-size", at_a_time),
        *("--log-interval", t.log_every, "--exit-signal-handler", "--no-one-logger"),
    ]
    flags += ["--no-check-for-nan-in-loss-and-grad"]  # guard.py's check stops all processes, before the update
    flags += ["--iterations-to-skip", *t.skip_steps] if t.skip_steps else []
    if t.tensorboard or t.wandb:  # Megatron writes to W&B only where it writes for TensorBoard
        flags += ["--tensorboard-dir", run_folder(recipe, name) / "tensorboard"]
    if t.wandb:
        flags += ["--wandb-project", t.wandb, "--wandb-exp-name", name, "--wandb-save-dir", run_folder(recipe, name)]
    if t.stop_after is not None:
        flags += ["--exit-interval", t.stop_after]
    if t.recompute in ("norms", "mlp"):
        flags += ["--recompute-granularity", "selective", "--recompute-modules", "gdn_norm_out"]
        mlp = "moe" if recipe.model.num_experts else "mlp"
        flags += [mlp] if t.recompute == "mlp" else []
    if t.recompute == "full":
        flags += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1]
    return [str(flag) for flag in flags]


def _optimizer(recipe: Recipe) -> list[str]:
    o = recipe.optimizer
    flags = [
        *("--optimizer", "adam", "--lr", o.lr, "--min-lr", o.min_lr, "--lr-warmup-iters", o.warmup_steps),
        *("--lr-decay-style", o.decay, "--lr-decay-iters", o.decay_steps or recipe.train.steps),
        *("--weight-decay", o.weight_decay, "--adam-beta1", o.beta1, "--adam-beta2", o.beta2, "--adam-eps", o.eps),
        *("--clip-grad", o.clip, "--override-opt_param-scheduler"),
    ]
    if o.distributed:
        # Fully reshardable: a checkpoint loads at another tensor or data parallel size. It has to be chosen when
        # saving.
        flags += ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
    if o.overlap:
        flags += ["--overlap-grad-reduce", "--overlap-param-gather"]
    return [str(flag) for flag in flags]


def _checkpoint(recipe: Recipe, name: str) -> list[str]:
    c, own = recipe.checkpoint, run_folder(recipe, name) / "checkpoints"
    flags: list[object] = ["--ckpt-format", "torch_dist"]
    if c.save:
        flags += ["--save", own, "--save-interval", c.save_every]
    if has_checkpoint(own):  # load_step is a step of another run
        flags += ["--load", own, "--exit-on-missing-checkpoint"]
    elif c.load is not None:
        flags += ["--load", c.load, "--exit-on-missing-checkpoint"]
        flags += ["--ckpt-step", c.load_step] if c.load_step is not None else []
    return [str(flag) for flag in flags]


def model_config(recipe: Recipe, args: Namespace) -> Any:
    """Megatron's model configuration from its parsed arguments, with what no argument reaches."""
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

    importlib.import_module("qla_megatron.layers.spec")  # Megatron would answer a failure with layers of its own
    if recipe.model.stack == "hybrid":
        config = hybrid_config_from_args(args)
    else:
        config = gpt_config_from_args(args)
    if recipe.train.chunked_loss:
        config.pre_wrap_hooks.append(partial(_with_chunked_loss, recipe.train.loss_chunk_mib << 20))
    # The layer reads these two where its spec does not give them.
    config.transformer.gdn_A_init_range = recipe.model.gdn_decay_init
    config.transformer.gdn_backend = recipe.model.gdn_backend
    if recipe.model.gdn == "megatron":
        config.transformer_layer_spec = partial(_block_with_megatron_gdn, config.transformer_layer_spec)
    return config


def _with_chunked_loss(chunk_bytes: int, model_chunks: list[Any]) -> list[Any]:
    from qla_megatron.layers.chunked_loss import use_chunked_loss

    for chunk in model_chunks:
        use_chunked_loss(chunk, is_summed=True, chunk_bytes=chunk_bytes)
    return model_chunks


def _block_with_megatron_gdn(block_spec: Any, config: Any, vp_stage: int | None = None) -> Any:
    """Our block with Megatron's own Gated DeltaNet in it: everything else stays the same, for a comparison."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet as MegatronGatedDeltaNet

    from qla_megatron.layers.gated_delta_net import GatedDeltaNet

    block = copy.deepcopy(block_spec(config, vp_stage=vp_stage))
    for layer in block.layer_specs:
        mixer = layer.submodules.self_attention
        if mixer.module is GatedDeltaNet:
            mixer.module = MegatronGatedDeltaNet
            mixer.params = {**mixer.params, "A_init_range": config.transformer.gdn_A_init_range}
    return block
