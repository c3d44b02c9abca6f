"""One run on Megatron's own training loop: data, forward step, loss."""

import contextlib
import fcntl
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from qla_megatron.recipes import build, upstream
from qla_megatron.recipes.checks import RecipeError, alignment
from qla_megatron.recipes.progress import Progress, RunStoppedError
from qla_megatron.recipes.recipe import Recipe


def train(recipe: Recipe, name: str, *, rank: int, world: int) -> None:
    """Run the recipe in this process, one of `world`, whose group is described by torchrun's environment variables.

    Prints progress on the last rank (the one that knows the loss with any pipeline) and writes the run folder:
    recipe.yaml, log.jsonl (progress.py), megatron.rank*.log, checkpoints/, and tensorboard/ where it is asked for.

    Raises:
        RecipeError: another run is under way in the folder, there is too little data, or a package is missing.
        RuntimeError: model-parallel groups exist already, which Megatron would take in place of the recipe's.
        SystemExit: Megatron left with an exit code other than 0; its log says why. 3: a guard (guard.py) stopped the
            run, and said why.
    """
    if recipe.train.wandb and importlib.util.find_spec("wandb") is None:
        raise RecipeError(f"train.wandb={recipe.train.wandb} needs the package wandb, which is not installed here.")
    folder = build.run_folder(recipe, name)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder) if rank == 0 else contextlib.nullcontext():
        _train_in(folder, recipe, name, rank=rank, world=world)


