"""Short runs of the tiny recipes on Megatron's own loop: what a run logs, resuming, other layouts, how a run ends.

Runs share one corpus and, where they can, one another's checkpoints: a run costs seconds of start-up.
"""

import contextlib
import io
import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from megatron.core import parallel_state
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qla_megatron.data.corpus import write_corpus
from qla_megatron.recipes import build, catalogue, checks, overrides
from qla_megatron.recipes.flops import flops_at
from qla_megatron.recipes.progress import Progress, read_log
from qla_megatron.testing.distributed import run_ranks

SHORT = [  # 256 tokens a sequence; small enough for seconds, long enough for several documents a sequence
    "data.sequence_length=256", "train.global_batch=4", "train.steps=6", "optimizer.warmup_steps=2",
    "train.evaluate_every=100", "train.evaluate_sequences=4", "train.log_every=2",
]  # fmt: skip
DENSE = "tiny_pretrain_2k_2xcpu"


def train_on_this_rank(name: str, assignments: list[str], sent: int | None = None, at_step: int = 1) -> None:
    """One rank of a run. `sent`: the signal that this process gets 0.2 s after step `at_step` was logged."""
    from qla_megatron.recipes.train import train

    recipe = overrides.apply(catalogue.find(name), assignments)
    checks.check(recipe)
    parallel_state.destroy_model_parallel()  # run_ranks made groups of its own, which Megatron would keep
    if sent is not None:
        log = Path(recipe.checkpoint.folder or "") / "log.jsonl"
        threading.Thread(target=signal_later, args=(log, sent, at_step), daemon=True).start()
    train(recipe, name, rank=int(os.environ["RANK"]), world=int(os.environ["WORLD_SIZE"]))
    p = recipe.parallel
    sizes = {
        "tensor_model_parallel": p.tensor, "context_parallel": p.context, "pipeline_model_parallel": p.pipeline,
        "expert_model_parallel": p.expert, "data_parallel": p.data,
    }  # fmt: skip
    assert {kind: getattr(parallel_state, f"get_{kind}_world_size")() for kind in sizes} == sizes


def signal_later(log: Path, sent: int, at_step: int) -> None:
    while not (log.exists() and f'{{"step": {at_step}, "loss"' in log.read_text()):
        time.sleep(0.02)
    time.sleep(0.2)
    os.kill(os.getpid(), sent)


