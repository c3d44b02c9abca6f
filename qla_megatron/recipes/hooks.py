"""What is hung into Megatron's training loop: progress, evaluation on the same sequences each time, gradient norms, the
guard.

Megatron's loop calls a handful of functions of its own module by name (training_log, evaluate_and_print_results, ...).
They are replaced for one run; the loop itself is Megatron's.
"""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import training
from megatron.training.datasets.data_samplers import build_pretraining_data_loader
from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

from qla_megatron.recipes.grad_norms import module_grad_norms
from qla_megatron.recipes.guard import Guard
from qla_megatron.recipes.progress import Progress
from qla_megatron.recipes.recipe import Recipe


class Hooks:
    """The replacements, sharing a Progress and the held-out data set (set by the data provider)."""

    def __init__(self, recipe: Recipe, progress: Progress, loaded_run: Path | None) -> None:
        """`loaded_run`: the folder of the run whose checkpoint is loaded, this run's or another's; None without one."""
        self.recipe, self.progress, self.loaded_run = recipe, progress, loaded_run
        self.guard = Guard(recipe, progress)
        self.held_out: Any = None
        self.first_step: int | None = None
        self.evaluated_at: int | None = None
        self.saved_at: int | None = None
        self.original = {name: getattr(training, name) for name in REPLACED}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace Megatron's functions inside the block."""
        for name in REPLACED:
            setattr(training, name, getattr(self, name))
        try:
            yield
        finally:
            for name, function in self.original.items():
                setattr(training, name, function)

    def train(self, forward_step: Any, model: Any, *rest: Any, **keywords: Any) -> Any:
        """Evaluate before the first step, then train."""
        args = get_args()
        config = rest[5]  # optimizer, scheduler, train data, held-out data, process_non_loss_data, config
        if args.do_valid:
            hooked = training.should_disable_forward_pre_hook(args)
            if hooked:
                training.disable_forward_pre_hook(model, param_sync=False)
            self.evaluate_and_print_results("start", forward_step, rest[3], model, args.iteration, None, config)
            if hooked:
                training.enable_forward_pre_hook(model)
        self.first_step = args.iteration + 1
        self.guard.expect(self.loaded_run, args.iteration, is_own=self.loaded_run == self.progress.folder)
        self.progress.publish = publish
        self.progress.start(args.iteration)
        return self.original["train"](forward_step, model, *rest, **keywords)

    def training_log(
        self, loss_dict: Any, total_loss_dict: Any, learning_rate: Any, iteration: int, loss_scale: Any,
        report_memory_flag: Any, skipped_iter: Any, grad_norm: Any, *rest: Any, **keywords: Any,
    ) -> Any:  # fmt: skip
        """Record the step's own loss; Megatron goes on to write its log file and TensorBoard."""
        loss, attended = loss_dict.get("lm loss"), loss_dict.pop("attended", None)
        if iteration % self.recipe.train.log_every == 0:
            self.progress.memory_gib = peak_memory_gib()
        further = prediction_loss()
        self.progress.step(iteration, loss, learning_rate, grad_norm, attended=attended, prediction_loss=further)
        if iteration == self.first_step:
            self.guard.check_first_loss(iteration, loss)
        return self.original["training_log"](
            loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, report_memory_flag, skipped_iter,
            grad_norm, *rest, **keywords,
        )  # fmt: skip

    def evaluate_and_print_results(
        self, prefix: str, forward_step: Any, data_iterator: Any, model: Any, iteration: int, process_non_loss: Any,
        config: Any, **keywords: Any,
    ) -> None:  # fmt: skip
        """Evaluate on the first `evaluate_sequences` held-out sequences, once a step.

        Megatron's iterator goes on through the held-out data, so that two of its figures are about different text.
        """
        if iteration == self.evaluated_at:
            return
        self.evaluated_at = iteration
        groups = {name: keywords.get(name) for name in ("pg_collection", "p2p_communicator")}

        def held_out_loss() -> float | None:
            losses, _, _ = training.evaluate(forward_step, self._fresh(data_iterator), model, None, config, **groups)
            return float(losses["lm loss"]) if losses else None  # known on the last pipeline stage

        loss = held_out_loss()
        if loss is not None:
            self.progress.flush()
            self.progress.held_out(iteration, loss)
            publish({"held-out loss": loss}, iteration)
        if self.recipe.train.evaluate_without_mixers and iteration == self.recipe.train.steps:
            with mixers_off(model):
                loss = held_out_loss()
            if loss is not None:
                self.progress.held_out(iteration, loss, without_mixers=True)
        self.guard.micro_losses.clear()
        self.progress.restart_clock()

    def save_checkpoint_and_time(self, iteration: int, *rest: Any, **keywords: Any) -> None:
        """Save and say where."""
        self.progress.flush()
        self.original["save_checkpoint_and_time"](iteration, *rest, **keywords)
        self.saved_at = iteration
        self.progress.saved(iteration, get_args().save)
        self.progress.restart_clock()

    def finalize_model_grads(self, model: Any, *rest: Any, **keywords: Any) -> None:
        """Reduce the gradients, then look at them, before they are clipped."""
        self.original["finalize_model_grads"](model, *rest, **keywords)
        step = get_args().curr_iteration + 1
        self.guard.check_step(model, step)
        if self.recipe.train.log_module_grad_norms and step % self.recipe.train.log_every == 0:
            norms = module_grad_norms(model)
            if norms:
                self.progress.module_grad_norms(step, norms)
                publish({f"grad-norm/{name}": norm for name, norm in norms.items()}, step)

    def _fresh(self, like: Any) -> Any:
        """An iterator over the held-out data set from its beginning, one for each model chunk as Megatron's own."""
        if isinstance(like, list):
            return [self._fresh(one) for one in like]
        loader = build_pretraining_data_loader(self.held_out, 0)
        return None if loader is None else RerunDataIterator(iter(loader))


