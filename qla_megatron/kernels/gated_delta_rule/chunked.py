"""The forward and backward pass by backend: the algorithm on one screen."""

import torch
from torch import Tensor

from ..checks import check_offset_values
from ..varlen import CHUNK, document_offsets, lay_out_chunks, row_offsets, slot_count
from . import reference
from .tiles import checkpoint_count


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
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o [B, T, HV, V], the final states [N, HV, K, V], and what `saved_like` describes."""
    if backend == "tilelang":
        from .fused_forward import fused_forward  # TileLang takes seconds to import, which a CPU run should not spend

        if cu_seqlens_cpu is not None:
            check_offset_values(cu_seqlens_cpu.tolist(), v.shape[1])
        o, state, saved = fused_forward(q, k, v, g, beta, scale, initial_state, True, cu_seqlens, save=save)
        assert state is not None
        return o, state, *(saved_like(k, v, cu_seqlens, backend, save) if saved is None else saved)
    layout = lay_out_chunks(document_offsets(v.shape[0], v.shape[1], cu_seqlens, cu_seqlens_cpu), v.device)
    inverses, gates, states = (x.zero_() for x in saved_like(k, v, cu_seqlens, backend, True))
    if initial_state is None:
        state = states.new_zeros(len(layout.order), *states.shape[1:])
    else:
        state = initial_state.to(states.dtype).index_select(0, layout.order)
    with torch.autocast(v.device.type, enabled=False):
        o = reference.chunked_forward(
            *(x.flatten(0, 1) for x in (q, k, v, g, beta)),
            scale=scale,
            state=state.flatten(0, 1),
            inverses=inverses.flatten(0, 1),
            starts=states.flatten(0, 1),
            layout=layout,
        )
    kept = (inverses, gates, states) if save else saved_like(k, v, cu_seqlens, backend, False)
    return o.view(v.shape), state[layout.order.argsort()], *kept


def backward(
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
    """dq, dk, dv, dg, dbeta as their inputs, and the gradient of the initial states [N, HV, K, V]."""
    inputs = (q, k, v, g, beta)
    do = torch.zeros_like(v) if do is None else do
    if backend == "tilelang":
        from .fused_backward import fused_backward

        offsets = row_offsets(v.shape[0], v.shape[1], v.device) if cu_seqlens is None else cu_seqlens
        do, q, k, v = (x.flatten(0, 1).contiguous() for x in (do.to(v.dtype), q, k, v))
        dht = None if dht is None else dht.float().contiguous()
        *grads, dstate = fused_backward(do, dht, q, k, v, inverses, gates, states, offsets.int().contiguous(), scale)
        dq, dk, dv, dg, dbeta = (grad.view(x.shape) for grad, x in zip(grads, inputs, strict=True))
        return dq, dk, dv, dg, dbeta, dstate
    layout = lay_out_chunks(document_offsets(v.shape[0], v.shape[1], cu_seqlens, cu_seqlens_cpu), v.device)
    if dht is None:
        dstate = states.new_zeros(len(layout.order), *states.shape[1:])
    else:
        dstate = dht.to(states.dtype).index_select(0, layout.order)
    with torch.autocast(v.device.type, enabled=False):
        grads = reference.chunked_backward(
            do.flatten(0, 1),
            dstate.flatten(0, 1),
            *(x.flatten(0, 1) for x in inputs),
            inverses=inverses.flatten(0, 1),
            starts=states.flatten(0, 1),
            scale=scale,
            layout=layout,
        )
    dq, dk, dv, dg, dbeta = (grad.view(x.shape) for grad, x in zip(grads, inputs, strict=True))
    return dq, dk, dv, dg, dbeta, dstate[layout.order.argsort()]


def saved_like(
    k: Tensor, v: Tensor, cu_seqlens: Tensor | None, backend: str, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised room for what the forward pass keeps besides its inputs; the shapes don't depend on the offsets.

    The reference: the inverses X [slots, HV, C, C] and the states at the chunks' starts [slots, HV, K, V], both float32
    (or float64), and no gates. The kernels: their inverses A [slots, HV, C, C] in v's dtype, the summed gates and the
    strengths [slots, HV, 2, C] float32, and the state at the start of every 16th chunk [., HV, V, K] float32. Nothing
    is kept, 0 slots, where no gradient will be asked for.
    """
    batch, tokens, heads, V = v.shape
    wide = torch.promote_types(v.dtype, torch.float32)
    documents = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if backend == "reference":
        slots = states = slot_count(batch, tokens, cu_seqlens) if save else 0
        return (
            v.new_empty(slots, heads, CHUNK, CHUNK, dtype=wide),
            v.new_empty(0, heads, 2, CHUNK, dtype=wide),
            v.new_empty(states, heads, k.shape[-1], V, dtype=wide),
        )
    slots = batch * tokens // CHUNK + documents if save else 0
    states = checkpoint_count(slots, documents) if save else 0
    return (
        v.new_empty(slots, heads, CHUNK, CHUNK),
        v.new_empty(slots, heads, 2, CHUNK, dtype=torch.float32),
        v.new_empty(states, heads, V, k.shape[-1], dtype=torch.float32),
    )