def losses(folder: Path) -> dict[int, float]:
    return {step: record["loss"] for step, record in read_log(folder)["loss"].items()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sixty small documents, as text that repeats itself."""
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    documents = [f"def f{i}(x):\n    return x * {i} + {i * i}\n" * (1 + i % 7) for i in range(60)]
    write_corpus(documents, prefix)
    return f"data.paths=[{prefix}]"


@pytest.fixture(scope="module")
def whole_run(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps at TP2 with sequence parallelism, uninterrupted, saved at 3 and 6."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    extra = ["train.log_module_grad_norms=true", "train.evaluate_without_mixers=true", "checkpoint.save_every=3"]
    extra.append("train.tensorboard=true")
    run_ranks(train_on_this_rank, 2, DENSE, [*SHORT, corpus, *extra, f"checkpoint.folder={folder}"])
    return folder


def test_log_holds_every_step_and_both_evaluations(whole_run: Path) -> None:
    log = read_log(whole_run)
    assert sorted(log["loss"]) == [1, 2, 3, 4, 5, 6]
    for record in log["loss"].values():
        assert record["tokens"] == 4 * 256
        assert record["seconds"] > 0
        assert record["grad_norm"] > 0
        assert record["lr"] > 0
    assert sorted(log["held_out_loss"]) == [0, 6]
    assert abs(log["held_out_loss"][0]["held_out_loss"] - math.log(257)) < 0.6
    assert log["held_out_loss"][6]["held_out_loss"] < log["held_out_loss"][0]["held_out_loss"] - 0.5
    assert log["held_out_loss_without_mixers"][6]["held_out_loss_without_mixers"] > 0
    assert [Path(record["saved"]).is_dir() for record in log["saved"].values()] == [True, True]
    assert "steps: 6" in (whole_run / "recipe.yaml").read_text()


def test_speed_and_memory_are_recorded(whole_run: Path) -> None:
    speed = read_log(whole_run)["tokens_per_s"]
    assert sorted(speed) == [2, 3, 4, 6]  # every second step, and before a checkpoint is saved
    for record in speed.values():
        assert record["tokens_per_s"] > 0
        assert record["mfu"] is None  # a CPU's peak is not known
        assert 0.1 < record["memory_gib"] < 24
        assert 32 < record["attended"] < 128.5  # documents of 64 to 256 slots


def test_tensorboard_holds_what_the_log_does(whole_run: Path) -> None:
    events = EventAccumulator(str(whole_run / "tensorboard")).Reload()
    log = read_log(whole_run)

    def values(name: str) -> dict[int, float]:
        return {event.step: event.value for event in events.Scalars(name)}

    assert values("lm loss") == pytest.approx({step: record["loss"] for step, record in log["loss"].items()})
    assert values("grad-norm") == pytest.approx({step: record["grad_norm"] for step, record in log["loss"].items()})
    assert values("held-out loss").keys() == {0, 6}
    for name in ("tokens-per-s", "memory-gib", "attended"):
        recorded = {step: record[name.replace("-", "_")] for step, record in log["tokens_per_s"].items()}
        assert values(name) == pytest.approx(recorded)
    for step, record in log["module_grad_norms"].items():
        for name, norm in record["module_grad_norms"].items():
            assert values(f"grad-norm/{name}")[step] == pytest.approx(norm)


def test_mfu_is_the_models_flops_over_the_gpus_peak(tmp_path: Path) -> None:
    recipe = catalogue.find("qwen3_5_0_8b_pretrain_4k_8xh100")
    progress = Progress(recipe, tmp_path, io.StringIO(), speaks=True)
    published = {}
    progress.publish = lambda values, step: published.update({step: values})
    for step in range(1, 11):
        progress.step(step, torch.tensor(3.0), 1e-4, 1.0, attended=torch.tensor(float(step)))
    speed = read_log(tmp_path)["tokens_per_s"][10]
    flops = flops_at(recipe.model, 5.5).total  # the mean of 1 to 10
    assert speed["mfu"] == pytest.approx(speed["tokens_per_s"] * flops / (8 * 989.4e12))
    assert published[10]["mfu"] == speed["mfu"]
    assert "MFU" in progress.terminal.getvalue()


def test_weights_and_biases_gets_the_same_or_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from qla_megatron.recipes import hooks, train

    class Wandb:
        logged: ClassVar[list[Any]] = []

        def log(self, values: dict[str, float], step: int) -> None:
            self.logged.append((values, step))

    monkeypatch.setattr(hooks, "get_tensorboard_writer", lambda: None)
    monkeypatch.setattr(hooks, "get_wandb_writer", Wandb)
    hooks.publish({"mfu": 0.5}, 7)
    assert Wandb.logged == [({"mfu": 0.5}, 7)]
    recipe = overrides.apply(catalogue.find(DENSE), ["train.wandb=project", f"checkpoint.folder={tmp_path}/run"])
    assert {"--wandb-project", "project", "--tensorboard-dir"} <= set(build.megatron_flags(recipe, DENSE))
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(checks.RecipeError, match=r"train\.wandb=project needs the package wandb"):
        train.train(recipe, DENSE, rank=0, world=1)
    assert not (tmp_path / "run").exists()


def test_mixers_matter(whole_run: Path) -> None:
    log = read_log(whole_run)
    without = log["held_out_loss_without_mixers"][6]["held_out_loss_without_mixers"]
    assert without != log["held_out_loss"][6]["held_out_loss"]


def assert_module_grad_norms_add_up(folder: Path) -> None:
    """To Megatron's norm of the whole gradient: every parameter is counted once, on whichever ranks it lies."""
    log = read_log(folder)
    assert sorted(log["module_grad_norms"]) == [2, 4, 6]
    for step, record in log["module_grad_norms"].items():
        total = math.sqrt(sum(norm**2 for norm in record["module_grad_norms"].values()))
        assert total == pytest.approx(log["loss"][step]["grad_norm"], rel=1e-5)


def test_module_grad_norms_add_up_to_megatrons(whole_run: Path) -> None:
    assert_module_grad_norms_add_up(whole_run)
    norms = read_log(whole_run)["module_grad_norms"][2]["module_grad_norms"]
    assert {"decoder.layers.3.self_attention.linear_qkv", "decoder.layers.0.self_attention.in_proj"} <= set(norms)


def test_too_little_data_is_refused_by_name(corpus: str, tmp_path: Path) -> None:
    command = [*SHORT, corpus, "data.sequence_length=65536", f"checkpoint.folder={tmp_path}"]
    with pytest.raises(RuntimeError, match=r"RecipeError: data.paths: the .* split of .* must fill one sequence"):
        run_ranks(train_on_this_rank, 2, DENSE, command)


def test_resumed_losses_equal_the_uninterrupted_ones(whole_run: Path, corpus: str, tmp_path: Path) -> None:
    start = [f"checkpoint.load={whole_run}/checkpoints", "checkpoint.load_step=3", "checkpoint.save=false"]
    start.append("checkpoint.loss_tolerance=2")  # the loss falls by more than the default here
    run_ranks(train_on_this_rank, 2, DENSE, [*SHORT, corpus, *start, f"checkpoint.folder={tmp_path}"])
    resumed = losses(tmp_path)
    assert not read_log(tmp_path)["warning"]
    assert sorted(resumed) == [4, 5, 6]
    assert resumed == {step: loss for step, loss in losses(whole_run).items() if step > 3}


def test_one_process_gives_the_losses_of_two(whole_run: Path, corpus: str, tmp_path: Path) -> None:
    start = [f"checkpoint.load={whole_run}/checkpoints", "checkpoint.load_step=3", "checkpoint.save=false"]
    start.append("train.evaluate_sequences=0")
    one = ["parallel.gpus=1", "parallel.tensor=1", "parallel.sequence=false", "train.stop_after=5"]
    one.append("train.chunked_loss=false")  # Megatron's own loss, too
    run_ranks(train_on_this_rank, 1, DENSE, [*SHORT, corpus, *start, *one, f"checkpoint.folder={tmp_path}"])
    single = losses(tmp_path)
    assert sorted(single) == [4, 5]
    assert not read_log(tmp_path)["held_out_loss"]
    for step, loss in single.items():
        assert loss == pytest.approx(losses(whole_run)[step], rel=1e-5)


def test_sigterm_saves_and_the_same_command_goes_on(corpus: str, tmp_path: Path) -> None:
    command = [*SHORT, corpus, "train.steps=200", f"checkpoint.folder={tmp_path}", "train.evaluate_sequences=0"]
    command += ["parallel.gpus=1", "parallel.tensor=1", "parallel.sequence=false", "train.log_every=1"]
    run_ranks(train_on_this_rank, 1, DENSE, command, signal.SIGTERM)
    saved = read_log(tmp_path)["saved"]
    assert len(saved) == 1
    stopped_at = next(iter(saved))
    assert 1 <= stopped_at < 200
    run_ranks(train_on_this_rank, 1, DENSE, [*command, f"train.stop_after={stopped_at + 1}"])
    starts = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines() if '"start"' in line]
    assert [start["start"] for start in starts] == [0, stopped_at]
    assert max(losses(tmp_path)) == stopped_at + 1


