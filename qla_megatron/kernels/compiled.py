"""Compiled kernels, built once a machine: a handle in this process by a small key, the binary in a store on disk.

The store is TileLang's (`$TILELANG_CACHE_DIR`, `~/.tilelang/cache`), keyed by the kernel's code, TileLang's version and
the architecture, and is written by renaming finished files. Processes that start at once build a kernel once: one holds
the kernel's lock, a file beside the store, and the others wait for it with a message. The lock is the kernel's of the
operating system (flock), so that it goes with a builder that dies. `tools/warm_kernels.py` fills a store ahead of time;
a store that cannot be written to is read. Nothing here needs a device.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

import tilelang
from tilelang import PassConfigKey

# Barriers and fences between warps are written out in the kernels, and every access is guarded there.
PASS_CONFIGS = {
    PassConfigKey.TL_ENABLE_FAST_MATH: True,
    PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
}

_handles: dict[tuple[Any, ...], Any] = {}
_lock = Lock()


def compiled(architecture: str, factory: Callable[..., Any], *choices: Any) -> Any:
    """The kernel of `factory(*choices)`, compiled for `architecture`; a dictionary look-up after the first call."""
    key = (architecture, factory, *choices)
    kernel = _handles.get(key)
    if kernel is None:
        with _lock:
            kernel = _handles.get(key)
            if kernel is None:
                name = "-".join(str(part) for part in (factory.__name__, *choices, architecture))
                with _turn(f"{name}-{_sources()}"):
                    target = {"kind": "cuda", "arch": architecture}
                    kernel = tilelang.compile(factory(*choices), target=target, pass_configs=PASS_CONFIGS)
                _handles[key] = kernel
    return kernel


@cache
def _sources() -> str:
    """What the kernels are made from: a change makes other marks in the store."""
    digest = sha256(f"{tilelang.__version__} {sorted((k.value, v) for k, v in PASS_CONFIGS.items())}".encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def marks_folder() -> Path:
    """Where locks, and marks of kernels that are built, lie beside TileLang's own files."""
    return Path(str(tilelang.env.TILELANG_CACHE_DIR)) / "qla_megatron"


@contextmanager
def _turn(name: str) -> Iterator[None]:
    """Wait until no other process builds the kernel; marked ones need no turn."""
    folder = marks_folder()
    mark = folder / f"{name}.built"
    if mark.exists():
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f"{name}.lock").open("w")
    except OSError as error:
        print(f"qla_megatron: {name} is not in the store, which is read alone ({error}): built here", file=sys.stderr)
        yield
        return
    with lock:
        try:
            flock(lock, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            print(f"qla_megatron: waiting for another process, which builds {name}", file=sys.stderr, flush=True)
            flock(lock, LOCK_EX)
        if not mark.exists():
            print(f"qla_megatron: building {name}", file=sys.stderr, flush=True)
        yield
        mark.touch()
