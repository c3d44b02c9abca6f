"""The forward and backward pass by backend: the algorithm on one screen."""

import torch
from torch import Tensor

from ..checks import check_offset_values
from ..varlen import CHUNK, document_offsets, lay_out_chunks, slot_count
from . import reference

BACKENDS = ("auto", "tilelang", "reference")


def choose_backend(backend: str, device: torch.device, needs_gradients: bool = False) -> str:
    """The backend that serves tensors of this device; raises where none does, and falls back to nothing."""
    if backend == "reference" or (backend == "auto" and device.type == "cpu"):
        return "reference"
    if device.type != "cuda":
        raise NotImplementedError(
            f'backend="{backend}" serves CUDA tensors, got {device.type} tensors; backend="reference" serves them'
        )
    if needs_gradients:
        raise NotImplementedError(
            f'backend="{backend}" on {device.type}: the fused kernels have no backward pass yet; call it under '
            'torch.no_grad(), or ask for backend="reference" (plain torch, slow) by name'
        )
    return "tilelang"


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
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o [B, T, HV, V], the final states [N, HV, K, V], and what `saved_like` describes."""
    if backend == "tilelang":
        from .fused_forward import fused_forward  # TileLang takes seconds to import, which a CPU run should not spend

        if cu_seqlens_cpu is not None:
            check_offset_values(cu_seqlens_cpu.tolist(), v.shape[1])
        o, state, _ = fused_forward(q, k, v, g, beta, scale, initial_state, True, cu_seqlens)
        assert state is not None
        return o, state, *saved_like(k, v, cu_seqlens, backend)
    layout = lay_out_chunks(document_offsets(v.shape[0], v.shape[1], cu_seqlens, cu_seqlens_cpu), v.device)
    inverses, starts = (x.zero_() for x in saved_like(k, v, cu_seqlens, backend))
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


def saved_like(k: Tensor, v: Tensor, cu_seqlens: Tensor | None, backend: str) -> tuple[Tensor, Tensor]:
    """Uninitialised room for what the forward pass keeps besides its inputs; the shapes don't depend on the offsets.

    The reference: the inverses X [slots, HV, C, C] and the states at the chunks' starts [slots, HV, K, V], both float32
    (or float64). The kernels keep nothing: their slots are 0.
    """
    batch, tokens, heads, V = v.shape
    slots = slot_count(batch, tokens, cu_seqlens) if backend == "reference" else 0
    wide = torch.promote_types(v.dtype, torch.float32)
    return (
        v.new_empty(slots, heads, CHUNK, CHUNK, dtype=wide),
        v.new_empty(slots, heads, k.shape[-1], V, dtype=wide),
    )