REPLACED = ("train", "training_log", "evaluate_and_print_results", "save_checkpoint_and_time", "finalize_model_grads")


def publish(values: dict[str, float], step: int) -> None:
    """Write to TensorBoard and to Weights & Biases, on the rank where Megatron opened them."""
    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    if writer:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
    if wandb:
        wandb.log(values, step)


def prediction_loss() -> torch.Tensor | None:
    """The step's mean loss of multi-token prediction, over its blocks and the data-parallel ranks; None where there is
    none. A collective of the ranks that have one. Megatron's training_log clears what is read here."""
    values = MTPLossLoggingHelper.tracker.get("loss_values")
    if values is None:
        return None
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    mean = values.mean() / get_num_microbatches() / group.size()
    torch.distributed.all_reduce(mean, group=group)
    return mean


def peak_memory_gib() -> float:
    """The most memory that a process of the run has had in use, GiB: of its GPU as torch counts it, or on a CPU its
    resident set. A collective of all processes."""
    if torch.cuda.is_available():
        used = torch.cuda.max_memory_allocated() / 2**30
    else:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    most = torch.tensor(used, dtype=torch.float32, device=torch.cuda.current_device())
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return float(most)


@contextlib.contextmanager
def mixers_off(model_chunks: list[torch.nn.Module]) -> Iterator[None]:
    """Set the output of every mixer, GDN and attention, to zero inside the block: tokens no longer see each other."""

    def to_zero(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        return torch.zeros_like(output[0]), output[1]

    handles = []
    for chunk in model_chunks:
        for module in chunk.modules():
            mixer = getattr(module, "self_attention", None)
            if mixer is not None and not isinstance(mixer, IdentityOp):
                handles.append(mixer.register_forward_hook(to_zero))
    if not handles:
        raise ValueError("model_chunks must hold layers with a mixer, found none")
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
