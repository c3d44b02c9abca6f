"""Parameters that stay float32 in a half-precision model, and Megatron's optimizers that have to save them.

Megatron wraps a model with `module.bfloat16()`, and users call `.half()` or `.to(dtype)`: all of them end in
`torch.nn.Module._apply` with a function from tensor to tensor. In bfloat16 the decay exp(A_log) is off by up to 0.4 %,
which a long product of decays turns into a wrong gate, and small weights of a zero-centred norm vanish.

The sharded form of the layer's parameters needs nothing here: the layer inherits it from Megatron (save for a bias of
in_proj), so that checkpoints of both are the same by construction. Loading casts to the dtype of the parameter.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params


def keep_float32(
    fn: Callable[[torch.Tensor], torch.Tensor], parameters: Iterable[torch.nn.Parameter]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`fn` for `torch.nn.Module._apply`, except that `parameters` and their gradients keep at least 32 bits.

    Moves between devices, layouts and to float64 stay as `fn` wants them.
    """
    kept = {id(t) for p in parameters for t in (p, p.grad) if t is not None and t.dtype == torch.float32}

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        applied = fn(tensor)
        is_narrowed = applied.dtype.is_floating_point and applied.dtype.itemsize < tensor.dtype.itemsize
        return tensor.to(applied.device) if id(tensor) in kept and is_narrowed else applied

    return apply


def to_float32(parameter: torch.nn.Parameter) -> None:
    """Widen a half-precision parameter in place; its identity and the attributes that Megatron set on it stay."""
    if parameter.dtype.itemsize < 4:
        parameter.data = parameter.data.float()


@functools.cache
def let_megatron_save_float32_parameters() -> None:
    """Work around a fault of megatron-core 0.19 in each of its two half-precision optimizers, once.

    Both train float32 parameters beside half-precision ones. Models without float32 parameters notice nothing.

    - Float16OptimizerWithFloat16Params looks for the sharded form of the half-precision parameters alone: "Param id 4
      does not match any model sharded param".
    - DistributedOptimizer numbers a group's parameters in the order of its buffers, but hands float32 ones to Adam
      first. Where a half-precision buffer comes first, as in every model with an embedding, a parameter's moments are
      saved and loaded as another one's: an error if their sizes differ, else wrong without one.
    """
    _save_beside_half_precision()
    _number_float32_parameters_first()


def _number_float32_parameters_first() -> None:
    megatrons = DistributedOptimizer._build_optimizer_group_ranges

    def group_ranges(cls: type, param_groups: list[dict[str, Any]], gbuf_ranges: list[dict[Any, Any]]) -> Any:
        numbers, ranges = megatrons(param_groups, gbuf_ranges)
        for group, group_range in enumerate(ranges):
            group_range["params"].sort(key=lambda parameter: parameter.dtype != torch.float32)
            numbers |= {parameter: (group, n) for n, parameter in enumerate(group_range["params"])}
        return numbers, ranges

    DistributedOptimizer._build_optimizer_group_ranges = classmethod(group_ranges)


def _save_beside_half_precision() -> None:
    megatrons = Float16OptimizerWithFloat16Params.sharded_state_dict

    def sharded_state_dict(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: dict[str, Any] | None = None
    ) -> Any:
        if not any(self.fp32_from_fp32_groups):
            return megatrons(self, model_sharded_state_dict, is_loading, metadata)
        return _sharded_state_dict(self, model_sharded_state_dict, is_loading)

    Float16OptimizerWithFloat16Params.sharded_state_dict = sharded_state_dict


def _sharded_state_dict(optimizer: Any, model_sharded_state_dict: Any, is_loading: bool) -> Any:
    """As Megatron's method, over all parameters in the optimizer's order.

    A float32 parameter is its own master copy. A copy of it is saved as one, too, for Megatron's half-precision layer
    to load; loading leaves the copy out, which then stands beyond the end of the optimizer's list of masters.
    """
    if is_loading:
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    groups = zip(optimizer.fp32_from_float16_groups, optimizer.float16_groups, strict=True)
    model_of = {main: model for mains, models in groups for main, model in zip(mains, models, strict=True)}
    mains = _all([group["params"] for group in optimizer.optimizer.param_groups])
    sharded = get_param_id_to_sharded_param_map(model_sharded_state_dict, [model_of.get(main, main) for main in mains])
    number = {main: n for n, main in enumerate(mains)}

    state = optimizer.state_dict()
    full = [[p.detach().clone() for p in group] for group in optimizer.fp32_from_fp32_groups]
    number |= {copy: number[p] for copy, p in zip(_all(full), _all(optimizer.fp32_from_fp32_groups), strict=True)}
    state["fp32_from_fp16_params"] = [
        [
            make_sharded_optimizer_tensor(sharded[number[p]], p, "optimizer.state.fp32_param")
            for p in (*masters, *copies)
        ]
        for masters, copies in zip(optimizer.fp32_from_float16_groups, full, strict=True)
    ]
    step = optimizer._extract_common_per_param_step(state["optimizer"])
    optim_state_to_sharding_state(state["optimizer"], sharded, exclude_keys=("step",))
    if step:
        state["optimizer"]["state"]["common_step"] = step
    return state


def _all(groups: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for group in groups for tensor in group]
