"""The fused gated norm against the float64 reference, on a GPU."""

import pytest
import torch

from qla_megatron.kernels import gated_rms_norm
from qla_megatron.kernels.causal_conv1d import convolve_projection
from qla_megatron.testing.numerics import assert_close

pytestmark = pytest.mark.gpu

TOLERANCES = {torch.bfloat16: 3e-3, torch.float16: 4e-4}  # relative L2 errors: results are rounded once
WIDE = 1e-5  # of the weight's gradient, a float32 sum
D = 128

# Any number of dimensions; odd numbers of heads, one head, less than a tile, several tiles and a rest, rows of a batch.
SHAPES = [(D,), (7, D), (3, 5, D), (1, 1, 1, D), (1, 77, 3, D), (2, 33, 4, D), (1, 5000, 32, D)]


def tensors(shape, dtype=torch.bfloat16, seed=0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, gate, dy = (torch.randn(*shape, generator=generator).to("cuda", dtype) for _ in range(3))
    return [x, gate, torch.randn(D, generator=generator).cuda(), dy]


def gradients(x, gate, weight, dy, zero_centered, **options):
    leaves = [t.detach().requires_grad_() for t in (x, gate, weight)]
    y = gated_rms_norm(*leaves, 1e-3, zero_centered, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients(shape, zero_centered, dtype):
    inputs = tensors(shape, dtype)
    have = gradients(*inputs, zero_centered)
    want = gradients(*(t.double() for t in inputs), zero_centered, backend="reference")
    for name, a, b in zip(("y", "dx", "dgate", "dweight"), have, want, strict=True):
        assert_close(name, a, b, WIDE if name == "dweight" else TOLERANCES[dtype])


@pytest.mark.parametrize("offset", [0, 8, 4, 2])
def test_gate_inside_a_wider_tensor(offset):
    # Rows aligned to 16, 8 and 4 bytes.
    x, _, weight, dy = tensors((1, 40, 2, D))
    wide = torch.randn(1, 40, 2 * D + offset, device="cuda").bfloat16()
    gate = wide[..., offset:].unflatten(-1, (2, D))
    have = gradients(x, gate, weight, dy, True)
    for a, b in zip(have, gradients(x, gate.contiguous(), weight, dy, True), strict=True):
        assert torch.equal(a, b)


def test_misaligned_gate_is_refused():
    x, _, weight, _ = tensors((1, 4, 1, D))
    gate = torch.zeros(1, 4, D + 1, device="cuda").bfloat16()[..., 1:].unflatten(-1, (1, D))
    with pytest.raises(NotImplementedError, match="aligned to 4 bytes"):
        gated_rms_norm(x, gate, weight, 1e-6)


def test_nan_stays_in_its_row():
    x, gate, weight, dy = tensors((1, 40, 3, D))
    clean = gradients(x, gate, weight, dy, False)
    x[:, 11, 1], gate[:, 13, 2] = float("nan"), float("nan")
    have = gradients(x, gate, weight, dy, False)
    rows = [r for r in range(40) if r not in (11, 13)]
    for a, b in zip(have[:3], clean[:3], strict=True):
        assert torch.equal(a[:, rows], b[:, rows])


def test_same_bits_every_time():
    inputs = tensors((1, 3000, 16, D))
    first = gradients(*inputs, True)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(*inputs, True), strict=True))


def layer_like(projected, parameters, norm_weight, rows_first, backend, compile_it=False):
    """Convolution, a stand-in for the rule, norm: the gradients of all that goes in."""
    H, HV = 1, 2

    def loss(projected, norm_weight, *parameters):
        weight, A_log, dt_bias = parameters
        inputs = convolve_projection(
            projected,
            weight,
            None,
            A_log,
            dt_bias,
            key_heads=H,
            value_heads=HV,
            value_dim=D,
            use_qk_l2norm=True,
            backend=backend,
        )
        mixed = inputs.v + (inputs.q * inputs.k) * (inputs.g * inputs.beta)[..., None].to(inputs.v.dtype)
        room = {"room": inputs.room, "room_column": inputs.room_column}
        normed = gated_rms_norm(mixed, inputs.gate, norm_weight, 1e-6, True, **room, backend=backend)
        if inputs.room is not None and not compile_it:
            assert normed.flatten(2).transpose(0, 1).is_contiguous()
        return (normed * rows_first).float().square().sum()

    leaves = [t.detach().clone().requires_grad_() for t in (projected, norm_weight, *parameters)]
    f = torch.compile(loss, fullgraph=True, backend="aot_eager") if compile_it else loss
    value = f(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def layer_inputs():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator).to("cuda", dtype)

    projected = normal(33, 2, 4 * D + 2 * D + 4)
    parameters = [normal(4 * D, 4) / 2, normal(2, dtype=torch.float32), normal(2, dtype=torch.float32)]
    return projected, parameters, normal(D, dtype=torch.float32), normal(2, 33, 2, D)


def test_one_gradient_of_the_projection():
    # The norm's backward pass writes z's columns, the convolution's the others, of a tensor that starts as it may.
    projected, parameters, norm_weight, scale = layer_inputs()
    have = layer_like(projected, parameters, norm_weight, scale, "auto")
    wide = [p.double() for p in parameters]
    want = layer_like(projected.double(), wide, norm_weight.double(), scale.double(), "reference")
    for name, a, b in zip(("loss", "dprojected", "dnorm", "dweight", "dA_log", "ddt_bias"), have, want, strict=True):
        assert_close(name, a, b, 1e-2)  # several roundings to bfloat16 in a row


def test_room_compiles_without_a_graph_break():
    inputs = layer_inputs()
    for a, b in zip(layer_like(*inputs, "auto"), layer_like(*inputs, "auto", compile_it=True), strict=True):
        assert_close("gradient", a, b, 1e-6)


def test_refuses_what_it_does_not_serve():
    x, gate, weight, _ = tensors((4, D))
    with pytest.raises(NotImplementedError, match="V = 128"):
        gated_rms_norm(x[:, :64], gate[:, :64], weight[:64], 1e-6)
    with pytest.raises(NotImplementedError, match="both in float16"):
        gated_rms_norm(x, gate.half(), weight, 1e-6)
    with pytest.raises(ValueError, match="room must be None"):
        gated_rms_norm(x, gate, weight, 1e-6, room=x, backend="reference")
