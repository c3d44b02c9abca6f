"""Recipes that cannot work are refused here, before a process group, a model or a data set exists.

Each rule says what does not fit, why, and what to change. `check(recipe)` looks at the recipe alone; `check_machine`
at the place where it is to run.
"""

import importlib.util
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import cast

from omegaconf import DictConfig, OmegaConf

from qla_megatron.data.corpus import read_info
from qla_megatron.recipes import build
from qla_megatron.recipes.recipe import Recipe

_MODEL_FIELDS_A_RUN_MAY_CHANGE = {
    "gdn", "gdn_backend", "gdn_decay_init", "init_std", "max_position", "router_balance_weight",
    "prediction_loss_weight",
}  # fmt: skip


class RecipeError(ValueError):
    """A recipe that cannot run; the text says why and what to change."""


def alignment(recipe: Recipe) -> int:
    """Tokens that every packed document is rounded up to.

    The same as data.packed.packing_alignment, without the seconds of importing Megatron.
    """
    p = recipe.parallel
    return math.lcm(2 * p.context if p.context > 1 else 1, p.tensor if p.sequence else 1, recipe.data.alignment)


def check(recipe: Recipe) -> None:
    """Refuse a recipe that cannot work anywhere.

    Raises:
        RecipeError: every rule that is broken, one a line.
    """
    faults = [*_numbers(recipe)]
    if not faults:  # the other rules divide by these numbers
        faults = [*_processes(recipe), *_heads(recipe), *_widths(recipe), *_experts(recipe), *_layers(recipe)]
        faults += [*_sequence(recipe), *_data(recipe), *_batch(recipe), *_schedule(recipe)]
    if faults:
        raise RecipeError("\n".join(faults))


def check_machine(recipe: Recipe, environment: Mapping[str, str], *, cuda_devices: int) -> None:
    """Refuse a recipe that cannot run in this place: number of processes, devices, data.

    Args:
        recipe: the recipe.
        environment: torchrun's variables where it started this process; else WORLD_SIZE alone.
        cuda_devices: those that torch sees here.

    Raises:
        RecipeError: every rule that is broken, one a line.
    """
    faults = []
    p, world = recipe.parallel, int(environment.get("WORLD_SIZE", "1"))
    if world != p.gpus:
        faults.append(
            f"parallel.gpus={p.gpus} but {world} process(es) run: start as many as the recipe says, or change it."
        )
    devices = 1 if "RANK" in environment else min(p.gpus, p.gpus_per_node)  # some launchers show each process its own
    if p.device != "cpu" and cuda_devices < devices:
        faults.append(
            f"parallel.device={p.device} needs {devices} CUDA device(s) here and torch finds {cuda_devices}. On a "
            "machine without any, try the demo's recipe, tiny_pretrain_2k_2xcpu."
        )
    if not recipe.data.paths:
        faults.append(
            "data.paths is empty: make .bin/.idx files with tools/pack_dataset.py and pass their prefix, "
            "data.paths=[PREFIX]."
        )
    for path in recipe.data.paths:
        if not _is_weight(path):
            faults += _data_files(path, recipe.model.vocab_size)
    if recipe.model.gdn == "megatron" and importlib.util.find_spec("fla") is None:
        faults.append("model.gdn=megatron needs flash-linear-attention, which is not installed; or take model.gdn=qla.")
    load = recipe.checkpoint.load
    if load is not None and not build.has_checkpoint(Path(load)):
        faults.append(f"checkpoint.load: {load} holds no checkpoint (no latest_checkpointed_iteration.txt in it).")
    elif load is not None and recipe.checkpoint.load_step is not None:
        step_folder = Path(load) / f"iter_{recipe.checkpoint.load_step:07d}"
        if not step_folder.is_dir():
            there = ", ".join(sorted(found.name for found in Path(load).glob("iter_*")))
            faults.append(f"checkpoint.load_step: {step_folder} does not exist; there are {there}.")
    if faults:
        raise RecipeError("\n".join(faults))


def check_folder(recipe: Recipe, folder: Path) -> None:
    """Refuse a run folder whose checkpoints, from which the run would go on, are those of another model.

    Raises:
        RecipeError: it names the fields that differ.
    """
    written = folder / "recipe.yaml"
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"checkpoint.folder: {folder} is a file, not a folder.")
    if not (written.is_file() and build.has_checkpoint(folder / "checkpoints")):
        return
    before, now = cast(DictConfig, OmegaConf.load(written)).get("model", {}), asdict(recipe.model)
    other = [
        f"model.{name} is {before.get(name)} there and {value} here"
        for name, value in now.items()
        if name not in _MODEL_FIELDS_A_RUN_MAY_CHANGE and before.get(name) != value
    ]
    if other:
        raise RecipeError(
            f"{folder} holds checkpoints of another model: {', '.join(other)}. Take another checkpoint.folder."
        )


