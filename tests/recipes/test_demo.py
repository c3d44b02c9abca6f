"""The demo, cut to 20 steps: data, three launches with torchrun, and the verdict without the loss's level."""

import subprocess
import sys
from pathlib import Path

import pytest

from qla_megatron.recipes import demo

HELD = {1: {"loss": 2.5}, 2: {"loss": 2.0}}


@pytest.mark.slow
def test_twenty_steps(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "qla_megatron.recipes.demo", "--steps", "20", "--folder", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert "Verdict after" in run.stdout
    assert "FAILS" not in run.stdout
    assert run.stdout.count("holds") == 4


@pytest.mark.parametrize(
    ("other", "tolerance", "holds"),
    [
        pytest.param({1: {"loss": 2.5}, 2: {"loss": 2.0}}, 0.0, True, id="equal"),
        pytest.param({1: {"loss": 2.5}, 2: {"loss": 2.0000002}}, 0.0, False, id="one-bit-off"),
        pytest.param({1: {"loss": 2.5}, 2: {"loss": 2.00001}}, 1e-5, True, id="within"),
        pytest.param({1: {"loss": 2.5}, 2: {"loss": 2.00003}}, 1e-5, False, id="beyond"),
    ],
)
def test_comparison_of_losses(other: dict[int, dict[str, float]], tolerance: float, holds: bool) -> None:
    finding = demo.compare("losses", {"loss": HELD}, {"loss": other}, range(1, 3), tolerance)
    assert finding.holds is holds


def log(folder: Path, losses: list[float], held_out: tuple[float, float], without: float) -> None:
    folder.mkdir()
    lines = [f'{{"step": {i + 1}, "loss": {loss}}}' for i, loss in enumerate(losses)]
    lines += [f'{{"step": 0, "held_out_loss": {held_out[0]}}}', f'{{"step": 4, "held_out_loss": {held_out[1]}}}']
    lines += [f'{{"step": 4, "held_out_loss_without_mixers": {without}}}']
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("held_out", "without", "failing"),
    [
        pytest.param((5.6, 1.9), 2.6, [], id="sound"),
        pytest.param((4.0, 1.9), 2.6, ["held-out loss at the start"], id="starts-too-low"),
        pytest.param((5.6, 2.41), 3.0, ["held-out loss after 4 steps"], id="bigram"),
        pytest.param((5.6, 1.9), 2.1, ["worse without the mixers"], id="mixers-idle"),
    ],
)
def test_verdict_tells_a_sound_model_from_others(
    held_out: tuple[float, float], without: float, failing: list[str], tmp_path: Path
) -> None:
    for name in ("run", "resumed", "one_process"):
        log(tmp_path / name, [5.0, 4.0, 3.0, 2.0], held_out, without)
    findings = demo.verdict(tmp_path, 4, 2, levels=True)
    assert [finding.what for finding in findings if not finding.holds] == failing
