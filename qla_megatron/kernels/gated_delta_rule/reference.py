"""The gated delta rule in plain torch: the token recurrence (the oracle) and the chunked form that trains on a CPU.

Symbols, shapes and the equations of the chunked form are in README.md beside this file.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..varlen import CHUNK, ChunkLayout

SEGMENT = 128  # chunks x value heads that are worked on at once: bounds the memory of intermediate results


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
    """One token after another, with autograd: the definition of the op, for tests.

    Per document and value head, from S = initial_state (or 0):

        S_t = exp(g_t) S_{t-1};  S_t += beta_t k_t (v_t - S_t^T k_t)^T;  o_t = scale S_t^T q_t

    (Gated Delta Networks, arXiv 2412.06464, equation 10). Computes in float32, in float64 if v is float64.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. g, beta: [B, T, HV]. H divides HV.
        scale: of the outputs; K ** -0.5 if None.
        initial_state: [N, HV, K, V], N = B or the number of documents.
        cu_seqlens: [N+1] offsets of documents, with B = 1.

    Returns:
        o [B, T, HV, V] in v's dtype, 0 after the last document's end, and the final states [N, HV, K, V].
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    group = v.shape[2] // q.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if cu_seqlens is None:
        documents = [(b, 0, q.shape[1]) for b in range(q.shape[0])]
    else:
        offsets = cu_seqlens.tolist()
        documents = [(0, start, end) for start, end in zip(offsets, offsets[1:], strict=False)]
    rows = [[torch.zeros_like(v[b, :0], dtype=wide)] for b in range(q.shape[0])]
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
            rows[b].append(scale * torch.einsum("hkv,hk->hv", S, q_t)[None])
        states.append(S)
    for b in range(q.shape[0]):
        rows[b].append(v.new_zeros(q.shape[1] - sum(map(len, rows[b])), *v.shape[2:], dtype=wide))
    return torch.stack([torch.cat(row) for row in rows]).to(v.dtype), torch.stack(states)


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
        state: [N, HV, K, V] in the layout's order of documents: the initial states, and afterwards the final ones.
        inverses, starts: filled with what the backward pass needs of every chunk: X [chunks, HV, C, C] and the state at
            its start [chunks, HV, K, V].
        layout: the chunks of these tokens.
    """
    o = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for rows, steps in _segments(layout, v.shape[1]):
        c = _load(q, k, v, g, beta, scale, layout.tokens[rows], layout.is_token[rows], state.dtype)
        X = inverses[rows] = _inverse(c.beta * c.gated_kk)
        vd = X @ (c.beta * c.v)
        read = X @ (c.beta * c.decay * c.k)
        write = (c.rest * c.k).mT
        for at, active in steps:
            S = state[:active]
            starts[rows][at] = S
            vd[at] -= read[at] @ S
            S.mul_(c.total[at]).add_(write[at] @ vd[at])
        out = (c.decay * c.q) @ starts[rows] + c.gated_qk @ vd
        _scatter(out, o, layout, rows)
    return o


def chunked_backward(
    do: Tensor,
    dstate: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    inverses: Tensor,
    starts: Tensor,
    *,
    scale: float,
    layout: ChunkLayout,
) -> list[Tensor]:
    """Gradients of q, k, v, g, beta.

    `dstate` [N, HV, K, V], in the layout's order, is the gradient of the final states, and afterwards that of the initial
    ones; the other arguments are those of the forward pass.
    """
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta)]
    for rows, steps in reversed(list(_segments(layout, v.shape[1]))):
        c = _load(q, k, v, g, beta, scale, layout.tokens[rows], layout.is_token[rows], dstate.dtype)
        X, S = inverses[rows], starts[rows]
        dO = _gather(do, layout.tokens[rows], layout.is_token[rows], dstate.dtype)
        read = X @ (c.beta * c.decay * c.k)
        dvd = c.gated_qk.mT @ dO
        dS = (c.decay * c.q).mT @ dO
        rest_k = c.rest * c.k
        dS_end = torch.empty_like(S)
        for at, active in reversed(steps):
            carried = dstate[:active]
            dS_end[at] = carried
            dvd[at] += rest_k[at] @ carried
            carried.mul_(c.total[at]).add_(dS[at]).sub_(read[at].mT @ dvd[at])
        for grad, part in zip(grads, _chunk_gradients(c, X, S, dO, dvd, dS_end, scale), strict=True):
            _scatter(part, grad, layout, rows)
    return grads


@dataclass(frozen=True)
class _Chunks:
    """Chunks of one segment, [chunks, HV, C, ...] in the wide dtype; rows that hold no token are 0."""

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


def _load(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    tokens: Tensor,
    is_token: Tensor,
    wide: torch.dtype,
) -> _Chunks:
    group = v.shape[1] // q.shape[1]
    Q, K, V, a, b = (_gather(x, tokens, is_token, wide) for x in (q, k, v, g, beta))
    Q = Q * scale
    # A gate whose exponential is 0 may as well be the largest such: long sums then keep their low bits.
    lowest = -746.0 if wide == torch.float64 else -104.0
    total = a.clamp_min(lowest).double().cumsum(-1)
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    G = (total[..., :, None] - total[..., None, :]).to(wide).masked_fill_(above, float("-inf")).exp_()
    decay = total.to(wide).exp()[..., None]
    return _Chunks(
        q=_to_value_heads(Q, group),
        k=_to_value_heads(K, group),
        v=V,
        beta=b[..., None],
        decay=decay,
        rest=G[..., -1, :, None],
        total=decay[..., -1:, :],
        G=G,
        gated_qk=_to_value_heads(Q @ K.mT, group) * G,
        gated_kk=(_to_value_heads(K @ K.mT, group) * G).tril_(-1),
    )


def _chunk_gradients(
    c: _Chunks, X: Tensor, S: Tensor, dO: Tensor, dvd: Tensor, dS_end: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg, dbeta of the chunks, all per value head, once the states' gradients are known."""
    U = c.k @ S
    W = c.v - c.decay * U
    vd = X @ (c.beta * W)
    dY = X.mT @ dvd
    dL = (dY @ vd.mT).tril_(-1).neg_()
    dW = c.beta * dY
    dbeta = (dY * W).sum(-1) + (dL * c.gated_kk).sum(-1)

    dU = -c.decay * dW
    dP = dO @ vd.mT
    dq_state = c.decay * (dO @ S.mT)
    dk_state = c.rest * (vd @ dS_end.mT)
    dL *= c.beta
    by_gate = dP * c.gated_qk + dL * c.gated_kk
    dP *= c.G
    dL *= c.G
    dq = dq_state + dP @ c.k
    dk = dk_state + dU @ S.mT + dP.mT @ c.q + (dL + dL.mT) @ c.k

    to_end = (c.k * dk_state).sum(-1)
    da = (dU * U).sum(-1) + (c.q * dq_state).sum(-1) - to_end + by_gate.sum(-1) - by_gate.sum(-2)
    da[..., -1] += to_end.sum(-1) + (c.total * dS_end * S).sum((-2, -1))
    return dq * scale, dk, dW, da.flip(-1).cumsum(-1).flip(-1), dbeta


