"""Hugging Face -> Megatron -> Hugging Face of tiny models of all ten families, in other layouts and through runs.

Ranks and processes that import Megatron are dear: each of them does all families.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import TOOL, assert_bitwise, call, hurry, make_families, run, tensors_of, write_directory
from safetensors.torch import save_file

from qla_megatron.recipes import build, catalogue, checks, overrides
from qla_megatron.recipes.models import MODELS
from qla_megatron.recipes.recipe import Parallel, Recipe
from qla_megatron.testing.distributed import run_ranks

LAYOUTS = {
    "tensor": Parallel(gpus=2, device="cpu", tensor=2, sequence=True),
    "pipeline": Parallel(gpus=2, device="cpu", pipeline=2),
    "expert": Parallel(gpus=2, device="cpu", expert=2),
}
EXPERTS = [name for name, model in MODELS.items() if model.num_experts]
DIRECT = ["qwen3_5_2b", "qwen3_6_35b_a3b"]  # exported as they were imported, too, in small shards


def layouts_of(name: str) -> list[str]:
    """The checkpoints of a family that are exported."""
    return [*(["megatron"] if name in DIRECT else []), "tensor", "pipeline", *(["expert"] if name in EXPERTS else [])]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten folders NAME/hf and, imported, NAME/megatron; NAME/check holds what check printed."""
    root = tmp_path_factory.mktemp("families")
    run_ranks(import_on_this_rank, 1, str(root), timeout=300)
    return root


def import_on_this_rank(root: str) -> None:
    from qla_megatron.recipes.hugging_face import torch_dist

    make_families(Path(root), list(MODELS))
    for name in MODELS:
        folder = Path(root) / name
        torch_dist.FILE_BYTES = 1 << 16 if name in DIRECT else 2 << 30
        run("import", "--hf", folder / "hf", "--megatron", folder / "megatron")
        code, out = call("check", "--hf", folder / "hf", "--megatron", folder / "megatron", "--tokens", "70")
        (folder / "check").write_text(f"{code}\n{out}")


# --- there and back ---


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(families: Path, name: str) -> None:
    code, _, *lines = (families / name / "check").read_text().splitlines()
    assert code == "0", lines
    assert [line.split()[0] for line in lines] == ["logits", "logits", str(len(mtp_names(families, name)))], lines
    assert all(line.split()[-1] == "ok" for line in lines)


def mtp_names(families: Path, name: str) -> list[str]:
    return [tensor for tensor in tensors_of(families / name / "hf") if tensor.startswith("mtp.")]


@pytest.fixture(scope="module")
def round_trips(families: Path) -> Path:
    """Every family loaded and saved by two ranks in each layout, and exported: NAME/back_LAYOUT."""
    for layout, parallel in LAYOUTS.items():
        sizes = {"tensor_parallel": parallel.tensor, "pipeline_parallel": parallel.pipeline}
        sizes |= {"expert_parallel": parallel.expert, "expert_tensor_parallel": 1}
        run_ranks(reshard_on_this_rank, 2, str(families), layout, **sizes, timeout=300)
    run_ranks(export_on_this_rank, 1, str(families), timeout=300)
    return families


