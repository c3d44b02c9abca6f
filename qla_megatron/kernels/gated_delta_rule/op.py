"""The public functions of the gated delta rule: validate, apply defaults, dispatch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..backend import BACKENDS, choose_backend
from ..checks import (
    check_bool,
    check_choice,
    check_dtype,
    check_heads,
    check_number,
    check_offsets,
    check_same_device,
    check_same_dtype,
    check_shape,
)
from ..varlen import CHUNK, valid_tokens
from .autograd import backward_op, forward_op

L2_NORM_EPS = 1e-6


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = CHUNK,
    auto_cp: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule (Gated Delta Networks, arXiv 2412.06464, equation 10), differentiable, deterministic.

    Per document and value head, from S = initial_state (or 0):

        S_t = exp(g_t) S_{t-1};  S_t += beta_t k_t (v_t - S_t^T k_t)^T;  o_t = scale S_t^T q_t

    Names, order, shapes, defaults and meaning of the parameters are those of flash-linear-attention 0.6. Value head h
    reads key head h // (HV / H). Tokens after the last document's end get outputs and gradients of exactly 0, whatever
    they hold.

    Args:
        q, k: [B, T, H, K] in bfloat16, float16, float32 or float64. For the kernels keys must be shorter than 255.
        v: [B, T, HV, V] in the same dtype; H divides HV.
        g: [B, T, HV] natural logarithm of the decay, at most 0. Any of these dtypes; converted to float32 (float64 if v
            is float64) before anything is summed. Better computed in float32: rounding a weak decay to 16 bits adds
            up over long documents.
        beta: [B, T, HV] strength of the writes; converted like g.
        scale: of the outputs; K ** -0.5 if None.
        initial_state: [N, HV, K, V], N = B, or the number of documents; converted like g. None is 0.
        output_final_state: whether to return the state after each document's last token.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares over K + 1e-6) first.
        use_beta_sigmoid_in_kernel: `beta` holds logits, sigmoid(beta) is used.
        allow_neg_eigval: 2 sigmoid(beta) is used; only with `use_beta_sigmoid_in_kernel`.
        state_v_first: the states, in and out, are [N, HV, V, K].
        cu_seqlens: [N+1] int32 or int64, on q's device: offsets of documents packed into one row (B = 1). They start at
            0 and don't decrease; a document may be empty; the last may be less than T.
        cu_seqlens_cpu: a copy of cu_seqlens on the host. Saves the reference a read of the device; the kernels never
            read one, so that only with this copy are the offsets' values checked.
        chunk_indices: accepted for compatibility and not needed.
        cp_context: not supported: context parallelism exchanges heads in the layer.
        use_gate_in_kernel: `g` holds raw values, -exp(A_log) softplus(g + dt_bias) in float32 is used.
        A_log: [HV]; with `use_gate_in_kernel`, required.
        dt_bias: [HV]; with `use_gate_in_kernel`, optional.
        chunk_size: 64.
        auto_cp: let the kernels split long documents over the multiprocessors of one device; the result is the same up
            to rounding. Without effect as yet: nothing is split.
        backend: "reference" (plain torch, any device, any K and V), "tilelang" (fused kernels for Hopper: K = V = 128,
            bfloat16 or float16), or "auto": the reference for CPU tensors, the kernels for CUDA
            tensors. No backend stands in for another.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states [N, HV, K, V] in float32 (float64 if v is float64), or None.

    Raises:
        ValueError: a shape, device or value doesn't fit. TypeError: a type or dtype doesn't fit.
        NotImplementedError: cp_context, a chunk_size other than 64, or what the backend doesn't serve.
    """
    for name, value in (
        ("output_final_state", output_final_state),
        ("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel),
        ("use_beta_sigmoid_in_kernel", use_beta_sigmoid_in_kernel),
        ("allow_neg_eigval", allow_neg_eigval),
        ("state_v_first", state_v_first),
        ("use_gate_in_kernel", use_gate_in_kernel),
        ("auto_cp", auto_cp),
    ):
        check_bool(name, value)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True, got False")
    _check_supported(cp_context, chunk_size)
    _check_inputs(q, k, v, g, beta, cu_seqlens, cu_seqlens_cpu)
    _check_gate(use_gate_in_kernel, A_log, dt_bias, v)
    scale = _check_scale(scale, q)
    if initial_state is not None:
        _check_state("initial_state", initial_state, q, v, cu_seqlens, state_v_first)
        initial_state = initial_state.mT if state_v_first else initial_state
    check_choice("backend", backend, BACKENDS)
    inputs = (q, k, v, g, beta, initial_state, A_log, dt_bias)
    needs_gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    backend = choose_backend(backend, q.device)

    wide = torch.promote_types(v.dtype, torch.float32)
    if cu_seqlens is not None:
        # Not even NaN beyond the last document reaches a gradient: what is transformed below is cut off first.
        valid = valid_tokens(cu_seqlens, q.shape[1])[None, :, None]
        if use_qk_l2norm_in_kernel:
            q, k = (x.where(valid[..., None], 0) for x in (q, k))
        beta = beta.where(valid, 0) if use_beta_sigmoid_in_kernel else beta
        g = g.where(valid, 0) if use_gate_in_kernel else g
    if use_qk_l2norm_in_kernel:
        q, k = _l2_normalise(q), _l2_normalise(k)
    beta, g = beta.to(wide), g.to(wide)
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    if A_log is not None:
        g = -A_log.to(wide).exp() * softplus(g if dt_bias is None else g + dt_bias.to(wide))
    o, final_state, *_ = forward_op(
        q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu, scale, backend, needs_gradients
    )
    if not output_final_state:
        return o, None
    return o, final_state.mT if state_v_first else final_state


@dataclass(frozen=True)
class Saved:
    """What `chunk_gated_delta_rule_fwd` leaves to `chunk_gated_delta_rule_bwd`: its inputs and results per chunk."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None
    inverses: Tensor
    gates: Tensor
    states: Tensor
    scale: float
    backend: str


@dataclass(frozen=True)
class Gradients:
    """Gradients of the inputs of the same names: dtype and shape are the input's; None where the input was None."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dinitial_state: Tensor | None


@torch.no_grad()
def chunk_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    plan: None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None, Saved]:
    """The forward pass without autograd, for callers with a backward pass of their own.

    Arguments are those of `chunk_gated_delta_rule`, save that nothing is transformed, that g, beta and initial_state
    must be float32 (float64 if v is float64), and that states are [N, HV, K, V].

    Args:
        plan: how kernels split documents; None, as they don't yet.

    Returns:
        o [B, T, HV, V], the final states or None, and what `chunk_gated_delta_rule_bwd` needs.
    """
    check_bool("output_final_state", output_final_state)
    _check_inputs(q, k, v, g, beta, cu_seqlens, cu_seqlens_cpu)
    wide = torch.promote_types(v.dtype, torch.float32)
    check_dtype("g", g, (wide,))
    check_dtype("beta", beta, (wide,))
    if initial_state is not None:
        _check_state("initial_state", initial_state, q, v, cu_seqlens)
        check_dtype("initial_state", initial_state, (wide,))
    scale = _check_scale(scale, q)
    check_choice("backend", backend, BACKENDS)
    backend = choose_backend(backend, q.device)
    if plan is not None:
        raise NotImplementedError(f"plan must be None: documents are not split yet, got {plan!r}")
    o, final_state, inverses, gates, states = forward_op(
        q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu, scale, backend, True
    )
    inputs = (q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu)
    saved = Saved(*inputs, inverses, gates, states, scale, backend)
    return o, final_state if output_final_state else None, saved


