"""The gated norm against its formula, row by row in float64."""

import re

import pytest
import torch

from qla_megatron.kernels import gated_rms_norm
from qla_megatron.testing.numerics import assert_close

TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def leaves(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 4, 8), (2, 3, 4, 8), (8,)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def naive(x, gate, weight, eps, zero_centered):
    rows = []
    for row, z in zip(x.reshape(-1, 8), gate.reshape(-1, 8), strict=True):
        normed = row / ((row * row).sum() / 8 + eps) ** 0.5
        rows.append(normed * (weight + 1 if zero_centered else weight) * z / (1 + (-z).exp()))
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_outputs_and_gradients(dtype, zero_centered):
    inputs = leaves(dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    y, want = gated_rms_norm(*inputs, 1e-3, zero_centered), naive(*exact, 1e-3, zero_centered)
    assert y.dtype == dtype
    assert_close("y", y, want, TOLERANCES[dtype])
    have, want = torch.autograd.grad(y.sum(), inputs), torch.autograd.grad(want.sum(), exact)
    for name, a, b in zip(("dx", "dgate", "dweight"), have, want, strict=True):
        assert_close(name, a, b, TOLERANCES[dtype])


def test_small_weight_of_a_zero_centred_norm_survives():
    # 1 + 1e-3 is 1 in bfloat16.
    x = torch.ones(1, 8)
    weight = torch.full((8,), 1e-3, dtype=torch.bfloat16)
    one = torch.zeros(8, dtype=torch.bfloat16)
    assert (gated_rms_norm(x, x, weight, 0.0, True) > gated_rms_norm(x, x, one, 0.0, True)).all()


BAD = [
    ({"x": torch.zeros(2, 7)}, ValueError, "x must have shape [..., V] with V=8, got (2, 7)"),
    ({"x": torch.zeros(())}, ValueError, "x must have shape [..., V] with V=8, got ()"),
    ({"gate": torch.zeros(3, 8)}, ValueError, "gate must have the shape of x, (2, 8), got (3, 8)"),
    ({"gate": None}, TypeError, "gate must be a torch.Tensor, got NoneType"),
    ({"weight": torch.zeros(8).int()}, TypeError, "weight must be bfloat16"),
    ({"eps": None}, TypeError, "eps must be a number, got NoneType"),
    ({"zero_centered": 1}, TypeError, "zero_centered must be a bool, got 1"),
]


@pytest.mark.parametrize(("change", "error", "text"), BAD, ids=[text[:40] for _, _, text in BAD])
def test_bad_input(change, error, text):
    good = {"x": torch.zeros(2, 8), "gate": torch.zeros(2, 8), "weight": torch.zeros(8), "eps": 1e-6}
    with pytest.raises(error, match=re.escape(text)):
        gated_rms_norm(**good | change)