def _segments(layout: ChunkLayout, heads: int) -> Iterator[tuple[slice, list[tuple[slice, int]]]]:
    """Runs of chunks to work on at once: their rows, and for every step its rows within the run and its active documents."""
    first, end = 0, 0
    steps: list[tuple[slice, int]] = []
    for active in layout.active:
        steps.append((slice(end - first, end - first + active), active))
        end += active
        if (end - first) * heads >= SEGMENT:
            yield slice(first, end), steps
            first, steps = end, []
    if steps:
        yield slice(first, end), steps


def _inverse(L: Tensor) -> Tensor:
    """(I + L)^-1 of strictly lower triangular matrices."""
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return torch.linalg.solve_triangular(L, eye.expand_as(L), upper=False, unitriangular=True)


def _gather(x: Tensor, tokens: Tensor, is_token: Tensor, wide: torch.dtype) -> Tensor:
    """[T, heads, ...] -> [chunks, heads, C, ...] with 0 where there is no token."""
    rows = x.index_select(0, tokens.flatten()).to(wide)
    rows = rows.masked_fill_(~is_token.flatten().view(-1, *[1] * (x.dim() - 1)), 0)
    return rows.unflatten(0, tokens.shape).transpose(1, 2).contiguous()


def _scatter(chunks: Tensor, out: Tensor, layout: ChunkLayout, rows: slice) -> None:
    """Write [chunks, HV, C, ...] to the tokens of `out` [T, heads, ...], summed over the value heads of a key head."""
    heads = out.shape[1]
    if heads != chunks.shape[1]:
        chunks = chunks.unflatten(1, (heads, -1)).sum(2)
    is_token = layout.is_token[rows]
    out[layout.tokens[rows][is_token]] = chunks.transpose(1, 2)[is_token].to(out.dtype)


def _to_value_heads(x: Tensor, group: int) -> Tensor:
    return x if group == 1 else x.repeat_interleave(group, dim=1)
