"""The gated delta rule in plain torch: the token recurrence (the oracle) and the chunked form that trains on a CPU.

Symbols, shapes and the equations of the chunked form are in README.md beside this file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..varlen import CHUNK, ChunkLayout

RUN = 32  # chunks times value heads worked on at once: bounds the memory of intermediate results


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token after another, with autograd: the definition of `chunk_gated_delta_rule`, for tests.

    Takes the same arguments, unchecked. Computes in float32, in float64 if v is float64. Returns o [B, T, HV, V] in v's
    dtype and the final states [N, HV, K, V].
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    group = v.shape[2] // q.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if cu_seqlens is None:
        documents = [(b, 0, q.shape[1]) for b in range(q.shape[0])]
    else:
        offsets = cu_seqlens.tolist()
        documents = [(0, start, end) for start, end in pairwise(offsets)]
    rows: list[list[Tensor]] = [[] for _ in range(q.shape[0])]
    states = []
    for n, (b, start, end) in enumerate(documents):
        if initial_state is None:
            S = q.new_zeros(v.shape[2], q.shape[-1], v.shape[-1], dtype=wide)
        else:
            S = initial_state[n].to(wide)
        for t in range(start, end):
            q_t, k_t = (x[b, t].to(wide).repeat_interleave(group, dim=0) for x in (q, k))
            S = S * g[b, t].to(wide).exp()[:, None, None]
            error = v[b, t].to(wide) - torch.einsum("hkv,hk->hv", S, k_t)
            S = S + torch.einsum("h,hk,hv->hkv", beta[b, t].to(wide), k_t, error)
            rows[b].append(scale * torch.einsum("hkv,hk->hv", S, q_t))
        states.append(S)
    tails = [v.new_zeros(q.shape[1] - len(row), *v.shape[2:], dtype=wide) for row in rows]
    outputs = [torch.cat([torch.stack(row), tail]) if row else tail for row, tail in zip(rows, tails, strict=True)]
    return torch.stack(outputs).to(v.dtype), torch.stack(states)


def chunked_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    state: Tensor,
    inverses: Tensor,
    starts: Tensor,
    layout: ChunkLayout,
) -> Tensor:
    """Outputs [T, HV, V] in v's dtype; the states are advanced in place.

    Args:
        q, k: [T, H, K], v: [T, HV, V], g, beta: [T, HV]: the tokens of all rows, one after another.
        state: [N HV, K, V] in the layout's order of documents: the initial states, and afterwards the final ones.
        inverses, starts: filled with what the backward pass needs of every chunk and head: X [chunks HV, C, C] and the
            state at the chunk's start [chunks HV, K, V].
        layout: the chunks of these tokens.
    """
    o = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for run in _runs(layout, v.shape[1]):
        c = _load(q, k, v, g, beta, scale, run, state.dtype)
        X, S0 = inverses[run.rows], starts[run.rows]
        X.copy_(_inverse(c.beta * c.gated_kk))
        vd = X @ (c.beta * c.v)
        read = X @ (c.beta * c.decay * c.k)
        write = (c.rest * c.k).mT
        for at, active in run.steps:
            S = S0[at].copy_(state[:active])
            vd[at].baddbmm_(read[at], S, alpha=-1)
            torch.mul(S, c.total[at], out=state[:active]).baddbmm_(write[at], vd[at])
        _scatter(((c.decay * c.q) @ S0).baddbmm_(c.gated_qk, vd), o, run)
    return o


def chunked_backward(
    do: Tensor,
    dstate: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    inverses: Tensor,
    starts: Tensor,
    scale: float,
    layout: ChunkLayout,
) -> list[Tensor]:
    """Gradients of q, k, v, g, beta.

    `dstate` [N HV, K, V], in the layout's order, is the gradient of the final states, and afterwards that of the
    initial ones; the other arguments are those of the forward pass.
    """
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta)]
    for run in reversed(list(_runs(layout, v.shape[1]))):
        c = _load(q, k, v, g, beta, scale, run, dstate.dtype)
        X, S0 = inverses[run.rows], starts[run.rows]
        dO = _gather(do, run, dstate.dtype)
        read = X @ (c.beta * c.decay * c.k)
        rest_k = c.rest * c.k
        dvd = c.gated_qk.mT @ dO
        dS0 = (c.decay * c.q).mT @ dO
        dS = torch.empty_like(S0)  # of the states at the chunks' ends
        for at, active in reversed(run.steps):
            carried = dS[at].copy_(dstate[:active])
            dvd[at].baddbmm_(rest_k[at], carried)
            dstate[:active].mul_(c.total[at]).add_(dS0[at]).baddbmm_(read[at].mT, dvd[at], alpha=-1)
        for grad, part in zip(grads, _chunk_gradients(c, X, S0, dO, dvd, dS, scale), strict=True):
            _scatter(part, grad, run)
    return grads


@dataclass(frozen=True)
class _Chunks:
    """Chunks times value heads, [.., C, ...] in the wide dtype; rows that hold no token are 0."""

    q: Tensor  # scaled
    k: Tensor
    v: Tensor
    beta: Tensor  # [.., C, 1], as are the next two
    decay: Tensor  # from the chunk's start to the token
    rest: Tensor  # from the token to the chunk's end
    total: Tensor  # over the whole chunk, [.., 1, 1]
    G: Tensor  # [.., C, C]
    gated_qk: Tensor  # tril(Q K^T * G)
    gated_kk: Tensor  # tril(K K^T * G, -1)


@dataclass(frozen=True)
class _Run:
    """Consecutive chunks of a layout that are worked on at once.

    Attributes:
        rows: the chunks, times value heads, within the layout.
        steps: for each step of the states its chunks, times value heads, within the run, and how many states take part.
        tokens: [chunks C] token indices. padding, kept: which of them hold no token, and which do; None where all do.
    """

    rows: slice
    steps: list[tuple[slice, int]]
    tokens: Tensor
    padding: Tensor | None
    kept: Tensor | None


def _runs(layout: ChunkLayout, heads: int) -> Iterator[_Run]:
    first, end = 0, 0
    steps: list[tuple[slice, int]] = []
    for place, active in enumerate(layout.active):
        steps.append((slice((end - first) * heads, (end - first + active) * heads), active * heads))
        end += active
        if (end - first) * heads >= RUN or place == len(layout.active) - 1:
            is_token = layout.is_token[first:end].flatten()
            padding, kept = (None, None) if layout.is_full else ((~is_token).nonzero()[:, 0], is_token.nonzero()[:, 0])
            yield _Run(slice(first * heads, end * heads), steps, layout.tokens[first:end].flatten(), padding, kept)
            first, steps = end, []


def _load(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, run: _Run, wide: torch.dtype
) -> _Chunks:
    group = v.shape[1] // q.shape[1]
    Q, K, V, a, b = (_gather(x, run, wide) for x in (q, k, v, g, beta))
    Q *= scale
    # A gate whose exponential is 0 may as well be the largest such: long sums then keep their low bits.
    sums = a.clamp_min(-746.0 if wide == torch.float64 else -104.0).double().cumsum(-1)
    above = torch.full((CHUNK, CHUNK), float("-inf"), dtype=wide, device=v.device).triu(1)
    G = (sums[..., :, None] - sums[..., None, :]).to(wide).add_(above).exp_()
    decay = sums.to(wide).exp()[..., None]
    return _Chunks(
        q=_repeat(Q, group),
        k=_repeat(K, group),
        v=V,
        beta=b[..., None],
        decay=decay,
        rest=G[..., -1, :, None],
        total=decay[..., -1:, :],
        G=G,
        gated_qk=_repeat(Q @ K.mT, group) * G,
        gated_kk=(_repeat(K @ K.mT, group) * G).tril_(-1),
    )


def _chunk_gradients(
    c: _Chunks, X: Tensor, S0: Tensor, dO: Tensor, dvd: Tensor, dS: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg, dbeta of the chunks, per value head, once the states' gradients are known."""
    U = c.k @ S0
    W = torch.addcmul(c.v, c.decay, U, value=-1)
    vd = X @ (c.beta * W)
    dY = X.mT @ dvd
    dL = (dY @ vd.mT).tril_(-1).neg_()
    dbeta = (dY * W).sum(-1) + (dL * c.gated_kk).sum(-1)
    dW = dY.mul_(c.beta)
    dL *= c.beta
    dP = dO @ vd.mT
    by_gate = (dP * c.gated_qk).addcmul_(dL, c.gated_kk)
    dP *= c.G
    dL *= c.G

    dU = -c.decay * dW
    dq = (dO @ S0.mT).mul_(c.decay)
    dk = (vd @ dS.mT).mul_(c.rest)
    dg = _gate_gradients(
        from_start=(dU * U).sum(-1) + (c.q * dq).sum(-1),
        between=by_gate,
        to_end=(c.k * dk).sum(-1),
        whole=(S0 * dS).sum((-2, -1)) * c.total[..., 0, 0],
    )

    dq.baddbmm_(dP, c.k).mul_(scale)
    dk.baddbmm_(dU, S0.mT).baddbmm_(dP.mT, c.q).baddbmm_(dL + dL.mT, c.k)
    return dq, dk, dW, dg, dbeta


