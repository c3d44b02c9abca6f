"""The demo: real text, two processes, one verdict.

Makes a data set of Python's own standard library (one document a file, bytes as tokens), trains the tiny recipe on it
with tensor and sequence parallelism, resumes it in a second launch, repeats the resumed steps on one process, and says
what held. Each launch is a command that you can type yourself; it is printed before it runs.
"""

import argparse
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from qla_megatron.recipes import catalogue, upstream
from qla_megatron.recipes.progress import read_log

RECIPE = "tiny_pretrain_2k_2xcpu"

# What a sound model reaches, in nats a byte. The corpus has a bigram entropy of 2.43: less than that needs a mixer.
FIRST_LOSS = (5.3, 6.2)
FINAL_LOSS = 2.4
MIXERS_WORTH = 0.3
TENSOR_PARALLEL_TOLERANCE = 1e-5  # relative, float32: sums of partial products in another order


@dataclass(frozen=True)
class Finding:
    """One line of the verdict."""

    what: str
    wanted: str
    got: str
    holds: bool


def main(arguments: list[str] | None = None) -> int:
    """Run everything; 0 if all findings hold."""
    options = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    folder = Path(options.folder)
    began = time.monotonic()
    recipe = catalogue.find(RECIPE)
    steps = options.steps or recipe.train.steps
    again = min(20, steps // 2)  # steps to repeat in the second launch
    data = folder / "data" / "python"
    make_data(data, console)
    for run in ("run", "resumed", "one_process"):
        if (folder / run / "recipe.yaml").is_file():  # a run of before, nobody else's folder
            shutil.rmtree(folder / run)

    shared = [f"data.paths=[{data}]", f"train.steps={steps}"]
    if options.steps is not None:
        # At the full rate the first steps are chaotic: a difference of one bit grows tenfold a step.
        shared += ["optimizer.lr=1e-3", "optimizer.min_lr=1e-4", f"optimizer.warmup_steps={steps // 4}"]
        shared.append("train.evaluate_sequences=4")
    say(
        console,
        f"1. Train {steps} steps, tensor and sequence parallel over 2 processes; save at {steps - again}, {steps}",
    )
    train = [f"checkpoint.save_every={steps - again}", "train.evaluate_without_mixers=true"]
    launch([*shared, *train, f"checkpoint.folder={folder / 'run'}"], console)

    start = [f"checkpoint.load={folder / 'run' / 'checkpoints'}", f"checkpoint.load_step={steps - again}"]
    start += ["checkpoint.save=false", "train.evaluate_sequences=0", "train.log_every=5"]
    say(console, f"2. Resume at step {steps - again} in a new launch: the same losses must come out")
    launch([*shared, *start, f"checkpoint.folder={folder / 'resumed'}"], console)

    say(console, "3. The same steps from the same checkpoint on one process")
    one = ["parallel.gpus=1", "parallel.tensor=1", "parallel.sequence=false"]
    one.append(f"train.stop_after={steps - again + min(10, again)}")
    launch([*shared, *start, *one, f"checkpoint.folder={folder / 'one_process'}"], console)

    findings = verdict(folder, steps, again, levels=options.steps is None)
    title = f"Verdict after {time.monotonic() - began:.0f} s"
    table = Table("what", "wanted", "got", "", title=title, title_justify="left")
    for finding in findings:
        mark = "[green]holds[/]" if finding.holds else "[red]FAILS[/]"
        table.add_row(finding.what, finding.wanted, finding.got, mark)
    console.print(table)
    console.print(f"Each run's log.jsonl, recipe.yaml and checkpoints are in {folder}.")
    return 0 if all(finding.holds for finding in findings) else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m qla_megatron.recipes.demo", description="Train a small model on real text; say what held."
    )
    parser.add_argument(
        "--steps", type=int, help="fewer steps, for a quick check; how low the loss gets is then not judged"
    )
    parser.add_argument("--folder", default="runs/demo", help="where everything goes (default: runs/demo)")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 4:
        parser.error(f"--steps must be at least 4, got {options.steps}")
    return options


def make_data(prefix: Path, console: Console) -> None:
    """Python's standard library as .bin/.idx, unless it is there."""
    if prefix.with_suffix(".idx").is_file():
        say(console, f"0. Data: {prefix}.bin is there")
        return
    say(console, "0. Data: Python's standard library, one document a file, bytes as tokens")
    from qla_megatron.data.corpus import stdlib_corpus, write_corpus

    upstream.quiet_imports()
    info = write_corpus(stdlib_corpus(), prefix, "byte")
    console.print(f"{prefix}.bin: {info.documents} documents, {info.tokens:,} tokens")


def launch(assignments: list[str], console: Console) -> None:
    """Run the recipe through its command line, in new processes.

    Raises:
        SystemExit: the run failed.
    """
    command = ["-m", "qla_megatron.recipes.run", RECIPE, *assignments, "--launch"]
    console.print(f"python {' '.join(command)}", style="dim", soft_wrap=True, highlight=False, markup=False)
    code = subprocess.run([sys.executable, *command], check=False).returncode
    if code:
        raise SystemExit(f"the launch above failed with exit code {code}")


def say(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/]", highlight=False)


def verdict(folder: Path, steps: int, again: int, *, levels: bool) -> list[Finding]:
    """Compare the logs of the three runs; `levels`: judge how low the loss got, too."""
    run, resumed, one = (read_log(folder / name) for name in ("run", "resumed", "one_process"))
    held_out = {step: record["held_out_loss"] for step, record in run["held_out_loss"].items()}
    without = run["held_out_loss_without_mixers"][steps]["held_out_loss_without_mixers"]
    first, final = held_out[0], held_out[steps]
    low, high = FIRST_LOSS
    findings = [
        Finding("held-out loss at the start", f"{low} to {high} (uniform: 5.55)", f"{first:.3f}", low < first < high)
    ]
    name = f"held-out loss after {steps} steps"
    if levels:
        worse = without - final
        findings += [
            Finding(name, f"below {FINAL_LOSS} (bigram: 2.43)", f"{final:.3f}", final < FINAL_LOSS),
            Finding("worse without the mixers", f"by {MIXERS_WORTH} or more", f"by {worse:.3f}", worse >= MIXERS_WORTH),
        ]
    else:
        findings.append(Finding(name, "less than at the start", f"{final:.3f}", final < first))
    repeated = range(steps - again + 1, steps + 1)
    findings.append(compare("resumed losses equal the uninterrupted ones", run, resumed, repeated, 0.0))
    one_tolerance = TENSOR_PARALLEL_TOLERANCE
    findings.append(compare("one process gives the losses of two", run, one, repeated[:10], one_tolerance))
    return findings


def compare(what: str, run: dict[str, Any], other: dict[str, Any], steps: range, tolerance: float) -> Finding:
    """The largest relative difference of two runs' losses over `steps`."""
    pairs = [(run["loss"][step]["loss"], other["loss"][step]["loss"]) for step in steps]
    worst = max(abs(a - b) / abs(a) for a, b in pairs)
    wanted = "exactly" if tolerance == 0 else f"within {tolerance:g}, relative"
    got = f"differ by {worst:.1e}" if worst else "equal"
    return Finding(f"{what} ({len(pairs)} steps)", wanted, got, worst <= tolerance)


if __name__ == "__main__":
    sys.exit(main())
