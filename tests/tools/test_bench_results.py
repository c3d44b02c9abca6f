"""Results of the benchmark: lengths, marks of old commits, figures; nothing is timed here."""

import csv
import importlib
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def load(monkeypatch):
    """Import a program from tools/, which import one another as scripts do."""
    monkeypatch.syspath_prepend(TOOLS)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == TOOLS:
            del sys.modules[name]


@pytest.fixture
def bench(load):
    return load("bench_op")


def row(bench, **values: str) -> dict[str, str]:
    return dict.fromkeys(bench.COLUMNS, "") | {"gate": "published"} | values


def test_lengths(load):
    bench = load("benchmarking")
    assert bench.parse_lengths("4096x3") == [4096] * 3
    assert bench.parse_lengths("24576+8192") == [24576, 8192]
    ragged = bench.parse_lengths("32768/8seq")
    assert len(ragged) == 8
    assert sum(ragged) == 32768
    assert min(ragged) > 0


def test_only_rows_of_the_newest_commit_are_marked(bench, tmp_path):
    path = tmp_path / "results.csv"
    bench.append_rows(path, [row(bench, impl="ours", commit="aaa")], "aaa", bench.COLUMNS)
    bench.append_rows(
        path, [row(bench, impl="fla", commit="bbb"), row(bench, impl="ours", commit="bbb")], "bbb", bench.COLUMNS
    )
    with path.open(newline="") as file:
        assert [(r["commit"], r["newest"]) for r in csv.DictReader(file)] == [
            ("aaa", "no"),
            ("bbb", "yes"),
            ("bbb", "yes"),
        ]


def test_figures_take_the_last_row_of_a_shape(bench, load, tmp_path):
    plot = load("plot_results")
    path = tmp_path / "results.csv"
    shape = {"h_qk": "16", "h_v": "64", "seqs": "4096x8"}
    rows = [row(bench, impl="ours", fwd_ms="0.9", **shape), row(bench, impl="ours", fwd_ms="0.512", **shape)]
    rows.append(row(bench, impl="fla", fwd_ms="3.5", **shape))
    bench.append_rows(path, rows, "", bench.COLUMNS)
    plot.main([str(path), str(tmp_path / "docs")])
    times = (tmp_path / "docs" / "forward_times.svg").read_text()
    assert "0.512" in times
    assert "0.900" not in times
    assert (tmp_path / "docs" / "forward_roofline.svg").exists()
    with pytest.raises(SystemExit, match="zero"):
        plot.main([str(path), str(tmp_path / "docs"), "--gate", "zero"])


def test_work_of_a_shape(load):
    flops, moved = load("plot_results").work_of({"h_qk": "16", "h_v": "64", "seqs": "32768x1"})
    # K S, Q S, K^T X of 2 128^2 operations a token and value head, A W, P X of 2 64 128; K K^T, Q K^T a key head.
    assert flops == 32768 * (64 * (3 * 32768 + 2 * 16384) + 16 * 2 * 16384)
    assert moved == 32768 * (64 * (512 + 8) + 16 * 512)


@pytest.mark.parametrize("program", ["bench_op", "bench_backward"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--one", "16", "64", "abc"], "--one must be heads and lengths such as 16 64 4096x8, got 16 64 abc"),
        (["--impl", "ours,nothing"], "--impl must name some of ours, fla, flash_qla"),
    ],
)
def test_arguments_that_make_no_sense(load, monkeypatch, capsys, program, arguments, message):
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(SystemExit, match="2"):
        load(program).main()
    assert message in capsys.readouterr().err
