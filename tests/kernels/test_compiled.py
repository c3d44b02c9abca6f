"""The store of kernels: built once by processes that start at once, taken over from a dead builder, or only read."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = """
from qla_megatron.kernels.compiled import compiled
from qla_megatron.kernels.row_sums import sum_rows_kernel
compiled("sm_90a", sum_rows_kernel, "float32", 1)
"""
HOLD = """
import sys, time
from qla_megatron.kernels import compiled
name = "sum_rows_kernel-float32-1-sm_90a-" + compiled._sources()
with compiled._turn(name):
    print("holds", flush=True)
    time.sleep(100)
"""


def start(code: str, store) -> subprocess.Popen:
    environment = os.environ | {"TILELANG_CACHE_DIR": str(store)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, **streams)


def test_processes_that_start_at_once_build_once_and_a_dead_builder_holds_nobody_up(tmp_path):
    dying = start(HOLD, tmp_path)
    assert dying.stdout.readline() == "holds\n"
    builders = [start(BUILD, tmp_path) for _ in range(3)]
    for builder in builders:  # all of them wait before the one that holds the lock dies
        for line in builder.stderr:
            if "waiting for another process" in line:
                break
    dying.send_signal(signal.SIGKILL)
    reports = [builder.communicate(timeout=200)[1] for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0, 0], reports
    assert sum("building sum_rows_kernel" in report for report in reports) == 1, reports
    dying.communicate()

    # A later process finds the kernel without a word.
    later = start(BUILD, tmp_path)
    report = later.communicate(timeout=200)[1]
    assert later.returncode == 0, report
    assert "qla_megatron:" not in report


def test_a_store_that_cannot_be_written_to_is_said_to_lack_a_kernel(tmp_path, monkeypatch, capsys):
    from qla_megatron.kernels import compiled

    (tmp_path / "file").touch()
    monkeypatch.setattr(compiled, "marks_folder", lambda: tmp_path / "file" / "qla_megatron")
    with compiled._turn("kernel"):
        pass
    assert "kernel is not in the store, which is read alone" in capsys.readouterr().err


def test_the_catalogue_names_every_factory():
    import ast

    from qla_megatron import kernels
    from qla_megatron.kernels.catalogue import kernels as catalogue

    defined = set()
    for path in Path(kernels.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                defined.add(f"{path.stem}.{node.name}")
    named = {f"{k.factory.__module__.split('.')[-1]}.{k.factory.__name__}" for k in catalogue()}
    assert named == defined


@pytest.mark.parametrize("arguments", [["--list"], ["--list", "--only", "chunk_gradients", "--dtypes", "float16"]])
def test_the_tool_lists_kernels(arguments):
    tool = Path(__file__).parents[2] / "tools" / "warm_kernels.py"
    done = subprocess.run([sys.executable, tool, *arguments], capture_output=True, text=True, check=True, timeout=100)
    lines = done.stdout.splitlines()
    assert any("chunk_gradients_kernel" in line for line in lines)
    if "--only" in arguments:
        assert lines == ["gated_delta_rule.chunk_gradients chunk_gradients_kernel float16"]


def test_the_tool_says_what_it_cannot_build():
    tool = Path(__file__).parents[2] / "tools" / "warm_kernels.py"
    done = subprocess.run([sys.executable, tool, "--only", "nothing"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "--only: no kernel's name holds 'nothing'; --list shows them" in done.stderr