def reshard_on_this_rank(root: str, layout: str) -> None:
    """Load each family's checkpoint into models of this layout, and save them; two of the three in bfloat16."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.training.checkpointing import _build_sharded_state_dict_metadata

    from qla_megatron.recipes import upstream

    upstream.apply()
    hurry()
    for name in EXPERTS if layout == "expert" else MODELS:
        folder = Path(root) / name
        args, module = module_in(LAYOUTS[layout], folder)
        module = module if layout == "pipeline" else module.bfloat16()
        metadata = _build_sharded_state_dict_metadata(args)
        state = dist_checkpointing.load(
            {"model": module.sharded_state_dict(metadata=metadata)}, str(folder / "megatron" / "release")
        )
        module.load_state_dict(state["model"])
        target = folder / layout / "iter_0000007"
        if parallel_state.get_data_parallel_rank() == torch.distributed.get_rank() == 0:
            target.mkdir(parents=True)
            (folder / layout / "latest_checkpointed_iteration.txt").write_text("7")
        torch.distributed.barrier()
        saved = {"model": module.sharded_state_dict(metadata=metadata), "args": args, "iteration": 7}
        dist_checkpointing.save(saved, str(target))


def module_in(parallel: Parallel, folder: Path) -> tuple[Namespace, Any]:
    """This rank's part of the model of folder/hf, with its prediction layer, weights not those of any checkpoint."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.arguments import parse_args, validate_args

    recipe = replace(recipe_of(folder), parallel=parallel)
    sys.argv = ["megatron", *build.megatron_flags(recipe, "test")]
    with contextlib.redirect_stdout(io.StringIO()):
        args = parse_args()
        validate_args(args, {})
    config = build.model_config(recipe, args)
    model = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    if recipe.model.tie_embeddings and model.mtp_process and not model.pre_process:
        # Fault of megatron-core 0.19: the last stage, which has the embedding for the prediction layer, keeps an output
        # weight besides, which nothing uses and sharded_state_dict refuses.
        model.output_layer.weight = None
    return args, model


def recipe_of(folder: Path) -> Recipe:
    from qla_megatron.layers.hf_weights import layout_from_hf
    from qla_megatron.recipes.hugging_face.files import open_directory
    from qla_megatron.recipes.hugging_face.model import model_from_config

    hf = open_directory(folder / "hf")
    base = catalogue.find("tiny_pretrain_2k_2xcpu")
    return replace(base, model=model_from_config(hf.config, layout_from_hf(hf.config, hf.tensors)))


def export_on_this_rank(root: str) -> None:
    for name in MODELS:
        folder = Path(root) / name
        for layout in layouts_of(name):
            options = ["--shard-gib", 1e-4] if layout == "megatron" else []
            source, back = folder / layout, folder / f"back_{layout}"
            run("export", "--megatron", source, "--reference", folder / "hf", "--hf", back, *options)


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_bitwise(round_trips: Path, name: str) -> None:
    folder = round_trips / name
    source = tensors_of(folder / "hf")
    for layout in layouts_of(name):
        back = folder / f"back_{layout}"
        assert_bitwise(tensors_of(back), source)
        small = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
        assert {file.name for file in back.iterdir() if file.suffix != ".safetensors"} == small
        for file in ("config.json", "tokenizer.json"):
            assert (back / file).read_bytes() == (folder / "hf" / file).read_bytes()
    if name in DIRECT:
        assert len(list((folder / "megatron" / "release").glob("*.distcp"))) > 2
        assert len(list((folder / "back_megatron").glob("*.safetensors"))) > 2
    there = {"hf", "check", "megatron", *layouts_of(name), *(f"back_{layout}" for layout in layouts_of(name))}
    assert {file.name for file in folder.iterdir()} == there


# --- choices ---


def choices_on_this_rank(root: str) -> dict[str, tuple[int, str]]:
    """What each command said, by a name for it; directories are root/NAME of that command."""
    folder = Path(root)
    make_families(folder, ["qwen3_5_35b_a3b"])
    hf = folder / "qwen3_5_35b_a3b" / "hf"
    bare = folder / "bare"
    bare.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (bare / file).write_bytes((hf / file).read_bytes())
    other = tensors_of(hf)
    other["model.language_model.layers.1.mlp.gate.weight"] *= 1.1
    write_directory(folder / "other", json.loads((hf / "config.json").read_text()), other)
    single = folder / "single"
    single.mkdir()
    save_file(tensors_of(hf), single / "model.safetensors")
    (single / "config.json").write_bytes((hf / "config.json").read_bytes())
    dropped, whole, text = folder / "dropped", folder / "whole", folder / "text"

    def export(name: str, source: Path, reference: Path, *options: str) -> tuple[int, str]:
        return call("export", "--megatron", source, "--reference", reference, "--hf", folder / name, *options)

    return {
        "dropped": call("import", "--hf", hf, "--megatron", dropped, "--mtp", "drop"),
        "whole": call("import", "--hf", single, "--megatron", whole),
        "keep": export("keep", dropped, hf),
        "reference": export("reference", dropped, hf, "--mtp", "reference"),
        "drop": export("drop", whole, hf, "--mtp", "drop"),
        "text": export("text", whole, hf, "--text-only"),
        "bare": export("bare_text", whole, bare, "--text-only"),
        "vision": export("vision", whole, bare),
        "check text": call("check", "--hf", text, "--megatron", whole),
        "from text": call("import", "--hf", text, "--megatron", folder / "from_text"),
        "text again": export("text_again", folder / "from_text", text),
        "check other": call("check", "--hf", folder / "other", "--megatron", whole),
        "check dropped": call("check", "--hf", hf, "--megatron", dropped),
    }


