"""Every kernel there is, with every choice that a run can make: what `tools/warm_kernels.py` builds ahead of time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

ALIGNMENTS = (16, 8, 4)  # bytes, of in_proj's rows: fewer where a rank holds few value heads


@dataclass(frozen=True)
class Kernel:
    """A factory and its arguments, as `compiled` takes them."""

    factory: Callable[..., Any]
    choices: tuple[Any, ...]

    @property
    def name(self) -> str:
        module = self.factory.__module__.removeprefix("qla_megatron.kernels.")
        return " ".join([module, self.factory.__name__, *map(str, self.choices)])


def kernels(dtypes: Sequence[str] = ("bfloat16",)) -> list[Kernel]:
    """The kernels of the op and of the layer for these dtypes, those that take longest first."""
    from .causal_conv1d.convolve import convolve_kernel
    from .causal_conv1d.convolve_backward import convolve_backward_kernel, state_gradient_kernel
    from .gated_delta_rule import chunk_gradients, prepare_chunks, recompute_states, state_gradient, state_output
    from .gated_norm.normalise import normalise_backward_kernel, normalise_kernel
    from .row_sums import sum_rows_kernel

    found = []
    for dtype in dtypes:
        found += [Kernel(chunk_gradients.chunk_gradients_kernel, (dtype,))]
        for block_v in (128, 64):
            found += [Kernel(state_gradient.state_gradient_kernel, (dtype, block_v))]
            found += [Kernel(state_output.state_output_kernel, (dtype, block_v))]
        found += [Kernel(recompute_states.recompute_states_kernel, (dtype,))]
        found += [Kernel(prepare_chunks.prepare_chunks_kernel, (dtype,))]
        for align in ALIGNMENTS:
            convolution = (dtype, dtype, align, False, True)
            found += [Kernel(convolve_backward_kernel, convolution), Kernel(convolve_kernel, convolution)]
            found += [Kernel(state_gradient_kernel, convolution)]
            found += [
                Kernel(normalise_backward_kernel, (dtype, align, align)),
                Kernel(normalise_kernel, (dtype, align)),
            ]
        found += [Kernel(sum_rows_kernel, (dtype, width)) for width in (32, 1)]
    return found + [Kernel(sum_rows_kernel, ("float32", width)) for width in (32, 1)]
