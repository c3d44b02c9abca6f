"""Files that start a recipe on a cluster: a shell script for torchrun, a Slurm batch script, a Kubernetes PyTorchJob.

    python -m qla_megatron.recipes.run NAME --write-launch slurm > train.sbatch

What nobody but the user knows (image, folders, partition) stands there as a word that begins with YOUR_; nothing starts
while one is left. The same command goes on where a run stopped, so that a restart is another start.
"""

import re
import shlex
from dataclasses import dataclass

from omegaconf import OmegaConf

from qla_megatron.recipes.recipe import Recipe

KINDS = ("torchrun", "slurm", "k8s")
RESTARTS = 10
"""Times that a failed run is started again by itself."""
PORT = 29500


@dataclass(frozen=True)
class Place:
    """Where a run lives on a cluster."""

    image: str = "YOUR_IMAGE"
    """Container image with this package and its requirements (Slurm: what pyxis takes)."""
    mounts: tuple[str, ...] = ()
    """Folders to mount, OUTSIDE:INSIDE. Kubernetes: claims of persistent volumes, CLAIM:INSIDE."""
    kernels: str = "/kernels"
    """Folder of compiled kernels in the container: read where it is filled, else filled at the first start."""


def write(kind: str, recipe: Recipe, name: str, assignments: list[str], place: Place) -> str:
    """The text of the file.

    Args:
        kind: one of KINDS.
        recipe: with the assignments applied.
        assignments: the `path=value` that the command is to repeat.

    Raises:
        ValueError: an unknown kind; a mount without its two sides; a recipe for a CPU on a cluster.
    """
    if kind not in KINDS:
        raise ValueError(f"--write-launch must be one of {', '.join(KINDS)}, got {kind!r}")
    if kind != "torchrun" and recipe.parallel.device == "cpu":
        raise ValueError(f"--write-launch {kind} is for GPUs, but parallel.device=cpu: take torchrun")
    for mount in place.mounts:
        if not all(mount.partition(":")):
            raise ValueError(f"--mount must be OUTSIDE:INSIDE, got {mount!r}")
    if not recipe.data.paths:
        assignments = [*assignments, "data.paths=[YOUR_DATA_PREFIX]"]
    return {"torchrun": _torchrun, "slurm": _slurm, "k8s": _pytorchjob}[kind](recipe, name, assignments, place)


def torchrun_command(recipe: Recipe, arguments: list[str], where: list[str] | None = None) -> list[str]:
    """The torchrun line for a recipe: on each node, with HOST to fill in where there are several.

    Args:
        where: how the nodes find one another; None: by a host that is still to be filled in.
    """
    nodes, per_node = nodes_of(recipe)
    if nodes == 1:
        where = ["--standalone", "--nproc-per-node", str(per_node)]
    else:
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"HOST:{PORT}"] if where is None else where
        where = ["--nnodes", str(nodes), "--nproc-per-node", str(per_node), *meeting]
    return ["torchrun", *where, "-m", "qla_megatron.recipes.run", *arguments]


def nodes_of(recipe: Recipe) -> tuple[int, int]:
    """Machines, and processes on each."""
    p = recipe.parallel
    return max(p.gpus // p.gpus_per_node, 1), min(p.gpus, p.gpus_per_node)


def environment(recipe: Recipe, place: Place) -> dict[str, str]:
    """Variables that every process needs."""
    if recipe.parallel.device == "cpu":
        return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's rule on Hopper: kernels issued in order overlap communication
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # less memory lost between blocks
        "TILELANG_CACHE_DIR": place.kernels,
        "NCCL_DEBUG": "WARN",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # a process that waits for a dead one ends, too
        "OMP_NUM_THREADS": "8",
        "PYTHONUNBUFFERED": "1",
    }


# The script reads itself: comments aside, no word may be left to fill in. [_] keeps these lines from being found.
_GUARD = """missing="$(grep -v '^# ' "$0" | grep -o 'YOUR[_][A-Z_]*' | sort -u | tr '\\n' ' ' || true)"
if [ -n "$missing" ]; then echo "fill in $missing" >&2; exit 2; fi"""
_NETWORK = """# Where NCCL picks the wrong network, name the right one:
# export NCCL_SOCKET_IFNAME=YOUR_INTERFACE NCCL_IB_HCA=YOUR_ADAPTERS"""


