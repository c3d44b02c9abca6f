"""Run a function on several ranks of one machine, with Megatron's parallel groups made, and get what each returns.

`run_ranks` forks the ranks from one process that has imported torch and Megatron and done nothing else, so that a rank
starts in a fraction of a second instead of the 15 seconds of the imports. `launch_torchrun` starts the same function
with torchrun, as training is started.
"""

import contextlib
import datetime
import faulthandler
import functools
import importlib.util
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from qla_megatron.testing.platform import available_platform, use_cpu

# What the process that ranks are forked from imports. Nothing here may start threads or run torch operations.
PRELOADED = [
    "torch",
    "megatron.core.parallel_state",
    "megatron.core.models.gpt",
    "megatron.core.models.hybrid.hybrid_block",
    "megatron.core.ssm.gated_delta_net",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.dist_checkpointing",
    "megatron.training.training",
    "pytest",
    "qla_megatron.testing.distributed",
]
TEARDOWN_SECONDS = 10


class RankError(RuntimeError):
    """A rank raised; the message names it and holds its traceback."""


@dataclass(frozen=True)
class Layout:
    """Parallel sizes. `tensor` None: what the other sizes leave of the world, so that no data parallelism is left.

    Data parallelism takes the rest. Experts are placed over data, context and tensor parallel ranks, as Megatron does
    it; `expert_tensor` None means the tensor parallel size.
    """

    tensor: int | None = None
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None

    def tensor_of(self, world_size: int) -> int:
        """The tensor parallel size in a world of this size."""
        others = self.context * self.pipeline
        tensor = max(1, world_size // others) if self.tensor is None else self.tensor
        if world_size % (others * tensor):
            raise ValueError(
                f"world_size must be a multiple of tensor * context * pipeline parallel sizes = {others * tensor}, "
                f"got {world_size}"
            )
        return tensor


@dataclass(frozen=True)
class _Task:
    """What a rank does, as it travels to the rank: a function by place, so that any test module will do."""

    file: str
    module: str
    name: str
    arguments: bytes
    layout: Layout
    backend: str | None
    seed: int
    timeout: float

    def load(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        found: Any = _import(self.module, self.file)
        for part in self.name.split("."):
            found = getattr(found, part)
        return found, pickle.loads(self.arguments)


def _import(name: str, file: str) -> ModuleType:
    """The module `name` that lies in `file`: pytest gives test modules names under which they can't be imported."""
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == file:
        return sys.modules[name]
    with contextlib.suppress(ModuleNotFoundError):
        found = importlib.util.find_spec(name)
        if found is not None and found.origin == file:
            return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: what it pickles is looked up here
    spec.loader.exec_module(module)
    return module


def _task(fn: Callable[..., Any], args: tuple[Any, ...], **rest: Any) -> _Task:
    name = getattr(fn, "__qualname__", "<object>")
    if "<" in name:
        raise ValueError(f"fn must be a function at the top level of a module, which ranks can import, got {name}")
    module = sys.modules[fn.__module__]
    if fn.__module__ == "__main__" or not module.__file__:
        raise ValueError(f"fn must lie in a module that ranks can import, got {name} in {fn.__module__}")
    return _Task(module.__file__, fn.__module__, name, pickle.dumps(args), **rest)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    tensor_parallel: int | None = None,
    context_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    expert_tensor_parallel: int | None = None,
    backend: str | None = None,
    seed: int = 1234,
    timeout: float = 120.0,
) -> list[Any]:
    """Call `fn(*args)` on `world_size` ranks at once, and return what they returned, in the order of the ranks.

    Each rank has torch.distributed and Megatron's parallel groups initialised and its generators seeded as Megatron
    seeds them; one thread; without a GPU `use_cpu()` is in force, with GPUs rank r has device r.

    Args:
        fn: a function at the top level of a module (a test module will do).
        world_size: number of processes.
        args: arguments, which must pickle, as must what is returned.
        tensor_parallel: None: what the other sizes leave, so that there is no data parallelism.
        expert_tensor_parallel: None: the tensor parallel size.
        backend: of torch.distributed; None: nccl with GPUs, else gloo.
        seed: of Megatron's generators.
        timeout: seconds for all of it, except the imports of the first call.

    Raises:
        RankError: a rank raised or died. The first one is reported, with its traceback; the others are stopped.
        TimeoutError: not all ranks came back in time; says which, and where they were.
        ValueError: a function that ranks cannot import, sizes that do not divide.
    """
    layout = Layout(tensor_parallel, context_parallel, pipeline_parallel, expert_parallel, expert_tensor_parallel)
    layout.tensor_of(world_size)
    task = _task(fn, args, layout=layout, backend=backend, seed=seed, timeout=timeout)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    _warm_up()
    processes, results = [], []
    with tempfile.TemporaryDirectory(prefix="qla_ranks_") as folder:
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_rank, args=(task, rank, world_size, folder, sender))
                process.start()
                sender.close()
                processes.append(process)
                results.append(receiver)
            values = _collect(results, Path(folder), timeout)
            for process in processes:
                process.join(TEARDOWN_SECONDS)  # a killed rank would leave its own children behind, such as savers
            return values
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


