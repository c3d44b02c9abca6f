"""Short runs of the tiny recipes on Megatron's own loop: what a run logs, resuming, other layouts, SIGTERM.

Runs share one corpus and, where they can, one another's checkpoints: a run costs seconds of start-up.
"""

import json
import math
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from megatron.core import parallel_state

from qla_megatron.data.corpus import write_corpus
from qla_megatron.recipes import catalogue, checks, overrides
from qla_megatron.recipes.progress import read_log
from qla_megatron.testing.distributed import run_ranks

SHORT = [  # 256 tokens a sequence; small enough for seconds, long enough for several documents a sequence
    "data.sequence_length=256", "train.global_batch=4", "train.steps=6", "optimizer.warmup_steps=2",
    "train.evaluate_every=100", "train.evaluate_sequences=4", "train.log_every=2",
]  # fmt: skip
DENSE = "tiny_pretrain_2k_2xcpu"


def train_on_this_rank(name: str, assignments: list[str], delay_sigterm: float | None = None) -> None:
    """One rank of a run. `delay_sigterm`: this process gets SIGTERM so many seconds after the first step was logged."""
    from qla_megatron.recipes.train import train

    recipe = overrides.apply(catalogue.find(name), assignments)
    checks.check(recipe)
    parallel_state.destroy_model_parallel()  # run_ranks made groups of its own, which Megatron would keep
    if delay_sigterm is not None:
        log = Path(recipe.checkpoint.folder or "") / "log.jsonl"
        threading.Thread(target=terminate_later, args=(log, delay_sigterm), daemon=True).start()
    train(recipe, name, rank=int(os.environ["RANK"]), world=int(os.environ["WORLD_SIZE"]))
    p = recipe.parallel
    sizes = {
        "tensor_model_parallel": p.tensor, "context_parallel": p.context, "pipeline_model_parallel": p.pipeline,
        "expert_model_parallel": p.expert, "data_parallel": p.data,
    }  # fmt: skip
    assert {kind: getattr(parallel_state, f"get_{kind}_world_size")() for kind in sizes} == sizes


def terminate_later(log: Path, delay: float) -> None:
    while not (log.exists() and '"loss"' in log.read_text()):
        time.sleep(0.05)
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGTERM)


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
    run_ranks(train_on_this_rank, 2, DENSE, [*SHORT, corpus, *start, f"checkpoint.folder={tmp_path}"])
    resumed = losses(tmp_path)
    assert sorted(resumed) == [4, 5, 6]
    assert resumed == {step: loss for step, loss in losses(whole_run).items() if step > 3}


def test_one_process_gives_the_losses_of_two(whole_run: Path, corpus: str, tmp_path: Path) -> None:
    start = [f"checkpoint.load={whole_run}/checkpoints", "checkpoint.load_step=3", "checkpoint.save=false"]
    start.append("train.evaluate_sequences=0")
    one = ["parallel.gpus=1", "parallel.tensor=1", "parallel.sequence=false", "train.stop_after=5"]
    run_ranks(train_on_this_rank, 1, DENSE, [*SHORT, corpus, *start, *one, f"checkpoint.folder={tmp_path}"])
    single = losses(tmp_path)
    assert sorted(single) == [4, 5]
    assert not read_log(tmp_path)["held_out_loss"]
    for step, loss in single.items():
        assert loss == pytest.approx(losses(whole_run)[step], rel=1e-5)


def test_sigterm_saves_and_the_same_command_goes_on(corpus: str, tmp_path: Path) -> None:
    command = [*SHORT, corpus, "train.steps=200", f"checkpoint.folder={tmp_path}", "train.evaluate_sequences=0"]
    command += ["parallel.gpus=1", "parallel.tensor=1", "parallel.sequence=false", "train.log_every=1"]
    run_ranks(train_on_this_rank, 1, DENSE, command, 0.2)
    saved = read_log(tmp_path)["saved"]
    assert len(saved) == 1
    stopped_at = next(iter(saved))
    assert 1 <= stopped_at < 200
    run_ranks(train_on_this_rank, 1, DENSE, [*command, f"train.stop_after={stopped_at + 1}"])
    starts = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines() if '"start"' in line]
    assert [start["start"] for start in starts] == [0, stopped_at]
    assert max(losses(tmp_path)) == stopped_at + 1


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
    pytest.param(DENSE, 2, [*NO_TENSOR_PARALLEL, "parallel.pipeline=2"], id="pipeline2"),
    pytest.param(DENSE, 2, [*NO_TENSOR_PARALLEL, "parallel.context=2"], id="context2"),
]


@pytest.mark.parametrize(("name", "ranks", "changes"), OTHERS)
def test_other_models_and_layouts_learn(name: str, ranks: int, changes: list[str], corpus: str, tmp_path: Path) -> None:
    command = [*SHORT, corpus, *changes, "checkpoint.save=false", "train.log_module_grad_norms=true"]
    run_ranks(train_on_this_rank, ranks, name, [*command, f"checkpoint.folder={tmp_path}"])
    found = losses(tmp_path)
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    assert found[6] < found[1] - 0.5
    assert all(math.isfinite(loss) for loss in found.values())
    assert_module_grad_norms_add_up(tmp_path)
