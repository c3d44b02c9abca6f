"""The gradient norm of every module of a Megatron model, over all processes."""

import math
from collections import defaultdict
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.transformer.transformer_layer import BaseTransformerLayer


def module_grad_norms(model_chunks: list[Any]) -> dict[str, float]:
    """Module name -> L2 norm of its reduced gradient, on the last rank; elsewhere an empty dict.

    A collective of all ranks. Call between the reduction of gradients and the optimizer step. Layers are named by their
    number in the whole model, from 0. The squares add up to that of Megatron's gradient norm before clipping.

    Args:
        model_chunks: Megatron's DistributedDataParallel-wrapped model chunks.
    """
    squares: dict[str, torch.Tensor] = {}
    for chunk in model_chunks:
        names = _names(chunk)
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            for param, (begin, end, bucket) in buffer.param_index_map.items():
                if param_is_not_shared(param) and _is_first_holder(param):
                    grad = _own_part(buffer, begin, end, bucket, sharded=chunk.ddp_config.use_distributed_optimizer)
                    if grad is not None:
                        name = names[param]
                        squares[name] = (
                            squares.get(name, torch.zeros((), device=grad.device)) + grad.float().square().sum()
                        )
    local = dict(zip(squares, torch.stack(list(squares.values())).tolist(), strict=True)) if squares else {}
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    everyone: list[Any] | None = [None] * world if rank == world - 1 else None
    torch.distributed.gather_object(local, everyone, dst=world - 1)
    total: dict[str, float] = defaultdict(float)
    for part in everyone or []:
        for name, square in part.items():
            total[name] += square
    return {name: math.sqrt(square) for name, square in sorted(total.items())}


def _names(chunk: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """Parameter -> name of its module, with global layer numbers."""
    layers = {name: m.layer_number - 1 for name, m in chunk.named_modules() if isinstance(m, BaseTransformerLayer)}
    names = {}
    for path, param in chunk.named_parameters():
        module = path.rpartition(".")[0]
        for layer, number in layers.items():
            if module.startswith(f"{layer}."):
                module = f"{layer.rpartition('.')[0]}.{number}{module[len(layer) :]}"
                break
        names[param] = module.removeprefix("module.").removeprefix("module.")
    return names


def _is_first_holder(param: torch.nn.Parameter) -> bool:
    """Whether this tensor-parallel rank is the one to count the parameter."""
    group = parallel_state.get_tensor_model_parallel_group()
    if not getattr(param, "allreduce", True):  # Megatron's mark of an expert's parameter
        group = parallel_state.get_expert_tensor_parallel_group()
    return param_is_not_tensor_parallel_duplicate(param, group)


def _own_part(buffer: Any, begin: int, end: int, bucket_id: int, *, sharded: bool) -> torch.Tensor | None:
    """What this data-parallel rank counts of the gradient at [begin, end) of a buffer.

    A distributed optimizer's gradients are reduced in equal shares of a bucket, one share a rank; otherwise every rank
    has them whole and the first one counts.
    """
    rank, size = buffer.data_parallel_group.rank(), buffer.data_parallel_group.size()
    bucket = buffer.buckets[bucket_id]
    if sharded:
        share = bucket.grad_data.numel() // size
        begin, end = max(begin, bucket.offset + rank * share), min(end, bucket.offset + (rank + 1) * share)
    elif rank:
        return None
    return bucket.grad_data[begin - bucket.offset : end - bucket.offset] if begin < end else None
