"""tools/pack_dataset.py from text to statistics, and its messages."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

TOOL = Path(__file__).parents[2] / "tools" / "pack_dataset.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pack_dataset", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts_of(prefix: Path) -> list[str]:
    dataset = IndexedDataset(str(prefix))
    return [bytes(dataset[i][:-1].astype(np.uint8)).decode() for i in range(len(dataset))]


def test_text_to_dataset_to_statistics(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_text(f"document {i}. " * 50)
    (tmp_path / "note.md").write_text("not taken")
    prefix = tmp_path / "out" / "d"
    assert tool.main(["--text", str(tmp_path), "--suffix", ".txt", "--out", str(prefix)]) == 0
    assert sorted(texts_of(prefix)) == sorted(f"document {i}. " * 50 for i in range(20))
    tokens = sum(len(f"document {i}. " * 50) + 1 for i in range(20))
    assert f"20 documents, {tokens:,} tokens (uint16)" in capsys.readouterr().out
    assert tool.main(["--inspect", str(prefix), "--seq-length", "1024", "--align", "64"]) == 0
    out = capsys.readouterr().out
    slots = sum(-(-(len(f"document {i}. " * 50) + 1) // 64) * 64 for i in range(20))
    samples = -(-slots // 1024)
    assert f"{tokens / samples / 1024:.2%}" in out
    assert "512 to 1,023" in out


def test_jsonl_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": f"line {i}"}) + "\n" for i in range(5)))
    command = [sys.executable, str(TOOL), "--jsonl", "a.jsonl", "--key", "body", "--workers", "2", "--out", "d"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert texts_of(tmp_path / "d") == [f"line {i}" for i in range(5)]


def test_stdlib(tool: ModuleType, tmp_path: Path) -> None:
    assert tool.main(["--stdlib", "--out", str(tmp_path / "d")]) == 0
    assert sum(map(len, texts_of(tmp_path / "d"))) > 5e6


def test_faults_are_one_line(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("text")
    make = ["--text", str(tmp_path / "a.txt"), "--out", str(tmp_path / "d")]
    assert tool.main(make) == 0
    capsys.readouterr()
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud800"}\n')
    (tmp_path / "tokenizer.json").write_text("{}")
    for suffix in (".idx", ".bin"):
        (tmp_path / f"junk{suffix}").write_bytes(b"junk" * 20)
    faults = {
        "latin.jsonl:2 must be": ["--jsonl", str(tmp_path / "latin.jsonl"), "--out", str(tmp_path / "e")],
        "half.jsonl:1 must be": ["--jsonl", str(tmp_path / "half.jsonl"), "--out", str(tmp_path / "e")],
        "its .idx is not Megatron's": ["--inspect", str(tmp_path / "junk")],
        "tokenizer must be a tokenizer.json, got": [*make, "--overwrite", "--tokenizer", str(tmp_path)],
        "prefix must be free": make,
        "no .bin and .idx there": ["--inspect", str(tmp_path / "none")],
        "multiple of align=64, got 100": ["--inspect", str(tmp_path / "d"), "--seq-length", "100"],
        "tokenizer must be 'byte'": [*make, "--overwrite", "--tokenizer", "bpe"],
        "No such file": ["--jsonl", str(tmp_path / "none"), "--out", str(tmp_path / "e")],
        "paths must exist": ["--text", str(tmp_path / "none"), "--out", str(tmp_path / "e")],
    }
    for message, arguments in faults.items():
        assert tool.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("pack_dataset: ")
        assert message in error
        assert error.count("\n") == 1
    assert tool.main([*make, "--overwrite"]) == 0


def test_help_teaches(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        tool.main(["--help"])
    assert "examples:" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        tool.main(["--stdlib"])
    assert "--out PREFIX is needed" in capsys.readouterr().err
