"""What a person sees of a run, and what is kept of it.

Every step becomes a line of JSON in the run folder; every `log_every`-th also a line on the terminal. Megatron's own
lines go to a file: its second printed loss after a start is the mean of two steps, so that its lines cannot be
compared with another run's.

log.jsonl, one object a line, by its keys:
  {"start": step, ...}                            a process group started or resumed here
  {"step", "loss", "tokens", "seconds", "lr", "grad_norm"}   one optimizer step; tokens counts slots, padding included;
                                                  "prediction_loss" too where the model predicts tokens further on
  {"step", "tokens_per_s", "mfu", "memory_gib", "attended"}  of the steps since the last such record: speed of all
                                                  processes; share of the GPUs' peak by the model's FLOPs (flops.py;
                                                  null on a CPU); most memory of a process so far; tokens that a
                                                  token sees in full attention, in the mean
  {"step", "held_out_loss"}, {"step", "held_out_loss_without_mixers"}
  {"step", "module_grad_norms": {name: norm}}     before clipping
  {"step", "saved"}                               path of a checkpoint
  {"step", "not_finite": {"micro_batches": {rank: [number]}, "modules": [name]}}   where a guard found losses and
                                                  gradients that are not finite
  {"step", "warning"}                             what a guard let pass
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch

from qla_megatron.recipes.flops import PEAK_BF16_FLOPS, flops_at
from qla_megatron.recipes.recipe import Recipe


class RunStoppedError(RuntimeError):
    """A guard (guard.py) stops the run, on all processes; it has said why and what to do."""


def read_log(folder: Path) -> dict[str, dict[int, Any]]:
    """The log of a run folder: for each kind of record, step -> record. Of a step done twice, the later record. A line
    that a crash cut short is passed over."""
    kinds = ["held_out_loss", "held_out_loss_without_mixers", "module_grad_norms", "saved", "loss", "tokens_per_s"]
    kinds += ["not_finite", "warning"]
    found: dict[str, dict[int, Any]] = {kind: {} for kind in kinds}
    for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        for kind in kinds:
            if kind in record:
                found[kind][record["step"]] = record
    return found


class Progress:
    """Records and prints, on the one rank that knows the loss; the others call it and nothing happens."""

    def __init__(self, recipe: Recipe, folder: Path, terminal: TextIO, *, speaks: bool) -> None:
        self.recipe, self.train, self.folder, self.terminal = recipe, recipe.train, folder, terminal
        self.tokens_per_step = recipe.train.global_batch * recipe.data.sequence_length
        self.speaks = speaks
        self.file = (folder / "log.jsonl").open("a", encoding="utf-8") if speaks else None
        self.waiting: list[dict[str, Any]] = []  # steps whose loss may still be on its way from the device
        self.attended: list[Any] = []  # for each of them, the mean number of tokens that a token sees
        self.since = self.last = time.perf_counter()
        self.step_now = 0
        self.memory_gib: float | None = None
        self.publish: Callable[[dict[str, float], int], None] | None = None

    def say(self, text: str) -> None:
        if self.speaks:
            print(text, file=self.terminal, flush=True)

    def record(self, **entries: Any) -> None:
        if self.file is not None:
            self.file.write(json.dumps(entries) + "\n")
            self.file.flush()

    def start(self, step: int) -> None:
        """The first step is about to run."""
        self.step_now = step
        self.record(start=step, steps=self.train.steps)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Do not count what just happened (an evaluation, a checkpoint) as training time."""
        self.flush()
        self.since = self.last = time.perf_counter()

    def step(self, step: int, loss: Any, lr: float | None, grad_norm: Any, **more: Any) -> None:
        """One optimizer step is done. Tensors may still be on their way from the device: they are read when flushed.

        Args:
            step, loss, lr, grad_norm: what the log says of a step.
            more: `attended`, the mean number of tokens that a token sees in full attention; `prediction_loss`, the
                mean of multi-token prediction's.
        """
        now = time.perf_counter()
        self.step_now = step
        if self.speaks:
            self.waiting.append(
                {"step": step, "loss": loss, "seconds": now - self.last, "lr": lr, "grad_norm": grad_norm}
            )
            if more.get("prediction_loss") is not None:
                self.waiting[-1]["prediction_loss"] = more["prediction_loss"]
            self.attended.append(more.get("attended"))
        self.last = now
        if step % self.train.log_every == 0 or step == self.train.steps:
            self.flush()

    def flush(self) -> None:
        """Write the waiting steps and print a line for the last one."""
        if not self.waiting:
            return
        for entry in self.waiting:
            known = {name: float(value) for name, value in entry.items() if torch.is_tensor(value)}
            entry |= {"tokens": self.tokens_per_step, **known}
            self.record(**entry)
        rate = len(self.waiting) / max(time.perf_counter() - self.since, 1e-9)  # steps a second, the device included
        last = self.waiting[-1]
        speed = self._speed(rate * self.tokens_per_step)
        self.record(step=last["step"], **speed)
        if self.publish is not None:
            names = {name.replace("_", "-"): value for name, value in speed.items() if value is not None}
            self.publish(names, last["step"])
        further = f"  further tokens {last['prediction_loss']:.4f}" if "prediction_loss" in last else ""
        mfu = "" if speed["mfu"] is None else f"  MFU {speed['mfu']:.1%}"
        self.say(
            f"{self._where(last['step'])}  loss {last['loss']:.4f}{further}  lr {last['lr'] or 0:.2e}  grad norm "
            f"{last['grad_norm'] or 0:.3f}  {_thousands(speed['tokens_per_s'] or 0)} tokens/s{mfu}  "
            f"{_duration((self.train.steps - last['step']) / rate)} left"
        )
        self.waiting, self.attended = [], []
        self.since = time.perf_counter()

    def _speed(self, tokens_per_s: float) -> dict[str, float | None]:
        """What the log says of speed; see the top of the file."""
        known = [float(one) for one in self.attended if one is not None]
        attended = sum(known) / len(known) if known else None
        p, mfu = self.recipe.parallel, None
        if attended is not None and p.device in PEAK_BF16_FLOPS:
            flops = flops_at(self.recipe.model, attended).total * tokens_per_s
            mfu = flops / (p.gpus * PEAK_BF16_FLOPS[p.device])
        return {"tokens_per_s": tokens_per_s, "mfu": mfu, "memory_gib": self.memory_gib, "attended": attended}

    def held_out(self, step: int, loss: float, *, without_mixers: bool = False) -> None:
        """An evaluation is done."""
        name = "held_out_loss_without_mixers" if without_mixers else "held_out_loss"
        self.record(step=step, **{name: loss})
        self.say(
            f"{self._where(step)}  held-out loss {loss:.4f}"
            + (" with the mixers' outputs set to zero" if without_mixers else "")
        )

    def module_grad_norms(self, step: int, norms: dict[str, float]) -> None:
        """The gradient norms of a step, before clipping; the largest ones are printed."""
        self.record(step=step, module_grad_norms=norms)
        largest = sorted(norms, key=lambda name: -norms[name])[:3]
        self.say(
            f"{self._where(step)}  largest gradients: " + ", ".join(f"{name} {norms[name]:.3g}" for name in largest)
        )

    def saved(self, step: int, checkpoints: str) -> None:
        """A checkpoint is written."""
        path = Path(checkpoints) / f"iter_{step:07d}"
        self.record(step=step, saved=str(path))
        self.say(f"{self._where(step)}  saved {path}")

    def _where(self, step: int) -> str:
        width = len(str(self.train.steps))
        return f"step {step:{width}d}/{self.train.steps}"


def _thousands(value: float) -> str:
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