def test_choices(tmp_path: Path) -> None:
    [said] = run_ranks(choices_on_this_rank, 1, str(tmp_path))
    codes = {name: code for name, (code, _) in said.items()}
    assert codes == dict.fromkeys(said, 0) | {"keep": 2, "vision": 2, "check other": 1}, said
    source = tensors_of(tmp_path / "qwen3_5_35b_a3b" / "hf")
    config = json.loads((tmp_path / "qwen3_5_35b_a3b" / "hf" / "config.json").read_text())
    assert "--mtp reference" in said["keep"][1]
    assert "--text-only" in said["vision"][1]
    assert "DIFFERENT" in said["check other"][1]
    assert "MTP" not in said["check dropped"][1]
    assert "skipped" in said["dropped"][1].split("MTP layer")[1].splitlines()[0]

    assert_bitwise(tensors_of(tmp_path / "reference"), source)
    assert_bitwise(tensors_of(tmp_path / "drop"), {n: t for n, t in source.items() if not n.startswith("mtp.")})
    text = config["text_config"]
    dropped = config | {"text_config": text | {"mtp_num_hidden_layers": 0}}
    assert json.loads((tmp_path / "drop" / "config.json").read_text()) == dropped

    of_text = {n.replace("language_model.", ""): t for n, t in source.items() if not n.startswith("model.visual.")}
    assert_bitwise(tensors_of(tmp_path / "text"), of_text)
    assert_bitwise(tensors_of(tmp_path / "text_again"), of_text)
    of_class = {"architectures": ["Qwen3_5MoeForCausalLM"], "tie_word_embeddings": False}
    assert json.loads((tmp_path / "text" / "config.json").read_text()) == text | of_class
    # without weights to look at, small norms are what minus one, plus one makes of them
    bare = tensors_of(tmp_path / "bare_text")
    norms = {n for n in of_text if n.endswith("linear_attn.norm.weight")}
    for name in norms:
        assert (bare[name] - of_text[name]).abs().max() <= 2**-24
    assert any(not torch.equal(bare[name], of_text[name]) for name in norms), "no small norm in this test"
    assert_bitwise(bare | {n: of_text[n] for n in norms}, of_text)


# --- runs ---


def run_on_this_rank(assignments: list[str]) -> None:
    from megatron.core import parallel_state

    from qla_megatron.recipes.train import train

    recipe = overrides.apply(catalogue.find("tiny_pretrain_2k_2xcpu"), assignments)
    checks.check(recipe)
    parallel_state.destroy_model_parallel()  # run_ranks made groups of its own, which Megatron would keep
    train(recipe, "conversion", rank=torch.distributed.get_rank(), world=torch.distributed.get_world_size())


def of_model(folder: Path, **changes: object) -> list[str]:
    """The assignments that make a recipe's model that of folder/hf."""
    model = asdict(replace(recipe_of(folder).model, **changes))
    values = {name: "null" if value is None else value for name, value in model.items() if name != "gdn_decay_init"}
    return [f"model.{name}={value}" for name, value in values.items()]