def _gate_gradients(from_start: Tensor, between: Tensor, to_end: Tensor, whole: Tensor) -> Tensor:
    """dg [.., C] from the gradients of the log decays, times those decays' factors.

    A gate r lies in the decays from the chunk's start to tokens s >= r, in those from t < r to s >= r, in those from
    t < r to the chunk's end, and in the whole chunk's. Only these are added: differences of sums over all decays would
    cancel where decay is strong, and leave rounding errors larger than dg.

    Args:
        from_start: [.., C] by s. between: [.., C, C] by s and t. to_end: [.., C] by t. whole: [..].
    """
    not_before = torch.ones_like(between[0]).triu()
    crossing = (not_before @ between).tril_(-1).sum(-1)
    ending = pad(to_end[..., :-1], (1, 0)).cumsum(-1)
    return from_start.flip(-1).cumsum(-1).flip(-1) + crossing + ending + whole[..., None]


def _inverse(L: Tensor) -> Tensor:
    """(I + L)^-1 of strictly lower triangular matrices."""
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return torch.linalg.solve_triangular(L, eye.expand_as(L), upper=False, unitriangular=True)


def _gather(x: Tensor, run: _Run, wide: torch.dtype) -> Tensor:
    """[T, heads, ...] -> [chunks heads, C, ...] with 0 where there is no token; a copy."""
    rows = x.index_select(0, run.tokens)
    if run.padding is not None:
        rows.index_fill_(0, run.padding, 0)
    chunks = rows.unflatten(0, (-1, CHUNK)).transpose(1, 2)
    return chunks.to(wide, memory_format=torch.contiguous_format, copy=True).flatten(0, 1)


def _scatter(chunks: Tensor, out: Tensor, run: _Run) -> None:
    """Write [chunks HV, C, ...] to the tokens of `out` [T, heads, ...], summed over the value heads of a key head."""
    chunks = chunks.unflatten(0, (len(run.tokens) // CHUNK, out.shape[1], -1))
    rows = chunks.sum(2).transpose(1, 2).flatten(0, 1).to(out.dtype)
    if run.kept is None:
        out.index_copy_(0, run.tokens, rows)
    else:
        out.index_copy_(0, run.tokens[run.kept], rows[run.kept])


def _repeat(x: Tensor, group: int) -> Tensor:
    """Every key head once for each of its value heads."""
    return x if group == 1 else x.repeat_interleave(group, dim=0)
