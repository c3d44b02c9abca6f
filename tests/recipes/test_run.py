"""The command line: listing, printing, changing fields, refusing."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from qla_megatron.data.corpus import CorpusInfo
from qla_megatron.recipes import catalogue, checks, overrides, run
from qla_megatron.recipes.recipe import Recipe

NAMES = list(catalogue.RECIPES)
DEMO = "tiny_pretrain_2k_2xcpu"
NINE = "qwen3_5_9b_pretrain_4k_8xh200"


def test_list_names_every_recipe_under_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if line.startswith("  ")] == [
        name for names in catalogue.by_model().values() for name in names
    ]
    assert sorted(NAMES) == sorted(name for names in catalogue.by_model().values() for name in names)
    assert "qwen3_5_397b_a17b: 396B, 17.3B active, 6.6B in prediction blocks" in printed
    row = next(line for line in printed.splitlines() if "qwen3_5_122b_a10b_pretrain_4k_64xh200" in line)
    assert row.split()[1:4] == ["64", "h200", "4,096"]
    assert "TP2 PP2 EP8 DP16" in row


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_named_after_what_it_is_and_can_work(name: str) -> None:
    recipe = catalogue.find(name)
    checks.check(recipe)
    assert name.endswith(f"_{recipe.parallel.gpus}x{recipe.parallel.device}")
    assert f"_{recipe.data.sequence_length // 1024}k_" in name
    assert name.startswith(next(model for model, names in catalogue.by_model().items() if name in names))


def test_ten_sizes_have_recipes_of_every_purpose() -> None:
    sizes = "qwen3_5_0_8b qwen3_5_2b qwen3_5_4b qwen3_5_9b qwen3_5_27b qwen3_5_35b_a3b qwen3_5_122b_a10b"
    for size in [*sizes.split(), "qwen3_5_397b_a17b", "qwen3_6_27b", "qwen3_6_35b_a3b"]:
        for purpose in ("pretrain_4k", "pretrain_8k", "extend_32k", "extend_256k"):
            assert any(name.startswith(f"{size}_{purpose}_") for name in NAMES), (size, purpose)


def test_print_shows_recipe_command_and_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([NINE, "--print", "train.steps=7777"]) == 0
    printed = capsys.readouterr().out
    assert "steps: 7777" in printed
    assert f"torchrun --standalone --nproc-per-node 8 -m qla_megatron.recipes.run {NINE} train.steps=7777" in printed
    assert "--train-iters 7777" in printed
    assert "--linear-num-value-heads 32" in printed


def test_every_field_can_be_set() -> None:
    recipe = catalogue.find(NINE)
    others = {bool: "{}", int: "7", float: "0.5"}
    for path in overrides.paths(recipe):
        part, name = path.split(".")
        value = getattr(getattr(recipe, part), name)
        text = str(not value) if isinstance(value, bool) else others.get(type(value), "null")
        if isinstance(value, tuple):
            text = "[2.0, 3.0]" if name == "gdn_decay_init" else "[a, b]"
        if isinstance(value, str):
            text = CHOICES.get(path, "other")
        if path in OPTIONAL:
            text = OPTIONAL[path]
        changed = getattr(getattr(overrides.apply(recipe, [f"{path}={text}"]), part), name)
        assert changed != value or text == str(value), path
        assert type(changed) is type(value) or value is None, path


CHOICES = {
    "model.gdn": "megatron", "model.gdn_backend": "reference", "model.stack": "hybrid", "parallel.device": "cpu",
    "precision.dtype": "fp32", "train.recompute": "full", "optimizer.decay": "linear",
}  # fmt: skip
OPTIONAL = {
    "model.num_experts": "8", "model.expert_hidden_size": "64", "model.shared_expert_hidden_size": "64",
    "parallel.layers_per_virtual_stage": "2", "parallel.first_stage_layers": "2", "parallel.last_stage_layers": "2",
    "data.cache": "elsewhere", "train.stop_after": "5", "optimizer.decay_steps": "5", "checkpoint.folder": "elsewhere",
    "checkpoint.load": "elsewhere", "checkpoint.load_step": "5", "checkpoint.expected_loss": "2.5",
    "train.skip_steps": "[3, 4]", "train.wandb": "project",
}  # fmt: skip


def test_changed_recipe_is_a_frozen_recipe() -> None:
    changed = overrides.apply(catalogue.find(DEMO), ["optimizer.lr=1e-4", "data.paths=[0.3, a, 0.7, b]"])
    assert changed.optimizer.lr == 1e-4
    assert changed.data.paths == ("0.3", "a", "0.7", "b")
    assert isinstance(changed, Recipe)
    assert all(is_dataclass(getattr(changed, item.name)) for item in fields(changed))
    with pytest.raises(AttributeError):
        changed.optimizer.lr = 1.0  # type: ignore[misc]


REFUSED = [  # arguments, what the message must say
    pytest.param(["qwen3_5_9b_pretrain_4k_8xh20"], f"Did you mean {NINE}?", id="unknown-recipe"),
    pytest.param([DEMO, "train.stps=3"], "Did you mean train.steps?", id="misspelt-field"),
    pytest.param([DEMO, "model.lr=3"], "Did you mean optimizer.lr?", id="field-of-another-part"),
    pytest.param([DEMO, "lr=3"], "Did you mean optimizer.lr?", id="field-without-part"),
    pytest.param([DEMO, "optimiser.lr=3"], "Did you mean optimizer.lr?", id="misspelt-part"),
    pytest.param([DEMO, "model=3"], "no field 'model'", id="a-part-is-no-field"),
    pytest.param([DEMO, "train.steps=many"], "could not be converted to Integer", id="wrong-type"),
    pytest.param([DEMO, "train.steps=1.5"], "could not be converted to Integer", id="fraction-for-integer"),
    pytest.param([DEMO, "precision.dtype=fp8"], "expected one of", id="not-a-choice"),
    pytest.param([DEMO, "data.paths=[a"], "data.paths=[a: the value is not YAML", id="broken-yaml"),
    pytest.param([DEMO, "data.paths=a"], "data.paths=a: Invalid value", id="no-list"),
    pytest.param([DEMO, "checkpoint.folder=${nothing}"], "checkpoint.folder=${nothing}: ", id="interpolation"),
    pytest.param([DEMO, "train.steps"], "expected path.to.field=value", id="no-value"),
    pytest.param([NINE, "parallel.tensor=3"], "not a multiple of tensor x context x pipeline", id="layout"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_refusal_is_one_clear_message(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_plan_says_what_fits_and_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([NINE, "--plan", "--rates"]) == 0
    printed = capsys.readouterr().out
    assert "Fits: " in printed
    assert "rule_forward" in printed
    assert run.main([NINE, "--plan", "--document-length", "4096", "data.sequence_length=65536"]) == 0
    printed = capsys.readouterr().out
    assert "documents of 4,096" in printed
    assert "Does not fit: " in printed
    assert "train.recompute=full" in printed


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([NINE, "--plan", "--json", "train.recompute=full"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["fits"] is True
    assert figures["recipe"]["train"]["recompute"] == "full"
    assert figures["parameters"]["text"] == 8_953_803_264
    assert figures["peak_gib"] == figures["memory_bytes"][figures["fullest_stage"]]["peak"] / 2**30


def test_plan_refuses_documents_longer_than_the_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([NINE, "--plan", "--document-length", "8192"]) == 2
    assert "document_length must be from 1 to data.sequence_length=4096, got 8192" in capsys.readouterr().err


def test_without_torchrun_the_line_to_type_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    prefix = f"{tmp_path}/data"
    for suffix in (".idx", ".bin"):
        Path(f"{prefix}{suffix}").touch()
    assert run.main([DEMO, f"data.paths=[{prefix}]"]) == 2
    line = f"torchrun --standalone --nproc-per-node 2 -m qla_megatron.recipes.run {DEMO} 'data.paths=[{prefix}]'"
    assert line in capsys.readouterr().err


def test_several_nodes_in_the_launch_line() -> None:
    command = " ".join(run.torchrun_command(catalogue.find("qwen3_5_27b_pretrain_4k_16xh200"), ["NAME"]))
    assert "--nnodes 2 --nproc-per-node 8" in command


def test_machine_that_lacks_things_is_refused_by_name(tmp_path: Path) -> None:
    recipe = catalogue.find(NINE)
    with pytest.raises(checks.RecipeError) as refusal:
        checks.check_machine(recipe, {"WORLD_SIZE": "4"}, cuda_devices=0)
    assert "parallel.gpus=8 but 4 process(es) run" in str(refusal.value)
    assert "tiny_pretrain_2k_2xcpu" in str(refusal.value)
    assert "tools/pack_dataset.py" in str(refusal.value)
    recipe = replace(recipe, data=replace(recipe.data, paths=("0.5", f"{tmp_path}/a")))
    with pytest.raises(checks.RecipeError, match=r"a\.idx does not exist"):
        checks.check_machine(recipe, {"WORLD_SIZE": "8"}, cuda_devices=8)
    recipe = replace(recipe, checkpoint=replace(recipe.checkpoint, load=str(tmp_path)))
    with pytest.raises(checks.RecipeError, match="holds no checkpoint"):
        checks.check_machine(recipe, {"WORLD_SIZE": "8"}, cuda_devices=8)
    Path(f"{tmp_path}/iter_0000007").mkdir()
    Path(f"{tmp_path}/latest_checkpointed_iteration.txt").write_text("7")
    recipe = replace(recipe, checkpoint=replace(recipe.checkpoint, load_step=5))
    with pytest.raises(checks.RecipeError, match="there are iter_0000007"):
        checks.check_machine(recipe, {"WORLD_SIZE": "8"}, cuda_devices=8)


def test_data_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    info = CorpusInfo("byte", 257, 256, "uint16", documents=1, tokens=5, shortest=5, longest=5, empty=0)
    (tmp_path / "a.json").write_text(json.dumps(asdict(info)))
    for suffix in (".idx", ".bin"):
        (tmp_path / f"a{suffix}").touch()
    recipe = overrides.apply(catalogue.find(DEMO), [f"data.paths=[{tmp_path}/a]"])
    checks.check_machine(recipe, {"WORLD_SIZE": "2"}, cuda_devices=0)
    recipe = overrides.apply(recipe, [f"model.vocab_size={info.vocab_size - 1}"])
    with pytest.raises(checks.RecipeError, match=r"tokenizer byte, of 257 tokens, but model.vocab_size=256"):
        checks.check_machine(recipe, {"WORLD_SIZE": "2"}, cuda_devices=0)


def test_fewer_devices_than_processes_are_refused(tmp_path: Path) -> None:
    recipe = overrides.apply(catalogue.find(NINE), [f"data.paths=[{tmp_path}/a]"])
    with pytest.raises(checks.RecipeError, match=r"needs 8 CUDA device\(s\) here and torch finds 1"):
        checks.check_machine(recipe, {"WORLD_SIZE": "8"}, cuda_devices=1)
    with pytest.raises(checks.RecipeError) as refusal:  # a launcher may show each process one
        checks.check_machine(recipe, {"WORLD_SIZE": "8", "RANK": "3"}, cuda_devices=1)
    assert "CUDA" not in str(refusal.value)


def test_run_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    recipe = catalogue.find(DEMO)
    (tmp_path / "recipe.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(recipe)))
    wider = overrides.apply(recipe, ["model.hidden_size=256", "model.init_std=0.01"])
    checks.check_folder(wider, tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("3")
    checks.check_folder(overrides.apply(recipe, ["train.steps=7", "model.init_std=0.01"]), tmp_path)
    with pytest.raises(checks.RecipeError, match=r"another model: model.hidden_size is 128 there and 256 here\. Take"):
        checks.check_folder(wider, tmp_path)
    with pytest.raises(checks.RecipeError, match="is a file"):
        checks.check_folder(recipe, tmp_path / "recipe.yaml")


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    from qla_megatron.recipes import train

    recipe = overrides.apply(catalogue.find(DEMO), [f"checkpoint.folder={tmp_path}"])
    with train._alone_in(tmp_path), pytest.raises(checks.RecipeError, match="another run is under way in"):
        train.train(recipe, DEMO, rank=0, world=2)
    assert not list(tmp_path.iterdir())
    with train._alone_in(tmp_path):
        pass


def test_launch_serves_one_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for suffix in (".idx", ".bin"):
        (tmp_path / f"d{suffix}").touch()
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("must not launch"))
    changes = [f"data.paths=[{tmp_path}/d]", "parallel.gpus=4", "parallel.gpus_per_node=2", "--launch"]
    assert run.main([DEMO, *changes]) == 2
    assert "--nnodes 2" in (error := capsys.readouterr().err)
    assert "on each of the machines" in error


def test_an_error_inside_a_run_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qla_megatron.recipes import train

    for suffix in (".idx", ".bin"):
        (tmp_path / f"d{suffix}").touch()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    def fail(*_: object, **__: object) -> None:
        raise ValueError("a fault on this rank alone")

    monkeypatch.setattr(train, "train", fail)
    with pytest.raises(ValueError, match="a fault on this rank"):
        run.main([DEMO, f"data.paths=[{tmp_path}/d]"])


def test_module_runs_and_help_teaches_with_examples() -> None:
    command = [sys.executable, "-m", "qla_megatron.recipes.run", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "examples:" in shown
    assert "--launch" in shown


def test_listing_and_planning_import_neither_torch_nor_megatron() -> None:
    code = (
        "import sys; from qla_megatron.recipes import run; run.main(['--list']); run.main([sys.argv[1], '--plan']);"
        "assert not {'torch', 'megatron'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, NINE], check=True, timeout=60, capture_output=True)


def test_a_process_ends_at_once_after_an_error() -> None:
    code = (
        "import threading, time; from qla_megatron.recipes import run;"
        "threading.Thread(target=time.sleep, args=(120,)).start();"  # what the interpreter would wait for
        "run.main = lambda: 1 / 0; run.run()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "ZeroDivisionError" in ended.stderr
