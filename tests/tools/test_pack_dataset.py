"""tools/pack_dataset.py from text to statistics, and its messages."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenizers import Tokenizer

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


def test_text_to_dataset_to_statistics(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # of the terminal: no line of the table is folded
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_text(f"document {i}. " * 50)
    (tmp_path / "note.md").write_text("not taken")
    prefix = tmp_path / "out" / "d"
    assert tool.main(["--text", str(tmp_path), "--suffix", ".txt", "--out", str(prefix)]) == 0
    assert sorted(texts_of(prefix)) == sorted(f"document {i}. " * 50 for i in range(20))
    tokens = sum(len(f"document {i}. " * 50) + 1 for i in range(20))
    assert f"20 documents, {tokens:,} tokens (uint16)" in capsys.readouterr().out
    plot = tmp_path / "lengths.svg"
    layout = ["--global-batch", "4", "--data-parallel", "2", "--plot", str(plot)]
    assert tool.main(["stats", str(prefix), "--seq-length", "1024", "--align", "64", *layout]) == 0
    out = capsys.readouterr().out
    assert "tokens a document" in plot.read_text()
    assert float(re.search(r"balanced\D*(1\.\d+)", out)[1]) <= float(re.search(r"as read\D*(1\.\d+)", out)[1])
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
    few = ["stats", str(tmp_path / "d"), "--seq-length", "64"]
    faults = {
        "latin.jsonl:2 must be": ["--jsonl", str(tmp_path / "latin.jsonl"), "--out", str(tmp_path / "e")],
        "half.jsonl:1 must be": ["--jsonl", str(tmp_path / "half.jsonl"), "--out", str(tmp_path / "e")],
        "its .idx is not Megatron's": ["stats", str(tmp_path / "junk")],
        "tokenizer must be a tokenizer.json, got": [*make, "--overwrite", "--tokenizer", str(tmp_path)],
        "prefix must be free": make,
        "no .bin and .idx there": ["stats", str(tmp_path / "none")],
        "multiple of align=64, got 100": ["stats", str(tmp_path / "d"), "--seq-length", "100"],
        "multiple of --data-parallel=2, got 3": [*few, "--global-batch", "3", "--data-parallel", "2"],
        "an epoch must hold --global-batch=4 sequences, got 1": [*few, "--global-batch", "4", "--data-parallel", "2"],
        "folder must hold no tokenizer": ["train-tokenizer", *make[:2], "--out", str(tmp_path)],
        "vocab_size must be at least 257, got 9": [
            *("train-tokenizer", *make[:2], "--out", str(tmp_path / "t"), "--vocab-size", "9")
        ],
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
    assert "required: --out" in capsys.readouterr().err


def test_tokenizer_trained_on_the_corpus(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat, the cat sat. " * 9 + "naïve ☃")
    source, folder = ["--text", str(tmp_path / "a.txt")], tmp_path / "bpe"
    assert tool.main(["train-tokenizer", *source, "--out", str(folder), "--vocab-size", "265"]) == 0
    assert f"{folder}: 265 tokens" in capsys.readouterr().out
    assert tool.main([*source, "--tokenizer", str(folder), "--out", str(tmp_path / "d")]) == 0
    assert "vocabulary 265, documents end with id 0" in capsys.readouterr().out
    dataset = IndexedDataset(str(tmp_path / "d"))  # kept: its memory goes with it
    tokens = dataset[0]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(tokens[:-1].tolist()) == (tmp_path / "a.txt").read_text()
    assert tokens[-1] == 0
    assert len(tokens) < len((tmp_path / "a.txt").read_bytes()) / 2
    first = (folder / "tokenizer.json").read_bytes()
    again = ["train-tokenizer", *source, "--out", str(folder), "--overwrite", "--vocab-size"]
    assert tool.main([*again, "265"]) == 0
    assert (folder / "tokenizer.json").read_bytes() == first
    assert tool.main([*again, "100000"]) == 0
    assert "The corpus gives no more" in capsys.readouterr().out
