"""The fused backward pass: the state's gradient, the states once more, then the gradients of every chunk."""

from functools import cache

import torch
from torch import Tensor

from ..device import multiprocessors
from .chunk_gradients import compute_chunk_gradients
from .recompute_states import recompute_states
from .state_gradient import compute_state_gradient
from .tiles import CHECKPOINT, CHUNK, HEAD_DIM

WORKSPACE = 2816 << 20  # bytes at most of the states, their gradients and the writes of a segment


@cache
def _second_stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


def segments(slots: int, value_heads: int) -> list[tuple[int, int]]:
    """The slots in runs that fit the workspace, the last run first."""
    bytes_of_a_slot = 2 * value_heads * HEAD_DIM * (2 * HEAD_DIM + CHUNK)
    size = max(1, WORKSPACE // (bytes_of_a_slot * CHECKPOINT)) * CHECKPOINT
    count = -(-slots // size)
    size = -(-slots // (count * CHECKPOINT)) * CHECKPOINT
    return [(first, min(first + size, slots)) for first in range(0, slots, size)][::-1]


def fused_backward(
    do: Tensor,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    gates: Tensor,
    checkpoints: Tensor,
    cu_seqlens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the gated delta rule on Hopper, deterministic, without host reads.

    Args:
        do: [T, HV, 128], v's dtype. dht: [N, HV, 128, 128] float32; None is 0.
        q, k: [T, H, 128] bfloat16 or float16. v: [T, HV, 128].
        a, gates, checkpoints: what `fused_forward` saved. cu_seqlens: [N + 1] int32. scale: of the outputs.

    Returns:
        dq, dk, dv as q, k, v; dg, dbeta [T, HV] float32; the gradient of the initial states [N, HV, 128, 128] float32.
        All but the last are 0 past the last document.
    """
    tokens, value_heads, _ = v.shape
    slots, documents = a.shape[0], cu_seqlens.shape[0] - 1
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dg, dbeta = (torch.empty(tokens, value_heads, dtype=torch.float32, device=v.device) for _ in range(2))
    dstate = torch.empty(documents, value_heads, HEAD_DIM, HEAD_DIM, dtype=torch.float32, device=v.device)
    if tokens == 0:
        return dq, dk, dv, dg, dbeta, dstate.zero_() if dht is None else dstate.copy_(dht)
    runs = segments(slots, value_heads)
    size = max(last - first for first, last in runs)
    states, dstates = (v.new_empty(size, value_heads, HEAD_DIM, HEAD_DIM) for _ in range(2))
    writes = v.new_empty(size, value_heads, CHUNK, HEAD_DIM)
    stream, second = torch.cuda.current_stream(v.device), _second_stream(v.get_device())
    # Neither of the first two passes needs the other: the second fills the multiprocessors that few long documents
    # leave to it.
    together = 2 * documents * value_heads <= multiprocessors(v.get_device())
    for run in runs:
        if together:
            second.wait_stream(stream)
        compute_state_gradient(q, k, do, a, gates, dht, cu_seqlens, dv, dstates, dstate, scale, run)
        with torch.cuda.stream(second if together else stream):
            recompute_states(k, v, a, gates, checkpoints, cu_seqlens, states, writes, run)
        if together:
            stream.wait_stream(second)
        compute_chunk_gradients(q, k, do, dv, gates, states, dstates, writes, cu_seqlens, dq, dk, dg, dbeta, scale, run)
    return dq, dk, dv, dg, dbeta, dstate