@functools.cache
def _warm_up() -> None:
    """Start the process that ranks are forked from, so that its imports do not count against a time limit."""
    process = multiprocessing.get_context("forkserver").Process(target=_nothing)
    process.start()
    process.join()


def _nothing() -> None: ...


def _collect(results: list[Connection], folder: Path, timeout: float) -> list[Any]:
    """What the ranks send, until all have sent or one has failed."""
    world_size, deadline = len(results), time.monotonic() + timeout
    values: dict[int, Any] = {}
    waiting = dict(zip(results, range(world_size), strict=True))
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            stacks = [f"rank {r}:\n{(folder / f'stack{r}').read_text()}" for r in sorted(waiting.values())]
            raise TimeoutError(f"ranks {sorted(waiting.values())} took longer than {timeout} s\n" + "\n".join(stacks))
        failures = []
        for connection in ready:
            rank = waiting.pop(connection)  # type: ignore[call-overload]
            try:
                when, error, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                when, error, value = time.monotonic(), "it died without a word", None
            values[rank] = value
            if error:
                failures.append((when, f"rank {rank} of {world_size} failed:\n{error}"))
        if failures:
            raise RankError(min(failures)[1])
    return [values[rank] for rank in range(world_size)]


def _rank(task: _Task, rank: int, world_size: int, folder: str, sender: Connection) -> None:
    """A forked rank: run the task and send (time, traceback or "", value)."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    store = functools.partial(dist.FileStore, str(Path(folder) / "store"), world_size)
    with (Path(folder) / f"stack{rank}").open("w") as stack:
        faulthandler.dump_traceback_later(0.95 * task.timeout, file=stack)
        try:
            with _parallel(task, rank, world_size, store):
                function, args = task.load()
                value = pickle.dumps((time.monotonic(), "", function(*args)))
                sender.send_bytes(value)
        except BaseException:
            sender.send_bytes(pickle.dumps((time.monotonic(), traceback.format_exc(), None)))
            time.sleep(1)  # the others would report a closed connection: let this report be the first
            raise SystemExit(1) from None
        finally:
            faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _parallel(task: _Task, rank: int, world_size: int, store: Callable[[], Any] | None = None) -> Iterator[None]:
    """torch.distributed and Megatron's groups and seeds, on this process; all ranks leave together."""
    platform = available_platform()
    torch.set_num_threads(1)
    if platform == "cpu":
        use_cpu()
    else:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group(
        task.backend or ("nccl" if platform == "cuda" else "gloo"),
        store=store() if store else None,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=task.timeout),
    )
    layout = task.layout
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_of(world_size),
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    model_parallel_cuda_manual_seed(task.seed)
    torch.manual_seed(task.seed)
    yield
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def launch_torchrun(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 240.0, seed: int = 1234, **parallel: Any
) -> list[Any]:
    """As `run_ranks`, with real torchrun processes. `parallel`: the fields of Layout, as `tensor=2`.

    Raises:
        RankError: torchrun did not exit with 0; holds the end of what it printed.
        subprocess.TimeoutExpired: it took longer than `timeout` seconds.
    """
    task = _task(fn, args, layout=Layout(**parallel), backend=None, seed=seed, timeout=timeout)
    task.layout.tensor_of(world_size)
    with tempfile.TemporaryDirectory(prefix="qla_torchrun_") as folder:
        (Path(folder) / "task").write_bytes(pickle.dumps(task))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        command += ["-m", "qla_megatron.testing.distributed", folder]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, env=environment, timeout=timeout, capture_output=True, text=True, check=False)
        if run.returncode:
            raise RankError(f"torchrun exited with {run.returncode}:\n{run.stdout[-2000:]}\n{run.stderr[-8000:]}")
        return [pickle.loads((Path(folder) / f"result{rank}").read_bytes()) for rank in range(world_size)]


def _torchrun_rank(folder: Path) -> None:
    """A rank under torchrun: run the task that lies in `folder`, leave the result there."""
    # Under -m this file is __main__; the task was pickled by the module's own name.
    task = pickle.loads((folder / "task").read_bytes())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with _parallel(task, rank, world_size):
        function, args = task.load()
        (folder / f"result{rank}").write_bytes(pickle.dumps(function(*args)))


if __name__ == "__main__":
    _torchrun_rank(Path(sys.argv[1]))