def test_killed_run_goes_on_as_if_it_never_stopped(whole_run: Path, corpus: str, tmp_path: Path) -> None:
    command = [*SHORT, corpus, "checkpoint.save_every=3", "train.log_every=1", f"checkpoint.folder={tmp_path}"]
    with pytest.raises(RuntimeError, match=r"died without a word|failed"):
        run_ranks(train_on_this_rank, 2, DENSE, command, signal.SIGKILL, 4)
    assert max(losses(tmp_path)) < 6
    run_ranks(train_on_this_rank, 2, DENSE, command)
    starts = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines() if '"start"' in line]
    assert [start["start"] for start in starts] == [0, 3]
    assert losses(tmp_path) == losses(whole_run)


ONE = ["parallel.gpus=1", "parallel.tensor=1", "parallel.sequence=false", "train.evaluate_sequences=0"]


def train_with_a_bad_step(name: str, assignments: list[str], bad_step: int, kept: Path) -> None:
    """One rank of a run in which the loss of the step's second micro-batch is not a number; what it saw goes to
    `kept`."""
    from megatron.training.global_vars import get_args

    from qla_megatron.data import batch
    from qla_megatron.recipes import train

    original, read = train.token_loss, batch.next_micro_batch
    seen: list[torch.Tensor] = []

    def next_micro_batch(*arguments: Any, **keywords: Any) -> Any:
        found = read(*arguments, **keywords)
        if get_args().curr_iteration + 1 == bad_step:
            seen.append(found.tokens)
            if parallel_state.is_pipeline_first_stage():  # the other one has no tokens
                torch.save(seen, kept)
        return found

    def token_loss(*arguments: Any, **keywords: Any) -> Any:
        total, count, report = original(*arguments, **keywords)
        if get_args().curr_iteration + 1 == bad_step and len(seen) == 2:
            total, report["lm loss"] = total * math.nan, report["lm loss"] * math.nan
        return total, count, report

    train.token_loss, batch.next_micro_batch = token_loss, next_micro_batch
    train_on_this_rank(name, assignments)