def _train_in(folder: Path, recipe: Recipe, name: str, *, rank: int, world: int) -> None:
    if rank == 0:
        (folder / "recipe.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(recipe)), encoding="utf-8")
    upstream.quiet_imports()
    progress = Progress(recipe, folder, sys.stdout, speaks=rank == world - 1)
    stopped, exit_code, had_group = None, 0, torch.distributed.is_initialized()
    with _megatron_output_in(folder / f"megatron.rank{rank}.log"):
        if recipe.parallel.device == "cpu":
            from qla_megatron.testing.platform import use_cpu

            use_cpu()
        upstream.apply()
        hooks = _start(recipe, name, progress)
        try:
            _pretrain(recipe, hooks)
        except SystemExit as exit_of_megatron:  # SIGTERM or train.stop_after: Megatron has saved and leaves by sys.exit
            if exit_of_megatron.code:
                print(
                    f"Megatron gave up; see {folder / f'megatron.rank{rank}.log'}", file=progress.terminal, flush=True
                )
                raise
            stopped = "Stopped"
        except RunStoppedError:  # the guard has said why
            stopped, exit_code = "Stopped", 3
    progress.flush()
    _say_goodbye(recipe, name, progress, hooks, stopped or "Finished")
    if not had_group and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if exit_code:
        raise SystemExit(exit_code)


def _start(recipe: Recipe, name: str, progress: Progress) -> Any:
    from megatron.training.arguments import parse_and_validate_args

    from qla_megatron.recipes.hooks import Hooks

    sys.argv[1:] = build.megatron_flags(recipe, name)
    parse_and_validate_args()
    own = build.run_folder(recipe, name)
    loaded = own if build.has_checkpoint(own / "checkpoints") else None
    if loaded is None and recipe.checkpoint.load is not None:
        loaded = Path(recipe.checkpoint.load).parent
    return Hooks(recipe, progress, loaded)


def _pretrain(recipe: Recipe, hooks: Any) -> None:
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.training import get_args, pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError("model-parallel groups exist already: Megatron would take them in place of the recipe's")
    args = get_args()
    container = pretrain_cfg_container_from_args(args, build.model_config(recipe, args))
    with hooks.installed():
        pretrain(container, data_provider(recipe, hooks), ModelType.encoder_or_decoder, forward_step(recipe, hooks))


def data_provider(recipe: Recipe, hooks: Any) -> Any:
    """Megatron's data-set provider: packed training and held-out documents. Hands the held-out ones to `hooks` too."""
    from megatron.core import parallel_state
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.training import get_args, get_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    from qla_megatron.data.balance import BalancedDataset
    from qla_megatron.data.packed import PackedDataset, PackedDatasetConfig

    def provide(samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        args = get_args()
        blend, blend_per_split = get_blend_and_blend_per_split(args)
        config = PackedDatasetConfig(
            random_seed=args.seed, sequence_length=args.seq_length, blend=blend, blend_per_split=blend_per_split,
            split=args.split, path_to_cache=args.data_cache_path, tokenizer=get_tokenizer(), align=alignment(recipe),
            vocab_size=recipe.model.vocab_size,
        )  # fmt: skip
        builder = BlendedMegatronDatasetBuilder(
            PackedDataset, samples, lambda: parallel_state.get_tensor_model_parallel_rank() == 0, config
        )
        try:
            training, held_out, _ = builder.build()
        except ValueError as error:  # too little data: told by every process that reads it
            raise RecipeError(f"data.paths: {error}") from error
        if recipe.data.balance and recipe.parallel.data > 1 and training is not None:
            training = BalancedDataset(
                training,
                ranks=recipe.parallel.data,
                block=recipe.train.global_batch,
                origin=args.consumed_train_samples,
            )
        hooks.guard.training = training
        hooks.held_out = held_out if recipe.train.evaluate_sequences else None
        args.consumed_valid_samples = 0  # hooks.py reads from the beginning; Megatron would go on, and run out
        return training, hooks.held_out, None

    provide.is_distributed = True  # type: ignore[attr-defined]
    return provide


def forward_step(recipe: Recipe, hooks: Any) -> Any:
    """Megatron's forward step: the next packed sequence through the model. The guard keeps what the losses are."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_attr_wrapped_model

    from qla_megatron.data.batch import next_micro_batch
    from qla_megatron.layers.chunked_loss import IGNORED

    is_chunked, predicts = recipe.train.chunked_loss, recipe.model.prediction_layers > 0

    def step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
        batch = next_micro_batch(
            data_iterator,
            sequence_length=recipe.data.sequence_length,
            mtp_on_this_rank=predicts and parallel_state.is_pipeline_last_stage(ignore_virtual=True),
            vp_stage=get_attr_wrapped_model(model, "vp_stage"),
        )
        labels, mask = batch.labels, batch.loss_mask
        if is_chunked and labels is not None and mask is not None:
            labels = labels.masked_fill(mask == 0, IGNORED)
        extra = {"loss_mask": mask} if predicts else {}
        losses = model(
            batch.tokens, batch.position_ids, None, labels=labels, packed_seq_params=batch.packed_seq_params, **extra
        )
        assert batch.packed_seq_params is not None  # every stage gets the offsets of a packed batch
        offsets = batch.packed_seq_params.cu_seqlens_q

        def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            result = token_loss(mask, offsets, losses, is_masked=is_chunked)
            hooks.guard.micro_losses.append(result[2]["lm loss"])
            return result

        return losses, loss

    return step


def token_loss(
    loss_mask: torch.Tensor | None, offsets: torch.Tensor, losses: torch.Tensor, *, is_masked: bool
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Megatron's per-token loss: (sum over unmasked tokens, their number, what to report).

    Args:
        loss_mask: [B, T] float32, 0 where there is nothing to predict.
        offsets: [N + 1], of the documents.
        losses: [B, T] cross entropy, nats.
        is_masked: whether the losses are 0 already where the mask is. They are then summed and nothing else, which
            the chunked loss relies on.

    Returns:
        The report's entries are pairs, whose sums over all micro-batches Megatron divides: "lm loss", and "attended",
        the mean number of tokens that a token sees in full attention.
    """
    assert loss_mask is not None  # only the last pipeline stage asks for the loss, and it has the mask
    total = (losses if is_masked else losses.float() * loss_mask).sum()
    count = loss_mask.sum().to(torch.int)
    lengths = offsets.diff().float()
    attended = torch.stack([(lengths * (lengths + 1)).sum() / 2, lengths.sum()])
    return total, count, {"lm loss": torch.stack([total.detach(), count.float()]), "attended": attended}


@contextlib.contextmanager
def _alone_in(folder: Path) -> Any:
    """Refuse a folder in which another run is under way: the two would overwrite each other's checkpoints."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go of it however the process ends
        except BlockingIOError as error:
            raise RecipeError(
                f"another run is under way in {folder}. Wait, or take another checkpoint.folder."
            ) from error
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _megatron_output_in(path: Path) -> Any:
    """Send what Python code prints to a file; Megatron prints hundreds of lines a start."""
    with path.open("a", encoding="utf-8") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        yield


def _say_goodbye(recipe: Recipe, name: str, progress: Progress, hooks: Any, how: str) -> None:
    step, steps = progress.step_now, recipe.train.steps
    progress.say(f"{how} at step {step} of {steps}. Log: {progress.folder / 'log.jsonl'}")
    if hooks.saved_at is None:
        return
    checkpoints = build.run_folder(recipe, name) / "checkpoints"
    if step < steps:
        progress.say(f"Checkpoint: {checkpoints}. The same command goes on from step {hooks.saved_at}.")
    else:
        progress.say(
            f"Checkpoint: {checkpoints}. To train on, run the same command with a larger train.steps; to start "
            f"another run from it, pass checkpoint.load={checkpoints}."
        )
