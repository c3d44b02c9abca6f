"""The ops around the fused kernels, on a CPU, with the reference in the kernels' place: how gradients find their way.

The norm's backward pass makes the gradient of in_proj's output and writes z's columns, the convolution's writes the
others: into the same memory, which starts full of NaN here.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch import Tensor

from qla_megatron.kernels import gated_rms_norm
from qla_megatron.kernels.causal_conv1d import autograd as convolution_ops
from qla_megatron.kernels.causal_conv1d import convolve_projection, reference
from qla_megatron.kernels.gated_norm import autograd as norm_ops
from qla_megatron.kernels.gated_norm import reference as norm_reference
from qla_megatron.testing.numerics import assert_close

D, H, HV = 128, 1, 2
CHANNELS, Z = D * (2 * H + HV), D * HV
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
ROUNDING = {"q": 3e-3, "gradients": 1e-2}  # relative L2 errors of bfloat16, of one and of several roundings in a row


def with_autograd(f):
    """Run in a thread of its own: inside an op, autograd is switched off for the thread that runs it."""

    @functools.wraps(f)
    def run(*args):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.enable_grad()(f), *args).result()

    return run


def _results(p, projected, parameters):
    weight, bias, A_log, dt_bias, state = parameters
    return reference.convolve_projection(
        *(projected, weight, bias, A_log, dt_bias, p.key_heads, p.value_heads, Z, p.l2norm_eps),
        *(state, True, p.cu_seqlens),
    )


def convolve(p) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() for x in _results(p, p.projected, _parameters(p))[:5])


def _parameters(p) -> tuple[Tensor | None, ...]:
    return p.weight, p.bias, p.A_log, p.dt_bias, p.initial_state


@with_autograd
def convolve_backward(p, dq, dk, dv, dg, dbeta, dfinal, dprojected, needs_dstate) -> tuple[Tensor, ...]:
    leaves = [None if x is None else x.detach().requires_grad_() for x in (p.projected, *_parameters(p))]
    outputs, grads = list(_results(p, leaves[0], leaves[1:])), [dq, dk, dv, dg, dbeta, dfinal]
    if dfinal is None:
        outputs, grads = outputs[:5], grads[:5]
    present = [x for x in leaves if x is not None]
    made = dict(zip(map(id, present), torch.autograd.grad(outputs, present, grads, allow_unused=True), strict=True))
    dx, *parameters, dstate = (None if x is None else made[id(x)] for x in leaves)
    for columns in (slice(0, CHANNELS), slice(CHANNELS + Z, None)):
        dprojected[..., columns] = dx[..., columns]
    dweight, dbias, dA_log, ddt_bias = parameters
    dbias = torch.empty(0, dtype=dweight.dtype) if dbias is None else dbias
    dgates = torch.stack([dA_log, ddt_bias]).float()
    return dweight, dbias, dgates, dstate if needs_dstate else p.projected.new_empty(0, CHANNELS, 3)


def normalise(x, gate, weight, eps, zero_centered, y) -> None:
    y.copy_(norm_reference.gated_rms_norm(x, gate, weight, eps, zero_centered))


@with_autograd
def normalise_backward(dy, x, gate, weight, eps, zero_centered, dx, dgate) -> Tensor:
    leaves = [t.detach().requires_grad_() for t in (x, gate, weight)]
    y = norm_reference.gated_rms_norm(*leaves, eps, zero_centered)
    for target, value in zip((dx, dgate), torch.autograd.grad(y, leaves, dy)[:2], strict=True):
        target.copy_(value)
    y = norm_reference.gated_rms_norm(*leaves, eps, zero_centered)
    return torch.autograd.grad(y, leaves[2], dy)[0].float()


@pytest.fixture(autouse=True)
def stand_ins():
    from qla_megatron.kernels.causal_conv1d import convolve as forward_module
    from qla_megatron.kernels.causal_conv1d import convolve_backward as backward_module
    from qla_megatron.kernels.gated_norm import normalise as norm_module

    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # what is allocated is filled with NaN
    with (
        mock.patch("qla_megatron.kernels.causal_conv1d.op.choose_backend", _choose),
        mock.patch("qla_megatron.kernels.gated_norm.op.choose_backend", _choose),
        mock.patch.object(forward_module, "convolve", convolve),
        mock.patch.object(backward_module, "convolve_backward", convolve_backward),
        mock.patch.object(norm_module, "normalise", normalise),
        mock.patch.object(norm_module, "normalise_backward", normalise_backward),
    ):
        yield
    torch.use_deterministic_algorithms(False)


def _choose(backend, device):
    return "reference" if backend == "reference" else "tilelang"


def make(seed=0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype=torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    wide = torch.float32
    return {
        "projected": normal(21, 2, CHANNELS + Z + 2 * HV),
        "weight": normal(CHANNELS, 4),
        "A_log": normal(HV, dtype=wide),
        "dt_bias": normal(HV, dtype=wide),
        "initial_state": normal(2, CHANNELS, 3),
        "norm": normal(D, dtype=wide),
    }


def mix(leaves: dict[str, Tensor], backend: str, with_norm=True, with_rule=True) -> Tensor:
    """Convolution, a stand-in for the rule, norm."""
    out = convolve_projection(
        leaves["projected"],
        leaves["weight"],
        None,
        leaves["A_log"],
        leaves["dt_bias"],
        key_heads=H,
        value_heads=HV,
        value_dim=D,
        use_qk_l2norm=True,
        initial_state=leaves["initial_state"],
        backend=backend,
    )
    mixed = out.v + (out.q * out.k) * (out.g * out.beta)[..., None].to(out.v.dtype)
    if not with_norm:
        return mixed.float().square().sum()
    mixed = mixed if with_rule else mixed.detach()
    room = {"room": out.room, "room_column": out.room_column}
    normed = gated_rms_norm(mixed, out.gate, leaves["norm"], 1e-6, True, **room, backend=backend)
    return (normed.float() * torch.linspace(-1, 2, D)).square().sum()


@pytest.mark.parametrize(("with_norm", "with_rule"), [(True, True), (False, True), (True, False)])
def test_one_gradient_of_the_projection(with_norm, with_rule):
    results = []
    for backend in ("auto", "reference"):
        leaves = make()
        loss = mix(leaves, backend, with_norm, with_rule)
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        results.append(dict(zip(leaves, grads, strict=True)))
    for name, want in results[1].items():
        assert results[0][name].dtype == want.dtype
        assert_close(name, results[0][name], want, ROUNDING["gradients"])


def test_room_takes_no_memory_and_the_result_has_tokens_first():
    leaves = make()
    out = convolve_projection(
        *(leaves["projected"], leaves["weight"], None, leaves["A_log"], leaves["dt_bias"]),
        key_heads=H,
        value_heads=HV,
        value_dim=D,
    )
    assert out.room.shape == leaves["projected"].shape
    assert out.room.untyped_storage().nbytes() == 2
    assert out.gate.data_ptr() == leaves["projected"][..., CHANNELS:].data_ptr()
    normed = gated_rms_norm(out.v, out.gate, leaves["norm"], 1e-6, room=out.room, room_column=out.room_column)
    assert normed.flatten(2).transpose(0, 1).is_contiguous()


def test_compiles_without_a_graph_break():
    results = []
    for f in (mix, torch.compile(mix, fullgraph=True, backend="aot_eager")):
        leaves = make()
        results.append(torch.autograd.grad(f(leaves, "auto"), list(leaves.values())))
    for name, a, b in zip(make(), *results, strict=True):
        assert torch.equal(a, b), name


def test_opcheck():
    leaves = make()
    arguments = [leaves[n] for n in ("projected", "weight", "A_log", "dt_bias", "initial_state")]
    projected, weight, A_log, dt_bias, state = arguments
    forward = (projected, weight, None, A_log, dt_bias, state, None, H, HV, True, 1e-6, True)
    # Compiling is tested above: opcheck would compare the room's values, of which there are none.
    torch.library.opcheck(convolution_ops.forward_op, forward, test_utils=OPCHECKS[:3])
    out = convolution_ops.forward_op(*(x.detach() if isinstance(x, Tensor) else x for x in forward))
    backward = (torch.zeros_like(projected), *out[:5], out[5], *forward[:11], True)
    backward = tuple(x.detach() if isinstance(x, Tensor) else x for x in backward)
    torch.library.opcheck(convolution_ops.backward_op, backward, test_utils=OPCHECKS)
    gate = projected.detach().transpose(0, 1)[..., CHANNELS : CHANNELS + Z].unflatten(-1, (HV, D))
    v, room = out[2].detach().requires_grad_(), out[6].detach().requires_grad_()
    for room_or_not, checks in ((room, OPCHECKS[:3]), (None, OPCHECKS)):
        arguments = (v, gate.clone().requires_grad_(), leaves["norm"], room_or_not, CHANNELS, 1e-6, True)
        torch.library.opcheck(norm_ops.forward_op, arguments, test_utils=checks)
    dgate, v, norm = torch.zeros_like(gate), v.detach(), leaves["norm"].detach()
    torch.library.opcheck(norm_ops.backward_op, (dgate, v, v, gate, norm, 1e-6, True), test_utils=OPCHECKS)
