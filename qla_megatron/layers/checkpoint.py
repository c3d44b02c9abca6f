"""Parameters that stay float32 in a half-precision model.

Megatron wraps a model with `module.bfloat16()`, and users call `.half()` or `.to(dtype)`: all of them end in
`torch.nn.Module._apply` with a function from tensor to tensor. In bfloat16 the decay exp(A_log) is off by up to 0.4 %,
which a long product of decays turns into a wrong gate, and small weights of a zero-centred norm vanish.

The sharded form of the layer's parameters needs nothing here: the layer inherits it from Megatron, so that
checkpoints of both are the same by construction. Loading casts to the dtype of the parameter.
"""

from collections.abc import Callable, Iterable

import torch


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
