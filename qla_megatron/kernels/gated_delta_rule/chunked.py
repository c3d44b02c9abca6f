"""The forward and backward pass by backend: the algorithm on one screen."""

import torch
from torch import Tensor

from ..varlen import CHUNK, document_offsets, lay_out_chunks, slot_count
from . import reference

BACKENDS = ("auto", "tilelang", "reference")


def choose_backend(backend: str, device: torch.device) -> str:
    """The backend that serves tensors of this device; raises where none does, and falls back to nothing."""
    if backend == "reference" or (backend == "auto" and device.type == "cpu"):
        return "reference"
    if backend == "tilelang" and device.type == "cpu":
        raise NotImplementedError(
            'backend="tilelang" serves CUDA tensors, got CPU tensors; backend="reference" serves them'
        )
    raise NotImplementedError(
        f'backend="{backend}" on {device.type}: the fused kernels are not there yet; backend="reference" (plain torch, '
        "slow) runs on any device when asked for by name"
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o [B, T, HV, V], the final states [N, HV, K, V], and what `saved_like` describes."""
    layout = lay_out_chunks(document_offsets(v.shape[0], v.shape[1], cu_seqlens, cu_seqlens_cpu), v.device)
    inverses, starts = (x.zero_() for x in saved_like(k, v, cu_seqlens))
    if initial_state is None:
        state = starts.new_zeros(len(layout.order), *starts.shape[1:])
    else:
        state = initial_state.to(starts.dtype).index_select(0, layout.order)
    with torch.autocast(v.device.type, enabled=False):
        o = reference.chunked_forward(
            *(x.flatten(0, 1) for x in (q, k, v, g, beta)),
            scale=scale,
            state=state.flatten(0, 1),
            inverses=inverses.flatten(0, 1),
            starts=starts.flatten(0, 1),
            layout=layout,
        )
    return o.view(v.shape), state[layout.order.argsort()], inverses, starts


def backward(
    do: Tensor | None,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    inverses: Tensor,
    starts: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg, dbeta as their inputs, and the gradient of the initial states [N, HV, K, V]."""
    layout = lay_out_chunks(document_offsets(v.shape[0], v.shape[1], cu_seqlens, cu_seqlens_cpu), v.device)
    if dht is None:
        dstate = starts.new_zeros(len(layout.order), *starts.shape[1:])
    else:
        dstate = dht.to(starts.dtype).index_select(0, layout.order)
    inputs = (q, k, v, g, beta)
    with torch.autocast(v.device.type, enabled=False):
        grads = reference.chunked_backward(
            (torch.zeros_like(v) if do is None else do).flatten(0, 1),
            dstate.flatten(0, 1),
            *(x.flatten(0, 1) for x in inputs),
            inverses=inverses.flatten(0, 1),
            starts=starts.flatten(0, 1),
            scale=scale,
            layout=layout,
        )
    dq, dk, dv, dg, dbeta = (grad.view(x.shape) for grad, x in zip(grads, inputs, strict=True))
    return dq, dk, dv, dg, dbeta, dstate[layout.order.argsort()]


def saved_like(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Uninitialised room for what the forward pass keeps besides its inputs; the shapes don't depend on the offsets.

    The inverses X [slots, HV, C, C] and the states at the chunks' starts [slots, HV, K, V], both float32 (or float64).
    """
    batch, tokens, heads, V = v.shape
    slots = slot_count(batch, tokens, cu_seqlens)
    wide = torch.promote_types(v.dtype, torch.float32)
    return (
        v.new_empty(slots, heads, CHUNK, CHUNK, dtype=wide),
        v.new_empty(slots, heads, k.shape[-1], V, dtype=wide),
    )