def _torchrun(recipe: Recipe, name: str, assignments: list[str], place: Place) -> str:
    nodes, _ = nodes_of(recipe)
    restarts = ["--max-restarts", str(RESTARTS)]
    where = [*restarts, "--rdzv-id", name, "--rdzv-backend", "c10d", "--rdzv-endpoint", "@HEAD@"]
    command = torchrun_command(recipe, [name, *assignments], where)
    if nodes == 1:
        command[2:2] = restarts
    command[-(len(assignments) + 3) : -(len(assignments) + 3)] = ["--log-dir", "@LOGS@", "--tee", "3"]
    text = shlex.join(command).replace("@HEAD@", f'"$HEAD:{PORT}"').replace("@LOGS@", '"$LOGS"')
    start = "Start it in the container, in the folder that runs are to be written under."
    head = ""
    if nodes > 1:
        start = f"Start it on each of {nodes} machines, in the container, with HEAD set to the first one's name."
        head = '\n: "${HEAD:?set HEAD to the name of the first machine}"'
    return f"""#!/bin/bash
# {name}: {recipe.parallel.gpus} processes.
# {start}
# torchrun starts all processes again when one fails; they go on from the last checkpoint.
set -euo pipefail
{_GUARD}{head}
LOGS="${{LOGS:-runs/{name}/torchrun}}"
mkdir -p "$LOGS"
{_exports(recipe, place)}
{_NETWORK}
exec {text}
"""


def _slurm(recipe: Recipe, name: str, assignments: list[str], place: Place) -> str:
    nodes, per_node = nodes_of(recipe)
    program = shlex.join(["python", "-m", "qla_megatron.recipes.run", name, *assignments])
    mounts = ",".join(place.mounts or ("YOUR_FOLDER:YOUR_FOLDER_INSIDE",))
    rank = "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS"
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={per_node}
#SBATCH --gpus-per-node={per_node}
#SBATCH --exclusive
#SBATCH --partition=YOUR_PARTITION
#SBATCH --account=YOUR_ACCOUNT
#SBATCH --time=24:00:00
#SBATCH --output=logs/%x_%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@600
# {name}: submit it with sbatch, in the folder that runs are to be written under, after `mkdir -p logs`.
# Ten minutes before the time is up every process gets SIGTERM: it saves and leaves. Submit it again to go on.
# One task is one process of the run; Slurm, not torchrun, starts them, so that nothing cuts the saving short.
set -euo pipefail
IMAGE={shlex.quote(place.image)}
MOUNTS={shlex.quote(mounts)}
{_GUARD}
{_exports(recipe, place)}
{_NETWORK}
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
export MASTER_ADDR="${{hosts%%$'\n'*}}" MASTER_PORT={PORT}
code=0
srun --kill-on-bad-exit=1 --container-image="$IMAGE" --container-mounts="$MOUNTS" --container-workdir="$PWD" \\
    bash -c {shlex.quote(f"{rank}; exec {program}")} || code=$?
if [ "$code" -eq 2 ]; then
    echo "the recipe was refused; not starting again" >&2
elif [ "$code" -ne 0 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {RESTARTS} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _pytorchjob(recipe: Recipe, name: str, assignments: list[str], place: Place) -> str:
    nodes, per_node = nodes_of(recipe)
    where = ["--node-rank", "@RANK@", "--master-addr", "@HOST@", "--master-port", "@PORT@"]
    command = shlex.join(torchrun_command(recipe, [name, *assignments], where))
    for mark, variable in {"@RANK@": "RANK", "@HOST@": "MASTER_ADDR", "@PORT@": "MASTER_PORT"}.items():
        command = command.replace(mark, f'"${variable}"')  # the operator sets these for every pod
    script = f"exec {command}"
    mounts = place.mounts or ("YOUR_CLAIM:/data",)
    volumes: list[dict[str, object]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    inside: list[dict[str, object]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, mount in enumerate(mounts):
        claim, _, path = mount.partition(":")
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        inside.append({"name": f"volume-{number}", "mountPath": path})
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": place.image,
        "workingDir": mounts[0].partition(":")[2],
        "command": ["bash", "-c", script],
        "env": [{"name": key, "value": value} for key, value in environment(recipe, place).items()],
        "resources": {"limits": {"nvidia.com/gpu": per_node}},
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},  # InfiniBand pins memory
        "volumeMounts": inside,
    }
    pod = {"spec": {"terminationGracePeriodSeconds": 600, "containers": [container], "volumes": volumes}}
    replicas = {"Master": {"replicas": 1, "restartPolicy": "OnFailure", "template": pod}}
    if nodes > 1:
        replicas["Worker"] = {"replicas": nodes - 1, "restartPolicy": "OnFailure", "template": pod}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": _kubernetes_name(name)},
        "spec": {"runPolicy": {"cleanPodPolicy": "None", "backoffLimit": RESTARTS}, "pytorchReplicaSpecs": replicas},
    }
    return f"""# {name}: a PyTorchJob of the Kubeflow training operator, v1; kubectl apply -f FILE.
# A pod that fails is started again, up to {RESTARTS} times, and the run goes on from the last checkpoint. Runs are
# written under the first volume. Add your cluster's resource for RDMA beside nvidia.com/gpu.
{OmegaConf.to_yaml(OmegaConf.create(job))}"""


def _exports(recipe: Recipe, place: Place) -> str:
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment(recipe, place).items())


def _kubernetes_name(name: str) -> str:
    return re.sub(r"[^a-z0-9-]", "-", name.lower())[:52].strip("-")