def test_guard_stops_before_the_update_and_keeps_the_batch(corpus: str, tmp_path: Path) -> None:
    folder, kept = tmp_path / "run", tmp_path / "seen.pt"
    command = [*SHORT, corpus, "parallel.tensor=1", "parallel.sequence=false", "parallel.pipeline=2"]
    command += ["train.evaluate_sequences=0", "checkpoint.save_every=3", f"checkpoint.folder={folder}"]
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        run_ranks(train_with_a_bad_step, 2, DENSE, command, 5, kept)
    log = read_log(folder)
    assert sorted(log["loss"]) == [1, 2, 3, 4]
    found = log["not_finite"][5]["not_finite"]
    assert found["micro_batches"] == {"rank 1": [1]}  # the last stage knows losses
    assert "decoder.layers.0.self_attention.in_proj" in found["modules"]
    assert (folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == "3"
    saved = torch.load(folder / "failed" / "step_0000005" / "data_parallel_rank_0.pt")
    assert (saved["step"], saved["first_sample"]) == (5, 16)
    assert [math.isfinite(loss) for loss in saved["losses"]] == [True, False, True, True]
    seen = torch.load(kept)
    assert len(saved["micro_batches"]) == len(seen) == 4
    assert all(torch.equal(one["tokens"], other) for one, other in zip(saved["micro_batches"], seen, strict=True))
    run_ranks(train_with_a_bad_step, 2, DENSE, [*command, "train.skip_steps=[5]"], 5, kept)
    starts = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines() if '"start"' in line]
    assert [start["start"] for start in starts] == [0, 3]
    assert sorted(losses(folder)) == [1, 2, 3, 4, 6]