@torch.no_grad()
def chunk_gated_delta_rule_bwd(do: Tensor | None, dht: Tensor | None, saved: Saved) -> Gradients:
    """The backward pass.

    Args:
        do: [B, T, HV, V] gradient of o; None is 0.
        dht: [N, HV, K, V] gradient of the final states; None is 0.
        saved: what the forward pass returned; it may be used again.
    """
    if not isinstance(saved, Saved):
        raise TypeError(f"saved must be what chunk_gated_delta_rule_fwd returned, got {type(saved).__name__}")
    B, T, HV, V = saved.v.shape
    if do is not None:
        check_shape("do", do, B=B, T=T, HV=HV, V=V)
        check_dtype("do", do)
        check_same_device("do", do, "v", saved.v)
    if dht is not None:
        _check_state("dht", dht, saved.q, saved.v, saved.cu_seqlens)
    s = saved
    kept = (s.inverses, s.gates, s.states, s.cu_seqlens, s.cu_seqlens_cpu)
    dq, dk, dv, dg, dbeta, dinitial_state = backward_op(do, dht, s.q, s.k, s.v, s.g, s.beta, *kept, s.scale, s.backend)
    return Gradients(dq, dk, dv, dg, dbeta, None if s.initial_state is None else dinitial_state)


def _check_supported(cp_context: Any, chunk_size: int) -> None:
    if cp_context is not None:
        raise NotImplementedError(
            "cp_context must be None: this op works on whole documents (qla_megatron.layers.GatedDeltaNet exchanges "
            f"heads for context parallelism), got {type(cp_context).__name__}"
        )
    if chunk_size != CHUNK:
        raise NotImplementedError(f"chunk_size must be {CHUNK}, got {chunk_size!r}")


def _check_gate(use_gate_in_kernel: bool, A_log: Tensor | None, dt_bias: Tensor | None, v: Tensor) -> None:
    if use_gate_in_kernel and A_log is None:
        raise ValueError("A_log must be given with use_gate_in_kernel=True, got None")
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is not None:
            if not use_gate_in_kernel:
                raise ValueError(f"{name} needs use_gate_in_kernel=True, got False")
            check_shape(name, x, HV=v.shape[2])
            check_dtype(name, x)
            check_same_device(name, x, "v", v)


def _check_scale(scale: float | None, q: Tensor) -> float:
    if scale is None:
        return q.shape[-1] ** -0.5
    check_number("scale", scale)
    return float(scale)


def _check_inputs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None
) -> None:
    check_shape("q", q, B=None, T=None, H=None, K=None)
    B, T, H, K = q.shape
    if K == 0:
        raise ValueError("q must have shape [B, T, H, K] with K >= 1, got K=0")
    check_shape("k", k, B=B, T=T, H=H, K=K)
    check_shape("v", v, B=B, T=T, HV=None, V=None)
    check_heads(H, v.shape[2])
    check_dtype("q", q)
    for name, x in (("k", k), ("v", v)):
        check_same_dtype(name, x, "q", q)
        check_same_device(name, x, "q", q)
    for name, x in (("g", g), ("beta", beta)):
        check_shape(name, x, B=B, T=T, HV=v.shape[2])
        check_dtype(name, x)
        check_same_device(name, x, "q", q)
    check_offsets(cu_seqlens, B, "q", q, cu_seqlens_cpu)


def _check_state(
    name: str, state: Tensor, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, is_v_first: bool = False
) -> None:
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    sizes = {"N": N, "HV": v.shape[2], "K": q.shape[-1], "V": v.shape[-1]}
    check_shape(name, state, **{letter: sizes[letter] for letter in ("N", "HV", *("VK" if is_v_first else "KV"))})
    check_dtype(name, state)
    check_same_device(name, state, "q", q)


def _l2_normalise(x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_NORM_EPS)).to(x.dtype)