def _data_files(prefix: str, vocab_size: int) -> Iterator[str]:
    for suffix in (".idx", ".bin"):
        if not Path(f"{prefix}{suffix}").is_file():
            yield (
                f"data.paths: {prefix}{suffix} does not exist; tools/pack_dataset.py makes it from text or JSONL (the "
                "demo's: make demo)."
            )
    if Path(f"{prefix}.json").is_file():
        info = read_info(prefix)
        if info.vocab_size > vocab_size:
            yield (
                f"data.paths: {prefix} was made with tokenizer {info.tokenizer}, of {info.vocab_size} tokens, but "
                f"model.vocab_size={vocab_size}. Take data of the model's own tokenizer, or another vocab_size."
            )


def _is_weight(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _numbers(recipe: Recipe) -> Iterator[str]:
    at_least_one = {
        "model": "hidden_size num_layers num_heads num_kv_heads head_dim attention_interval gdn_value_heads "
        "gdn_key_heads gdn_key_dim gdn_value_dim gdn_conv_width rotary_base max_position vocab_size padded_vocab_size "
        "ffn_hidden_size num_experts experts_per_token expert_hidden_size shared_expert_hidden_size",
        "parallel": "gpus tensor context pipeline expert gpus_per_node layers_per_virtual_stage first_stage_layers "
        "last_stage_layers",
        "data": "sequence_length alignment",
        "train": "steps global_batch seed evaluate_every log_every loss_chunk_mib",
        "optimizer": "decay_steps",
        "checkpoint": "save_every",
    }
    at_least_zero = {
        "model": "norm_eps init_std router_balance_weight prediction_layers prediction_loss_weight",
        "data": "workers",
        "train": "evaluate_sequences",
        "optimizer": "lr min_lr warmup_steps weight_decay beta1 beta2 eps clip",
        "checkpoint": "loss_tolerance",
    }
    for lowest, parts in ((1, at_least_one), (0, at_least_zero)):
        for part, names in parts.items():
            for name in names.split():
                value = getattr(getattr(recipe, part), name)
                if value is not None and not lowest <= value < math.inf:
                    yield f"{part}.{name}={value} must be at least {lowest}."
    for name in ("beta1", "beta2"):
        if getattr(recipe.optimizer, name) >= 1:
            yield f"optimizer.{name}={getattr(recipe.optimizer, name)} must be less than 1."
    low, high = recipe.model.gdn_decay_init
    if not 0 < low < high:
        yield f"model.gdn_decay_init=[{low}, {high}] must be two rising numbers above 0: their logarithms are taken."


def _processes(recipe: Recipe) -> Iterator[str]:
    p = recipe.parallel
    product = p.tensor * p.context * p.pipeline
    if p.gpus % product:
        yield (
            f"parallel.gpus={p.gpus} is not a multiple of tensor x context x pipeline = {p.tensor} x {p.context} x "
            f"{p.pipeline} = {product}, so data-parallel groups come out uneven. Change one of the four."
        )
    if p.gpus > p.gpus_per_node and p.gpus % p.gpus_per_node:
        yield f"parallel.gpus={p.gpus} does not fill machines of parallel.gpus_per_node={p.gpus_per_node}. Change one."
    if p.sequence and p.tensor == 1:
        yield (
            "parallel.sequence=true spreads tokens over tensor-parallel processes, but parallel.tensor=1. Set "
            "it to false."
        )
    if p.device == "cpu" and recipe.precision.dtype != "fp32":
        yield f"precision.dtype={recipe.precision.dtype} is slow and untested on a CPU. Take precision.dtype=fp32."


def _heads(recipe: Recipe) -> Iterator[str]:
    m, p = recipe.model, recipe.parallel
    split = p.tensor * p.context
    if m.gdn_value_heads % m.gdn_key_heads:
        yield f"model.gdn_value_heads={m.gdn_value_heads} is not a multiple of model.gdn_key_heads={m.gdn_key_heads}."
    if split > m.gdn_key_heads:
        yield (
            f"parallel.tensor x parallel.context = {split} is more than the {m.gdn_key_heads} key heads of a GDN "
            "layer, which are spread over them. Lower one; use data or pipeline parallel instead."
        )
    else:
        for name in ("gdn_key_heads", "gdn_value_heads", "num_heads"):
            if getattr(m, name) % split:
                yield (
                    f"model.{name}={getattr(m, name)} cannot be split evenly over parallel.tensor x parallel.context = "
                    f"{p.tensor} x {p.context}. Take sizes whose product divides it."
                )
    if m.num_heads % m.num_kv_heads:
        yield f"model.num_heads={m.num_heads} is not a multiple of model.num_kv_heads={m.num_kv_heads}."
    if m.num_kv_heads % p.tensor and p.tensor % m.num_kv_heads:
        yield (
            f"model.num_kv_heads={m.num_kv_heads} and parallel.tensor={p.tensor}: one must divide the other, so that "
            "every process holds whole heads. Change parallel.tensor."
        )
    here = max(m.num_kv_heads // p.tensor, 1)
    if here % p.context and not build.has_transformer_engine():
        yield (
            f"parallel.context={p.context} exchanges heads, but a tensor-parallel process has {here} of the "
            f"model.num_kv_heads={m.num_kv_heads}. Lower parallel.context or parallel.tensor."
        )


def _widths(recipe: Recipe) -> Iterator[str]:
    m, tensor = recipe.model, recipe.parallel.tensor
    for name in ("ffn_hidden_size", "shared_expert_hidden_size", "padded_vocab_size"):
        size = getattr(m, name)
        if size is not None and size % tensor:
            yield f"model.{name}={size} cannot be split evenly over parallel.tensor={tensor}. Change one of them."
    if m.padded_vocab_size < m.vocab_size:
        yield f"model.padded_vocab_size={m.padded_vocab_size} is less than model.vocab_size={m.vocab_size}. Raise it."
    rotary = m.head_dim * m.rotary_fraction
    if rotary != int(rotary) or int(rotary) % 2:
        yield (
            f"model.rotary_fraction={m.rotary_fraction} of model.head_dim={m.head_dim} is {rotary}, not an even number."
        )


def _experts(recipe: Recipe) -> Iterator[str]:
    m, p = recipe.model, recipe.parallel
    if m.num_experts is None:
        if m.ffn_hidden_size is None:
            yield (
                "model.ffn_hidden_size is missing: a dense model needs it (a mixture of experts sets "
                "model.num_experts)."
            )
        if p.expert > 1:
            yield f"parallel.expert={p.expert} but the model has no experts. Set it to 1."
        return
    if m.expert_hidden_size is None:
        yield "model.expert_hidden_size is missing: the width of one expert."
    if m.ffn_hidden_size is not None:
        yield (
            "model.ffn_hidden_size is for dense models; in a mixture of experts every layer has experts. Set "
            "it to null."
        )
    if m.experts_per_token > m.num_experts:
        yield f"model.experts_per_token={m.experts_per_token} is more than model.num_experts={m.num_experts}."
    if m.num_experts % p.expert:
        yield (
            f"model.num_experts={m.num_experts} cannot be split evenly over parallel.expert={p.expert}. Change "
            "one of them."
        )
    if p.gpus % (p.expert * p.pipeline):
        yield (
            f"parallel.gpus={p.gpus} is not a multiple of expert x pipeline = {p.expert} x {p.pipeline}: the expert "
            "groups of a stage come out uneven. Lower parallel.expert."
        )
    if p.tensor > 1 and not p.sequence:
        yield "A mixture of experts with parallel.tensor > 1 trains only with parallel.sequence=true (Megatron's rule)."


def _layers(recipe: Recipe) -> Iterator[str]:
    m, p = recipe.model, recipe.parallel
    ends = [n for n in (p.first_stage_layers, p.last_stage_layers) if n is not None]
    middle, stages = m.num_layers - sum(ends), p.pipeline - len(ends)
    if p.pipeline == 1 and (ends or p.layers_per_virtual_stage):
        yield (
            "parallel.first_stage_layers, last_stage_layers and layers_per_virtual_stage need "
            "parallel.pipeline > 1. Set null."
        )
    elif ends and p.layers_per_virtual_stage:
        yield (
            "parallel.layers_per_virtual_stage needs even stages, without parallel.first_stage_layers and "
            "last_stage_layers. Set one of them to null."
        )
    elif stages > 0 and (middle < stages or middle % stages):
        yield (
            f"model.num_layers={m.num_layers}: {middle} layer(s) cannot be split evenly over {stages} pipeline "
            "stage(s). Change parallel.pipeline, or set parallel.first_stage_layers and parallel.last_stage_layers."
        )
    elif stages == 0 and middle:
        yield (
            f"parallel.first_stage_layers + parallel.last_stage_layers = {sum(ends)}, not "
            f"model.num_layers={m.num_layers}."
        )
    elif p.layers_per_virtual_stage and (m.num_layers // p.pipeline) % p.layers_per_virtual_stage:
        yield (
            f"parallel.layers_per_virtual_stage={p.layers_per_virtual_stage} does not divide the "
            f"{m.num_layers // p.pipeline} layers of a stage. Change it."
        )
    if m.prediction_layers and m.num_layers % m.attention_interval:
        yield (
            f"model.prediction_layers={m.prediction_layers} are made like the model's last layer, which must be full "
            f"attention: model.num_layers={m.num_layers} is not a multiple of model.attention_interval="
            f"{m.attention_interval}."
        )
    if m.stack == "hybrid" and m.gdn == "megatron":
        yield "model.gdn=megatron is there for model.stack=gpt only. Change one of them."
    if m.stack == "hybrid" and (ends or p.layers_per_virtual_stage):
        yield (
            "model.stack=hybrid takes even pipeline stages only: set first_stage_layers, last_stage_layers and "
            "the virtual stage to null."
        )


def _sequence(recipe: Recipe) -> Iterator[str]:
    align, length = alignment(recipe), recipe.data.sequence_length
    if length % align:
        yield (
            f"data.sequence_length={length} is not a multiple of {align}, to which packed documents are aligned (the "
            "least common multiple of data.alignment, 2 x context and tensor where sequence parallel). The next ones "
            f"are {length // align * align} and {math.ceil(length / align) * align}."
        )
    if length > recipe.model.max_position:
        yield f"data.sequence_length={length} is more than model.max_position={recipe.model.max_position}. Raise that."
    if recipe.data.alignment % 64 and recipe.model.gdn == "qla":
        yield f"data.alignment={recipe.data.alignment} is not a multiple of 64, the chunk of the gated delta rule."


def _data(recipe: Recipe) -> Iterator[str]:
    d = recipe.data
    weights = [_is_weight(path) for path in d.paths]
    if any(weights) and weights != [True, False] * (len(weights) // 2):
        yield (
            f"data.paths=[{', '.join(d.paths)}] must be prefixes, or a weight before each prefix: weight, prefix, "
            "weight, prefix, ..."
        )
    shares = [float(share) if _is_weight(share) else -1.0 for share in d.split.split(",")]
    if len(shares) != 3 or min(shares) < 0:
        yield f"data.split={d.split} must be three numbers: the shares of training, evaluation and test, as in 99,1,0."
        return
    evaluates = recipe.train.evaluate_sequences > 0
    for name, share, is_needed in (("training", shares[0], True), ("evaluation", shares[1], evaluates)):
        if is_needed and not share:
            yield (
                f"data.split={d.split} leaves no documents for {name}. Change it, or train without evaluation "
                "(train.evaluate_sequences=0)."
            )


def _batch(recipe: Recipe) -> Iterator[str]:
    p, t, data = recipe.parallel, recipe.train, max(recipe.parallel.data, 1)
    for name in ("global_batch", "evaluate_sequences"):
        value = getattr(t, name)
        if value % data:
            yield (
                f"train.{name}={value} is not a multiple of the data parallel size {data} (gpus over tensor x "
                "context x pipeline), so the processes would get unequal shares. Change it, or parallel.gpus."
            )
    if p.layers_per_virtual_stage and t.evaluate_sequences % (data * p.pipeline):
        yield (
            f"train.evaluate_sequences={t.evaluate_sequences} is not a multiple of {data} x {p.pipeline}, data x "
            "pipeline parallel size, as the interleaved pipeline schedule needs. Change it."
        )
    if p.layers_per_virtual_stage and (t.global_batch // data) % p.pipeline:
        yield (
            f"The interleaved pipeline schedule needs a multiple of parallel.pipeline={p.pipeline} micro-batches a "
            f"step, got {t.global_batch // data}. Change train.global_batch."
        )


def _schedule(recipe: Recipe) -> Iterator[str]:
    t, o = recipe.train, recipe.optimizer
    if o.warmup_steps >= (o.decay_steps or t.steps):
        yield (
            f"optimizer.warmup_steps={o.warmup_steps} leaves nothing of the {o.decay_steps or t.steps} steps of the "
            "schedule (optimizer.decay_steps, or train.steps). Lower it."
        )
    if recipe.checkpoint.load_step is not None and recipe.checkpoint.load is None:
        yield (
            f"checkpoint.load_step={recipe.checkpoint.load_step} is a step of checkpoint.load, which is not set. The "
            "run folder's own checkpoints go on from the latest."
        )
    if o.min_lr > o.lr:
        yield f"optimizer.min_lr={o.min_lr} is above optimizer.lr={o.lr}. Lower it."
    if t.stop_after is not None and not 1 <= t.stop_after <= t.steps:
        yield f"train.stop_after={t.stop_after} is not a step from 1 to train.steps={t.steps}."
    if o.overlap and not o.distributed:
        yield (
            "optimizer.overlap=true gathers the parameters of a distributed optimizer. Set "
            "optimizer.distributed=true, or overlap=false."
        )