def import_bytes_on_this_rank(root: str) -> dict[str, list[str]]:
    """A model of bytes, whose 258 rows Megatron pads to 320, and data for it; the model for a recipe by its stack."""
    from qla_megatron.data.corpus import write_corpus

    write_corpus([f"def f{i}(x):\n    return x * {i}\n" * (1 + i % 7) for i in range(60)], Path(root) / "corpus")
    make_families(Path(root), ["qwen3_5_9b"], vocab_size=258)
    folder = Path(root) / "qwen3_5_9b"
    for stack in ("gpt", "hybrid"):
        target = Path(root) / f"from_{stack}"
        run("import", "--hf", folder / "hf", "--megatron", target, "--padded-vocab-size", 320, "--stack", stack)
    assert call("check", "--hf", folder / "hf", "--megatron", Path(root) / "from_hybrid")[0] == 0
    changes = {"gpt": {}, "hybrid": {"prediction_layers": 0}}
    return {stack: of_model(folder, padded_vocab_size=320, stack=stack, **changes[stack]) for stack in changes}


def export_runs_on_this_rank(root: str) -> None:
    folder = Path(root) / "qwen3_5_9b"
    for name, source, options in (
        ("gpt", "gpt/checkpoints", []),
        ("hybrid", "hybrid/checkpoints", ["--mtp", "reference"]),
        ("from_hybrid", "from_hybrid", []),
    ):
        back = Path(root) / f"back_{name}"
        said = run("export", "--megatron", Path(root) / source, "--reference", folder / "hf", "--hf", back, *options)
        assert ("optimizer state" in said) == (name != "from_hybrid")


def test_runs_start_from_what_is_imported_and_come_out_as_they_were(tmp_path: Path) -> None:
    """One step with learning rate 0: two ranks with the distributed optimizer, and one rank with HybridModel, without
    it and without a prediction layer."""
    [models] = run_ranks(import_bytes_on_this_rank, 1, str(tmp_path))
    shared = [
        f"data.paths=[{tmp_path / 'corpus'}]", "data.sequence_length=128", "train.global_batch=2", "train.steps=1",
        "train.evaluate_sequences=0", "optimizer.lr=0", "optimizer.min_lr=0", "optimizer.warmup_steps=0",
    ]  # fmt: skip
    layouts = {
        "gpt": ["optimizer.distributed=true"],
        "hybrid": ["parallel.gpus=1", "parallel.tensor=1", "parallel.sequence=false"],
    }
    for stack, layout in layouts.items():
        where = [f"checkpoint.load={tmp_path}/from_{stack}", f"checkpoint.folder={tmp_path}/{stack}"]
        run_ranks(run_on_this_rank, 2 if stack == "gpt" else 1, [*shared, *models[stack], *layout, *where])
    run_ranks(export_runs_on_this_rank, 1, str(tmp_path))
    for name in ("gpt", "hybrid", "from_hybrid"):
        assert_bitwise(tensors_of(tmp_path / f"back_{name}"), tensors_of(tmp_path / "qwen3_5_9b" / "hf"))
    for name in layouts:
        records = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        [step] = [record for record in records if "grad_norm" in record]
        assert step["step"] == 1
        assert step["grad_norm"] > 0


def test_command_line(families: Path, tmp_path: Path) -> None:
    """As users start it: --help without Megatron's imports, names suggested, an import in a process of its own."""
    source, target = families / "qwen3_6_35b_a3b" / "hf", tmp_path / "megatron"

    def start(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TOOL), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=os.environ)

    shown = start("export", "--help")
    assert shown.returncode == 0
    assert "--text-only" in shown.stdout
    assert "examples:" in shown.stdout
    mistyped = start("import", "--hf", "a", "--megatron", "b", "--model", "qwen35_9b")
    assert mistyped.returncode == 2
    assert "Did you mean qwen3_5_9b?" in mistyped.stderr
    done = start("import", "--hf", source, "--megatron", target)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert re.search(r"vision tower +\d+ .* skipped", done.stdout)
    assert (target / "latest_checkpointed_iteration.txt").read_text() == "release"
