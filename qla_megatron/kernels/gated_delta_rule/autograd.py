"""The torch.library ops beneath the public ones: what is saved, which gradients exist.

Both ops have fakes, so that torch.compile and torch.export pass through without a graph break, and the forward op has
its backward registered. Neither is meant to be called directly.
"""

from typing import Any

import torch
from torch import Tensor

from . import chunked


@torch.library.custom_op("qla_megatron::chunk_gated_delta_rule_fwd", mutates_args=())
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    scale: float,
    backend: str,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, final states, and the three tensors of `chunked.saved_like`; `backend` is "reference" or "tilelang"."""
    return chunked.forward(q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu, scale, backend, save)


@forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    scale: float,
    backend: str,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    documents = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    inverses, gates, states = chunked.saved_like(k, v, cu_seqlens, backend, save)
    final_state = states.new_empty(documents, v.shape[2], k.shape[3], v.shape[3])
    return v.new_empty(v.shape), final_state, inverses, gates, states


@torch.library.custom_op("qla_megatron::chunk_gated_delta_rule_bwd", mutates_args=())
def backward_op(
    do: Tensor | None,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    inverses: Tensor,
    gates: Tensor,
    states: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg, dbeta and the gradient of the initial states, float32 (or float64)."""
    saved = (inverses, gates, states, cu_seqlens, cu_seqlens_cpu)
    return chunked.backward(do, dht, q, k, v, g, beta, *saved, scale, backend)


@backward_op.register_fake
def _(
    do: Tensor | None,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    inverses: Tensor,
    gates: Tensor,
    states: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    documents = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dq, dk, dv, dg, dbeta = (x.new_empty(x.shape) for x in (q, k, v, g, beta))
    return dq, dk, dv, dg, dbeta, states.new_empty(documents, v.shape[2], k.shape[3], v.shape[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu, scale, backend, save = inputs
    assert save or not any(ctx.needs_input_grad)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, g, beta, *output[2:], cu_seqlens, cu_seqlens_cpu)
    ctx.settings = scale, backend
    ctx.state_dtype = None if initial_state is None else initial_state.dtype


def _backward(ctx: Any, do: Tensor | None, dht: Tensor | None, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    *grads, dinitial_state = backward_op(do, dht, *ctx.saved_tensors, *ctx.settings)
    dstate = None if ctx.state_dtype is None else dinitial_state.to(ctx.state_dtype)
    return *grads, dstate, None, None, None, None, None


forward_op.register_autograd(_backward, setup_context=_save)
