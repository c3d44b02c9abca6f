"""Directories and checkpoints with a fault each: convert_checkpoint.py says which, and leaves nothing behind."""

import json
import re
import shutil
from pathlib import Path

import torch
from hf_models import call, make_families, run, tensors_of, write_directory
from safetensors.torch import save_file

from qla_megatron.testing.distributed import run_ranks

K_PROJ = "model.language_model.layers.3.self_attn.k_proj.weight"


def broken_directories(root: Path, hf: Path) -> dict[str, str]:
    """Directories with one fault each: name -> what the message has to say."""
    config, tensors = json.loads((hf / "config.json").read_text()), tensors_of(hf)
    without = {name: {k: v for k, v in config.items() if k != name} for name in ("text_config",)}
    of_text = config["text_config"]
    other_layers = config | {"text_config": of_text | {"layer_types": ["full_attention", *of_text["layer_types"][1:]]}}
    for name, changed_config, change in (
        ("truncated", config, {}),
        ("cut", config, {}),
        ("no_shard", config, {}),
        ("not_in_shard", config, {}),
        ("not_in_index", config, {}),
        ("no_config", config, {}),
        ("no_key", config, {K_PROJ: None}),
        ("shape", config, {K_PROJ: torch.ones(63, 48).bfloat16()}),
        ("more", config, {f"{K_PROJ}_scale_inv": torch.ones(1)}),
        ("dtype", config, {K_PROJ: torch.ones(64, 48).to(torch.float8_e4m3fn)}),
        ("no_head", config, {"lm_head.weight": None}),
        ("no_mtp", config, {name: None for name in tensors if name.startswith("mtp.")}),
        ("part_of_mtp", config, {"mtp.norm.weight": None}),
        ("no_field", without["text_config"], {}),
        ("layers", other_layers, {}),
        ("act", config | {"text_config": of_text | {"hidden_act": "gelu"}}, {}),
    ):
        write_directory(root / name, changed_config, {n: t for n, t in (tensors | change).items() if t is not None})
    shard = root / "truncated" / "part-1.safetensors"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-10])
    (root / "cut" / "part-1.safetensors").write_bytes(shard.read_bytes()[:100])
    (root / "no_shard" / "part-1.safetensors").unlink()
    (root / "no_config" / "config.json").unlink()
    index = root / "not_in_index" / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    file = weight_map.pop(K_PROJ)
    index.write_text(json.dumps({"weight_map": weight_map}))
    save_file({n: t for n, t in tensors.items() if weight_map.get(n) == file}, root / "not_in_shard" / file)
    return {
        "truncated": rf"part-1.safetensors must have {size} bytes .* got {size - 10}: it is truncated",
        "cut": r"part-1.safetensors must have at least \d+ bytes, .* got 100",
        "no_shard": r"no_shard must hold the 3 shards .* got none called part-1.safetensors",
        "not_in_shard": rf"{file} must hold {K_PROJ} according to",
        "not_in_index": rf"{file} must hold only what .* got {K_PROJ} too",
        "no_config": r"no_config must hold config.json, got none",
        "no_key": rf"no_key must hold {K_PROJ}, got none",
        "shape": rf"{K_PROJ} must have shape \(64, 48\), got \(63, 48\)",
        "more": rf"got {K_PROJ}_scale_inv too",
        "dtype": rf"{K_PROJ} must be bfloat16, float16 or float32, got torch.float8_e4m3fn",
        "no_head": r"must hold lm_head.weight",
        "no_mtp": r"mtp_num_hidden_layers.*--mtp drop",
        "part_of_mtp": r"must hold mtp.norm.weight, got none",
        "no_field": r"config must be that of a Qwen3.5 model",
        "layers": r"layer_types must be full attention in every Nth layer",
        "act": r"hidden_act must be silu, got gelu",
    }


def broken_checkpoints(root: Path, megatron: Path) -> dict[str, tuple[list[str], str]]:
    """Checkpoints with one fault each: name -> options of export, what the message has to say."""
    for name in ("short", "garbage", "no_file", "unfinished", "no_tracker", "no_step"):
        shutil.copytree(megatron, root / name)
    data = (megatron / "release" / "__0_0.distcp").read_bytes()
    (root / "short" / "release" / "__0_0.distcp").write_bytes(data[:-1])
    middle = len(data) // 2
    (root / "garbage" / "release" / "__0_0.distcp").write_bytes(data[:middle] + bytes(len(data) - middle))
    (root / "no_file" / "release" / "__0_0.distcp").unlink()
    (root / "unfinished" / "release" / ".metadata").unlink()
    (root / "no_tracker" / "latest_checkpointed_iteration.txt").unlink()
    return {
        "short": ([], rf"__0_0.distcp must have {len(data)} bytes according to .metadata, got {len(data) - 1}"),
        "garbage": ([], r"garbage.release: \S+ cannot be read"),
        "no_file": ([], r"must hold __0_0.distcp according to .metadata, got none"),
        "unfinished": ([], r"got no .metadata in it"),
        "no_tracker": ([], r"got no latest_checkpointed_iteration.txt in it"),
        "no_step": (["--step", "5"], r"iter_0000005 must be a checkpoint"),
    }


def refusals_on_this_rank(root: str) -> list[tuple[str, str, int, str]]:
    """(case, what the message must match, exit code, message) of every faulty input; targets are root/targets/*."""
    folder = Path(root)
    make_families(folder, ["qwen3_5_9b", "qwen3_5_2b"])
    hf, megatron, targets = folder / "qwen3_5_9b" / "hf", folder / "good", folder / "targets"
    run("import", "--hf", hf, "--megatron", megatron)
    found = []
    for name, pattern in broken_directories(folder / "hf", hf).items():
        code, out = call("import", "--hf", folder / "hf" / name, "--megatron", targets / name)
        found.append((name, pattern, code, out))
    for name, (options, pattern) in broken_checkpoints(folder / "megatron", megatron).items():
        source = folder / "megatron" / name
        code, out = call("export", "--megatron", source, "--reference", hf, "--hf", targets / name, *options)
        found.append((name, pattern, code, out))
    for name, pattern, arguments in (
        ("other model", r"hidden_size is 48, not 4096", ["import", "--hf", hf, "--model", "qwen3_5_9b"]),
        ("absent", r"absent must be a Hugging Face directory", ["import", "--hf", folder / "absent"]),
        ("target", r"good must not exist yet", ["import", "--hf", hf, "--megatron", megatron]),
        (
            "padding",
            r"padded_vocab_size must be at least 96, got 90",
            ["import", "--hf", hf, "--padded-vocab-size", 90],
        ),
    ):
        code, out = call(*arguments, *([] if "--megatron" in arguments else ["--megatron", targets / name]))
        found.append((name, pattern, code, out))
    tied = ["--reference", folder / "qwen3_5_2b" / "hf", "--hf", targets / "tied"]
    found.append(
        ("tied", r"got output_layer.weight too|must have shape", *call("export", "--megatron", megatron, *tied))
    )
    return found


def test_refusals_name_what_is_wrong_and_leave_nothing(tmp_path: Path) -> None:
    [found] = run_ranks(refusals_on_this_rank, 1, str(tmp_path))
    assert len(found) > 25
    for name, pattern, code, out in found:
        assert code == 2, name
        assert re.search(pattern, out), f"{name}: {out}"
        assert "Traceback" not in out
    targets = tmp_path / "targets"
    assert not targets.exists() or not list(targets.iterdir())
