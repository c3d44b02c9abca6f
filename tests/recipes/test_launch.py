"""Launch files: shells and YAML readers take them, and the commands in them start the recipe."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from qla_megatron.recipes import catalogue, launch, overrides, run

ONE_NODE, NODES = "qwen3_5_9b_pretrain_4k_8xh200", "qwen3_5_27b_pretrain_8k_64xh100"
PLACE = launch.Place("registry/image:1", ("/shared:/shared", "/kernels:/kernels"), "/kernels/h200")


def written(kind: str, name: str, assignments: list[str] | None = None, place: launch.Place = PLACE) -> str:
    assignments = ["data.paths=[/shared/crawl]"] if assignments is None else assignments
    return launch.write(kind, overrides.apply(catalogue.find(name), assignments), name, assignments, place)


def bash(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in `folder`, where programs that stand in for a cluster's come first."""
    file = folder / "script"
    file.write_text(script)
    programs = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(file)], cwd=folder, env={"PATH": programs, **environment}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip


def stand_in(folder: Path, name: str, body: str) -> None:
    """A program `name` that does `body`."""
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("kind", ["torchrun", "slurm"])
@pytest.mark.parametrize("name", [ONE_NODE, NODES, "qwen3_5_397b_a17b_extend_256k_1024xh200"])
def test_script_is_bash(kind: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(written(kind, name))
    subprocess.run(["bash", "-n", str(tmp_path / "script")], check=True, timeout=20)


def test_torchrun_script_starts_the_recipes_command(tmp_path: Path) -> None:
    stand_in(tmp_path, "torchrun", 'printf "%s\\n" "$TILELANG_CACHE_DIR" "$CUDA_DEVICE_MAX_CONNECTIONS" "$@"')
    done = bash(written("torchrun", NODES), tmp_path, HEAD="node7")
    assert done.returncode == 0, done.stderr
    kernels, connections, *arguments = done.stdout.splitlines()
    assert (kernels, connections) == ("/kernels/h200", "1")
    assert arguments[:4] == ["--nnodes", "8", "--nproc-per-node", "8"]
    assert arguments[arguments.index("--rdzv-endpoint") + 1] == "node7:29500"
    assert arguments[arguments.index("--max-restarts") + 1] == "10"
    assert arguments[-3:] == ["qla_megatron.recipes.run", NODES, "data.paths=[/shared/crawl]"]
    assert (tmp_path / arguments[arguments.index("--log-dir") + 1]).is_dir()
    without_head = bash(written("torchrun", NODES), tmp_path)
    assert "set HEAD to the name of the first machine" in without_head.stderr


def test_torchrun_of_the_script_takes_its_own_options_and_starts_the_program(tmp_path: Path) -> None:
    # The real torchrun, with the script's options; the recipe's own --help in place of a run.
    script = written("torchrun", "tiny_pretrain_2k_2xcpu", ["train.steps=50"])
    script = script.replace("torchrun --standalone", f"{sys.executable} -m torch.distributed.run --standalone")
    done = bash(script.rstrip() + " --help\n", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Train by a recipe's name") == 2  # one from each process
    assert list(tmp_path.glob("runs/tiny_pretrain_2k_2xcpu/torchrun/*/*/1/stdout.log"))


@pytest.mark.parametrize(("code", "restarts", "requeued"), [(0, 0, False), (1, 0, True), (1, 10, False), (2, 0, False)])
def test_slurm_script_starts_one_task_a_gpu(tmp_path: Path, code: int, restarts: int, requeued: bool) -> None:
    stand_in(tmp_path, "scontrol", '[ "$1" = show ] && echo node7 && echo node8 || echo requeued "$2"')
    stand_in(
        tmp_path, "python", f'echo "$RANK/$WORLD_SIZE/$LOCAL_RANK $MASTER_ADDR:$MASTER_PORT"; echo "$@"; exit {code}'
    )
    task = 'while [ "$1" != bash ]; do echo "$1"; shift; done; SLURM_PROCID=9 SLURM_LOCALID=1 SLURM_NTASKS=64 "$@"'
    stand_in(tmp_path, "srun", task)
    text = written("slurm", NODES).replace("YOUR_PARTITION", "gpus").replace("YOUR_ACCOUNT", "me")
    job = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": str(restarts)}
    done = bash(text, tmp_path, **job)
    assert done.returncode == code, done.stderr
    assert f"9/64/1 node7:29500\n-m qla_megatron.recipes.run {NODES} data.paths=[/shared/crawl]\n" in done.stdout
    assert "--container-image=registry/image:1\n--container-mounts=/shared:/shared,/kernels:/kernels\n" in done.stdout
    assert ("requeued 5" in done.stdout) == requeued
    for line in ("--nodes=8", "--ntasks-per-node=8", "--gpus-per-node=8", "--requeue", "--signal=TERM@600"):
        assert f"#SBATCH {line}\n" in text


@pytest.mark.parametrize("kind", ["torchrun", "slurm"])
def test_script_does_not_start_while_something_is_to_be_filled_in(kind: str, tmp_path: Path) -> None:
    for program in ("torchrun", "srun", "scontrol"):
        stand_in(tmp_path, program, "echo started")
    done = bash(written(kind, ONE_NODE, [], launch.Place()), tmp_path)
    assert done.returncode == 2
    assert "started" not in done.stdout
    assert "YOUR_DATA_PREFIX" in done.stderr
    assert ("YOUR_IMAGE" in done.stderr) == (kind == "slurm")


@pytest.mark.parametrize(("name", "workers"), [(ONE_NODE, None), (NODES, 7)])
def test_pytorchjob_is_one_of_the_training_operators(name: str, workers: int | None, tmp_path: Path) -> None:
    job = yaml.safe_load(written("k8s", name))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["metadata"]["name"] == name.replace("_", "-")
    replicas: dict[str, Any] = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    assert replicas.get("Worker", {}).get("replicas") == workers
    for replica in replicas.values():
        assert replica["restartPolicy"] == "OnFailure"
        pod = replica["template"]["spec"]
        [container] = pod["containers"]
        assert (container["name"], container["image"]) == ("pytorch", "registry/image:1")
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        assert {"name": "TILELANG_CACHE_DIR", "value": "/kernels/h200"} in container["env"]
        assert all(isinstance(variable["value"], str) for variable in container["env"])  # the API takes nothing else
        names = {volume["name"] for volume in pod["volumes"]}
        assert names == {mount["name"] for mount in container["volumeMounts"]}
    stand_in(tmp_path, "torchrun", 'echo "$@"')
    program, flag, script = container["command"]
    assert (program, flag) == ("bash", "-c")
    done = bash(script, tmp_path, RANK="3", MASTER_ADDR="job-master-0", MASTER_PORT="23456")
    assert done.stdout.endswith(f"-m qla_megatron.recipes.run {name} data.paths=[/shared/crawl]\n")
    if workers:
        assert (
            "--nnodes 8 --nproc-per-node 8 --node-rank 3 --master-addr job-master-0 --master-port 23456" in done.stdout
        )


def test_launch_files_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--image", "registry/image:1", "--mount", "/shared:/shared", "--mount", "/kernels:/kernels"]
    data = "data.paths=[/shared/crawl]"
    assert run.main([NODES, "--write-launch", "slurm", *place, "--kernels", "/kernels/h200", data]) == 0
    printed = capsys.readouterr()
    assert printed.out == written("slurm", NODES)
    assert not printed.err
    assert run.main([NODES, "--write-launch", "slurm", "data.sequence_length=262144"]) == 0
    assert "warning: Does not fit" in capsys.readouterr().err
    assert run.main([NODES, "--write-launch", "k8s", "--mount", "nowhere"]) == 2
    assert "--mount must be OUTSIDE:INSIDE, got 'nowhere'" in capsys.readouterr().err
    assert run.main(["tiny_pretrain_2k_2xcpu", "--write-launch", "slurm"]) == 2
    assert "parallel.device=cpu" in capsys.readouterr().err
