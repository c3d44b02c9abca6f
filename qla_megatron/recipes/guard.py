"""What stops a run that goes wrong: a loss or gradient that is not finite, and a start that is not the checkpoint's.

Both stop all processes together, and before anything of it is saved: gradients are looked at after their reduction and
before the optimizer's step, so that weights and the last checkpoint stay good. The step's sequences are kept for a
look at them, in RUN_FOLDER/failed/step_N/.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training.datasets.data_samplers import build_pretraining_data_loader
from megatron.training.global_vars import get_args

from qla_megatron.recipes.grad_norms import module_grad_norms
from qla_megatron.recipes.progress import Progress, RunStoppedError, read_log
from qla_megatron.recipes.recipe import Recipe

STEPS_BEFORE = 8
"""Recorded losses before the loaded step whose mean the first loss is compared with."""


class Guard:
    """Collects each micro-batch's loss; looks at a step before the optimizer does, and at the first loss after a load.

    Attributes:
        micro_losses: of the step at hand: for each micro-batch [2], the sum of its losses and their number; only on
            the last pipeline stage.
        training: the training data set, set by the data provider.
    """

    def __init__(self, recipe: Recipe, progress: Progress) -> None:
        self.recipe, self.progress = recipe, progress
        self.micro_losses: list[torch.Tensor] = []
        self.training: Any = None
        self.expected: float | None = None
        self.is_told = False

    def check_step(self, model: list[Any], step: int) -> None:
        """Stop where a loss or a reduced gradient of this step is not finite. A collective of all processes.

        One pass over the gradient buffers, and one read of the device, which the optimizer waits for right after in
        any case.

        Raises:
            RunStoppedError: on all processes.
        """
        sums = [loss[0] for loss in self.micro_losses]
        for chunk in model:
            sums += [buffer.grad_data.sum() for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
        device = torch.cuda.current_device()
        finite = torch.stack([one.float().isfinite() for one in sums]).all() if sums else torch.tensor(True)
        is_bad = (~finite).to(device=device, dtype=torch.int32)
        torch.distributed.all_reduce(is_bad, op=torch.distributed.ReduceOp.MAX)
        if is_bad.item():
            self._stop_at(model, step)
        self.micro_losses.clear()

    def _stop_at(self, model: list[Any], step: int) -> None:
        norms = module_grad_norms(model)  # known on the last rank, which speaks
        modules = [name for name, norm in norms.items() if not math.isfinite(norm)]
        losses = [float(loss[0] / loss[1].clamp(min=1)) for loss in self.micro_losses]
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, losses)
        bad = {
            f"rank {rank}": [number for number, loss in enumerate(theirs) if not math.isfinite(loss)]
            for rank, theirs in enumerate(everyone)
            if not all(map(math.isfinite, theirs))
        }
        folder = self.progress.folder / "failed" / f"step_{step:07d}"
        if parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0:
            self._keep_batch(folder, step, losses)
        self.progress.flush()
        self.progress.record(step=step, not_finite={"micro_batches": bad, "modules": modules})
        where = [f"the losses of micro-batches {bad}"] if bad else []
        if modules:
            some = ", ".join([*modules[:3], *(["..."] if len(modules) > 3 else [])])
            where += [f"the gradients of {len(modules)} of {len(norms)} modules ({some})"]
        text = (
            f"step {step}: not finite: {' and '.join(where)}. Stopped before the update; no checkpoint was touched. "
            f"The step's sequences are in {folder}. The same command goes on from the last checkpoint and meets them "
            f"again; train.skip_steps=[{step}] passes over them."
        )
        self.progress.say(f"error: {text}")
        torch.distributed.barrier()  # the launcher stops all others once one process has left: all is said by then
        raise RunStoppedError(text)

    def _keep_batch(self, folder: Path, step: int, losses: list[float]) -> None:
        """Read the step's micro-batches of this data-parallel rank again, and write them down."""
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return
        args = get_args()
        workers, args.num_workers = args.num_workers, 0
        try:
            loader = iter(build_pretraining_data_loader(self.training, args.consumed_train_samples))
            batches = list(itertools.islice(loader, get_num_microbatches()))
        finally:
            args.num_workers = workers
        folder.mkdir(parents=True, exist_ok=True)
        rank = parallel_state.get_data_parallel_rank()
        found = {
            "step": step, "first_sample": args.consumed_train_samples, "losses": losses, "micro_batches": batches,
        }  # fmt: skip
        torch.save(found, folder / f"data_parallel_rank_{rank}.pt")

    def expect(self, source: Path | None, step: int, *, is_own: bool) -> None:
        """Say what the first loss is to be.

        Args:
            source: folder of the run whose checkpoint was loaded, None without one. Its log says the losses before.
            step: the loaded step.
            is_own: whether this run goes on. The recipe's word is about the start from another's checkpoint alone.
        """
        if self.recipe.checkpoint.expected_loss is not None and not is_own:
            self.expected, self.is_told = self.recipe.checkpoint.expected_loss, True
        elif self.progress.speaks and source is not None and (source / "log.jsonl").is_file():
            log = read_log(source)["loss"]
            before = [log[s]["loss"] for s in range(step - STEPS_BEFORE + 1, step + 1) if s in log]
            self.expected = sum(before) / len(before) if before else None

    def check_first_loss(self, step: int, loss: torch.Tensor | None) -> None:
        """Compare the first step's loss, known on the last rank, with the expected one. A collective of all processes.

        Raises:
            RunStoppedError: it is off, and the recipe says what it has to be.
        """
        expected, tolerance = self.expected, self.recipe.checkpoint.loss_tolerance
        is_off = torch.zeros(1, dtype=torch.int32, device=torch.cuda.current_device())
        if loss is not None and expected is not None and not abs(float(loss) - expected) <= tolerance:
            is_off += 1
            word = "checkpoint.expected_loss" if self.is_told else "the mean that the loaded run recorded before"
            text = f"loss {float(loss):.4f} is off {expected:.4f}, {word}, by more than {tolerance}"
            self.progress.record(step=step, warning=text)
            kind, end = ("error", " Stopped; nothing was saved.") if self.is_told else ("warning", "")
            self.progress.say(f"{kind}: step {step}: {text}: is it the right checkpoint, model and tokenizer?{end}")
        if not self.is_told:
            return
        torch.distributed.all_reduce(is_off, op=torch.distributed.ReduceOp.MAX)
        if is_off.item():
            raise RunStoppedError(f"step {step}: the first loss is not checkpoint.expected_loss={expected}")
