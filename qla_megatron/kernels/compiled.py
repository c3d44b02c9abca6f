"""Compiled kernels, built once: a handle in this process by a small key, the binary in TileLang's store on disk.

The store (`$TILELANG_CACHE_DIR`, `~/.tilelang/cache`) is keyed by the kernel's code, TileLang's version and the
architecture, and is written by renaming finished files, so that many processes may start at once. Nothing here needs
a device.
"""

from collections.abc import Callable
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
                target = {"kind": "cuda", "arch": architecture}
                kernel = tilelang.compile(factory(*choices), target=target, pass_configs=PASS_CONFIGS)
                _handles[key] = kernel
    return kernel
