"""What stands in for CUDA on a machine without a GPU, so that megatron.core and Megatron's own `pretrain` run on gloo.

Megatron 0.19 takes a CUDA device for granted. `use_cpu()` puts CPU versions in the place of the few functions that it
calls, for this process. The tables below say who needs each (paths are in the package megatron).
"""

import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _Stream:
    """A CUDA stream on which nothing waits: every method does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _do_nothing

    def record_event(self, *args: Any, **kwargs: Any) -> "_Stream":
        """An event on which nothing waits; the token dispatcher of a mixture of experts asks for one."""
        return self


def _do_nothing(*args: Any, **kwargs: Any) -> None: ...


def _properties(*args: Any, **kwargs: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(name="cpu", major=9, minor=0, total_memory=1 << 34, multi_processor_count=1)


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


# Attributes of torch.cuda.
TORCH_CUDA: dict[str, Any] = {
    "device_count": lambda: 1,  # training/initialize.py makes no parallel groups and no seeds where it is 0
    "current_device": lambda: CPU,  # device= of buffers and parameters nearly everywhere in core
    "set_device": _do_nothing,  # training/initialize.py
    "get_device_properties": _properties,  # training/arguments.py asks for the compute capability
    "synchronize": _do_nothing,  # timers, checkpoint writers
    "empty_cache": _do_nothing,  # training/training.py
    "Stream": _Stream,  # training/training.py: warm-up of data parallelism
    "current_stream": _Stream,  # core/distributed/param_and_grad_buffer.py
    "stream": lambda stream: contextlib.nullcontext(),  # the same
    "manual_seed": torch.manual_seed,  # core/tensor_parallel/random.py: without it all ranks draw the same numbers
    "get_rng_state": _get_rng_state,  # the same; training/checkpointing.py
}

# Functions of core/tensor_parallel/random.py, which reads the generators of the device itself.
MEGATRON_RANDOM: dict[str, Any] = {"_get_cuda_rng_state": _get_rng_state, "_set_cuda_rng_state": _set_rng_state}


class _CudaMeansCpu(TorchFunctionMode):
    """Tensors asked for on "cuda" come on the CPU, `.cuda()` returns the tensor, `.type()` says torch.cuda.*Tensor.

    core/optimizer, core/models/common/language_module and training/training.py name the device "cuda"; clip_grads.py
    and distrib_optimizer.py compare the type's name. A mode acts on the thread that entered it: backward on the CPU
    runs there, worker threads of a data loader do not.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = kwargs | {"device": CPU}
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def available_platform() -> Literal["cuda", "cpu"]:
    """Where this process can compute: "cuda" where a device is visible, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@functools.cache
def _use_cpu() -> None:
    # Megatron's arguments refuse tensor parallelism without it on compute capability 9.0.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for name, stand_in in TORCH_CUDA.items():
        setattr(torch.cuda, name, stand_in)
    _CudaMeansCpu().__enter__()

    from megatron.core import jit
    from megatron.core.tensor_parallel import random

    for name, stand_in in MEGATRON_RANDOM.items():
        setattr(random, name, stand_in)
    jit.disable_jit_fuser()
    from megatron.training import training

    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    _restore_compiled_functions()


def _restore_compiled_functions() -> None:
    """Undo torch.compile in Megatron modules imported before: it needs a C++ compiler, and seconds for each function.

    Only Megatron's: torch.compile itself stays as it is for others.
    """
    for name, module in list(sys.modules.items()):
        if not name.startswith("megatron."):
            continue
        owners = [module, *(v for v in vars(module).values() if isinstance(v, type) and v.__module__ == name)]
        for owner in owners:
            for attribute, value in list(vars(owner).items()):
                if isinstance(value, types.FunctionType) and "_torchdynamo_orig_callable" in vars(value):
                    setattr(owner, attribute, vars(value)["_torchdynamo_orig_callable"])


def use_cpu(*, even_with_cuda: bool = False) -> None:
    """Let Megatron run on this machine's CPU, from now on and for the whole process.

    To be called before or after Megatron is imported; a second call does nothing. Choose gloo as the backend
    (`--distributed-backend gloo`) and `--num-workers 0`. Megatron's fused functions then run without torch.compile.

    Args:
        even_with_cuda: do it on a machine with a GPU too, which torch then no longer uses as it should.

    Raises:
        RuntimeError: a CUDA device is available, and `even_with_cuda` is not set.
    """
    if not even_with_cuda and available_platform() == "cuda":
        raise RuntimeError("use_cpu() is for machines without a GPU, but a CUDA device is available: don't call it")
    _use_cpu()
