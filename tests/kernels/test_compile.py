"""The kernels compiled for sm_90a without a GPU: registers, spills and shared memory fit a multiprocessor.

The assembler's report is kept in `.cache/`, by the generated source and the compiler's version.
"""

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CACHE = Path(__file__).parents[2] / ".cache" / "ptxas"
SHARED_OF_A_MULTIPROCESSOR = 227 * 1024
RESERVED = 1024  # shared memory that the driver keeps in every block
REGISTERS_OF_A_MULTIPROCESSOR = 65536


def find_nvcc() -> str:
    """The compiler that requirements.lock installs, else the system's."""
    import nvidia

    packaged = [Path(folder) / "cu13" / "bin" / "nvcc" for folder in nvidia.__path__]
    for candidate in [*packaged, shutil.which("nvcc")]:
        if candidate and Path(candidate).exists():
            return str(candidate)
    pytest.fail("no nvcc: requirements.lock installs one as nvidia-cuda-nvcc")


def lower(factory, *choices):
    """The CUDA source of a kernel, and its dynamic shared memory in bytes."""
    from tilelang import tvm
    from tilelang.engine.lower import lower as lower_to_cuda

    from qla_megatron.kernels.compiled import PASS_CONFIGS

    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    config = {key.value: value for key, value in PASS_CONFIGS.items()}
    with tvm.transform.PassContext(opt_level=3, config=config), target:
        artifact = lower_to_cuda(factory(*choices), target=target)
    (function,) = artifact.device_mod.functions.values()
    return artifact.kernel_source, int(function.attrs["dyn_shared_memory_buf"])


def assemble(source: str) -> str:
    """What ptxas reports about a kernel."""
    import tilelang

    root = Path(tilelang.__file__).parent
    nvcc = find_nvcc()
    release = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256((source + release + tilelang.__version__).encode()).hexdigest()
    report = CACHE / f"{key}.txt"
    if not report.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        code, unfinished = CACHE / f"{key}-{os.getpid()}.cu", CACHE / f"{key}-{os.getpid()}.report"
        code.write_text(source)
        command = [nvcc, "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-O3", "--use_fast_math", "-cubin"]
        command += ["-Xptxas", "-v", f"-I{root}/src", f"-I{root}/3rdparty/cutlass/include", "-o", "/dev/null"]
        done = subprocess.run([*command, str(code)], capture_output=True, text=True, check=False, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
        unfinished.write_text(
            "\n".join(line for line in done.stderr.splitlines() if "ptxas" in line or "spill" in line)
        )
        code.unlink()
        unfinished.replace(report)
    return report.read_text()


def resources(factory, *choices) -> dict[str, int | str]:
    source, dynamic = lower(factory, *choices)
    report = assemble(source)

    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        assert found, report
        return int(found[1])

    return {
        "registers": number(r"Used (\d+) registers"),
        "spills": number(r"(\d+) bytes spill stores"),
        "shared": number(r"(\d+) bytes smem") + dynamic + RESERVED,
        "report": report,
    }


def test_prepare_chunks():
    from qla_megatron.kernels.gated_delta_rule.prepare_chunks import prepare_chunks_kernel

    got = resources(prepare_chunks_kernel, "bfloat16")
    # Three blocks of 128 threads hide each other's latency.
    assert got["spills"] == 0
    assert got["registers"] * 128 * 3 <= REGISTERS_OF_A_MULTIPROCESSOR
    assert got["shared"] * 3 <= SHARED_OF_A_MULTIPROCESSOR


@pytest.mark.slow
@pytest.mark.parametrize("block_v", [64, 128])
def test_state_output(block_v):
    from qla_megatron.kernels.gated_delta_rule.state_output import state_output_kernel

    got = resources(state_output_kernel, "bfloat16", block_v)
    check_one_block(got, 256 + 2 * block_v)


def check_one_block(got, threads: int) -> None:
    # ptxas warns (C75xx) where it gives up running products asynchronously: the schedule would be lost silently.
    assert "C75" not in got["report"], got["report"]
    # What is spilled lies in the copying warps, outside the chain.
    assert got["spills"] <= 16
    assert got["registers"] * threads <= REGISTERS_OF_A_MULTIPROCESSOR
    assert got["shared"] <= SHARED_OF_A_MULTIPROCESSOR


@pytest.mark.slow
@pytest.mark.parametrize("block_v", [64, 128])
def test_state_gradient(block_v):
    from qla_megatron.kernels.gated_delta_rule.state_gradient import state_gradient_kernel

    check_one_block(resources(state_gradient_kernel, "bfloat16", block_v), 256 + 2 * block_v)


@pytest.mark.slow
def test_recompute_states():
    from qla_megatron.kernels.gated_delta_rule.recompute_states import recompute_states_kernel

    got = resources(recompute_states_kernel, "bfloat16")
    # Two blocks of 256 threads hide each other's latency.
    assert "C75" not in got["report"], got["report"]
    assert got["spills"] == 0
    assert got["registers"] * 256 * 2 <= REGISTERS_OF_A_MULTIPROCESSOR
    assert got["shared"] * 2 <= SHARED_OF_A_MULTIPROCESSOR


@pytest.mark.slow
def test_chunk_gradients():
    from qla_megatron.kernels.gated_delta_rule.chunk_gradients import chunk_gradients_kernel

    got = resources(chunk_gradients_kernel, "bfloat16")
    assert "C75" not in got["report"], got["report"]
    assert got["spills"] <= 48
    assert got["registers"] * 512 <= REGISTERS_OF_A_MULTIPROCESSOR
    assert got["shared"] - RESERVED <= SHARED_OF_A_MULTIPROCESSOR