@pytest.mark.parametrize(
    ("changes", "is_stopped"),
    [
        (["checkpoint.expected_loss=9"], True),
        (["checkpoint.loss_tolerance=1e-6"], False),  # the mean of other steps is never that near
    ],
)
def test_first_loss_is_compared(
    whole_run: Path, corpus: str, tmp_path: Path, changes: list[str], is_stopped: bool
) -> None:
    load = [f"checkpoint.load={whole_run}/checkpoints", "checkpoint.load_step=3", f"checkpoint.folder={tmp_path}"]
    command = [*SHORT, corpus, *ONE, *load, "train.stop_after=4", "train.global_batch=2", *changes]
    with pytest.raises(RuntimeError, match="SystemExit: 3") if is_stopped else contextlib.nullcontext():
        run_ranks(train_on_this_rank, 1, DENSE, command)
    assert sorted(read_log(tmp_path)["warning"]) == [4]
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").exists() != is_stopped
    if not is_stopped:  # what the recipe says is about the start from another run's checkpoint, not about going on
        with (tmp_path / "log.jsonl").open("a") as log:
            log.write('{"step": 4, "lo\n')  # as a crash leaves it
        run_ranks(train_on_this_rank, 1, DENSE, [*command, "train.stop_after=5", "checkpoint.expected_loss=9"])
        assert sorted(read_log(tmp_path)["warning"]) == [4, 5]


def test_distributed_optimizer_resumes_exactly(corpus: str, tmp_path: Path) -> None:
    """Fails with any of the three parts of upstream._resume_with_torch_adamw taken out."""
    command = [*SHORT, corpus, "parallel.tensor=1", "parallel.sequence=false", "optimizer.distributed=true"]
    command += ["optimizer.overlap=true", "train.log_module_grad_norms=true"]
    first, second = tmp_path / "whole", tmp_path / "resumed"
    run_ranks(train_on_this_rank, 2, DENSE, [*command, "checkpoint.save_every=3", f"checkpoint.folder={first}"])
    start = [f"checkpoint.load={first}/checkpoints", "checkpoint.load_step=3", "checkpoint.save=false"]
    run_ranks(train_on_this_rank, 2, DENSE, [*command, *start, f"checkpoint.folder={second}"])
    assert losses(second) == {step: loss for step, loss in losses(first).items() if step > 3}
    assert_module_grad_norms_add_up(first)


NO_TENSOR_PARALLEL = ["parallel.tensor=1", "parallel.sequence=false"]
OTHERS = [  # recipe, ranks, changes
    pytest.param("tiny_moe_pretrain_2k_2xcpu", 2, [], id="moe-tp2"),
    pytest.param("tiny_moe_pretrain_2k_2xcpu", 2, [*NO_TENSOR_PARALLEL, "parallel.expert=2"], id="moe-ep2"),
    pytest.param(
        DENSE, 2, [*NO_TENSOR_PARALLEL, "parallel.pipeline=2", "parallel.layers_per_virtual_stage=1"], id="waves"
    ),
    pytest.param("tiny_hybrid_pretrain_2k_2xcpu", 2, [], id="hybrid-tp2"),
    pytest.param(
        DENSE, 2, [*NO_TENSOR_PARALLEL, "parallel.pipeline=2", "model.prediction_layers=1"], id="pipeline2-mtp"
    ),
    pytest.param(DENSE, 2, ["model.prediction_layers=1", "model.tie_embeddings=true"], id="tp2-mtp-tied"),
    pytest.param(DENSE, 2, [*NO_TENSOR_PARALLEL, "parallel.context=2"], id="context2"),
]


@pytest.mark.parametrize(("name", "ranks", "changes"), OTHERS)
def test_other_models_and_layouts_learn(name: str, ranks: int, changes: list[str], corpus: str, tmp_path: Path) -> None:
    command = [*SHORT, corpus, *changes, "checkpoint.save=false", "train.log_module_grad_norms=true"]
    run_ranks(train_on_this_rank, ranks, name, [*command, f"checkpoint.folder={tmp_path}"])
    found = losses(tmp_path)
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    assert found[6] < found[1] - 0.5
    further = [record.get("prediction_loss") for record in read_log(tmp_path)["loss"].values()]
    if "model.prediction_layers=1" in changes:
        assert abs(further[0] - math.log(257)) < 0.6
        assert further[-1] < further[0] - 0.3
    else:
        assert further == [None] * 6
    assert all(math.isfinite(loss) for loss in found.values())
    assert_module_grad_norms_add_up(tmp_path)
