"""The causal convolution against a loop over tokens in float64."""

import re
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from qla_megatron.kernels import causal_conv1d
from qla_megatron.testing.numerics import assert_close

TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}

# (offsets or None, tokens, rows): documents shorter than the window, empty at the front, in the middle and at the end,
# a tail; rows of a batch, among them rows shorter than the window.
LAYOUTS = [
    (None, 11, 2),
    (None, 1, 3),
    (None, 2, 1),
    ((0, 0, 1, 3, 3, 6, 17, 17), 20, 1),
    ((0, 9), 9, 1),
    ((0, 0), 2, 1),
]


def naive(x: Tensor, weight: Tensor, bias: Tensor | None, is_silu: bool, state: Tensor | None, offsets) -> tuple:
    """One document after another: its history in front, then a window at every token."""
    D, W = weight.shape
    spans = [(b, 0, x.shape[1]) for b in range(x.shape[0])]
    if offsets is not None:
        spans = [(0, start, end) for start, end in pairwise(offsets)]
    y, finals = x * 0, []
    for n, (b, start, end) in enumerate(spans):
        history = x.new_zeros(W - 1, D) if state is None else state[n].T
        rows = torch.cat([history, x[b, start:end]])
        for t in range(start, end):
            window = rows[t - start : t - start + W]
            value = (window * weight.T).sum(0) + (0 if bias is None else bias)
            y = y.index_put((torch.tensor(b), torch.tensor(t)), silu(value) if is_silu else value)
        finals.append(rows[len(rows) - (W - 1) :].T)
    return y, torch.stack(finals)


def leaves(offsets, tokens: int, rows: int, width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    documents = rows if offsets is None else len(offsets) - 1
    shapes = [(rows, tokens, 5), (5, width), (5,), (documents, 5, width - 1)]
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("width", [4, 2, 1])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("is_silu", [True, False])
def test_outputs_states_and_gradients(layout, width, is_silu):
    offsets, tokens, rows = layout
    x, weight, bias, state = inputs = leaves(offsets, tokens, rows, width)
    cu = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    activation = "silu" if is_silu else None
    have = causal_conv1d(x, weight, bias, activation, state, output_final_state=True, cu_seqlens=cu)
    want = naive(x, weight, bias, is_silu, state, offsets)
    loss = [torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) for y in want]
    for name, a, b in zip(("y", "final_state"), have, want, strict=True):
        assert_close(name, a, b, 1e-13)
    for name, a, b in zip(
        ("dx", "dweight", "dbias", "dstate"),
        torch.autograd.grad(have, inputs, loss, materialize_grads=True),
        torch.autograd.grad([y for y in want if y.requires_grad], inputs, loss, materialize_grads=True),
        strict=True,
    ):
        assert_close(name, a, b, 1e-13)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_dtypes(dtype):
    offsets = (0, 3, 20)
    x, weight, bias, _ = (t.detach().to(dtype) for t in leaves(offsets, 20, 1, 4))
    y, state = causal_conv1d(x, weight, bias, cu_seqlens=torch.tensor(offsets))
    assert y.dtype == dtype
    assert state is None
    want, _ = naive(x.double(), weight.double(), bias.double(), True, None, offsets)
    assert_close("y", y, want, TOLERANCES[dtype])


def test_nan_stays_where_it_is():
    # In the tail it reaches nothing; in a document only that document, and weights, which see it, too.
    offsets = (0, 4, 9)
    x, weight, bias, _ = leaves(offsets, 12, 1, 4)
    with torch.no_grad():
        x[:, 9:] = float("nan")
    y, _ = causal_conv1d(x, weight, bias, cu_seqlens=torch.tensor(offsets))
    grads = torch.autograd.grad(y.sum(), [x, weight, bias])
    assert (y[:, 9:] == 0).all()
    assert (grads[0][:, 9:] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)
    with torch.no_grad():
        x[:, 3] = float("nan")
    y, _ = causal_conv1d(x, weight, bias, cu_seqlens=torch.tensor(offsets))
    assert y[:, 4:].isfinite().all()


def test_two_pieces_equal_the_whole():
    x, weight, bias, _ = leaves(None, 13, 2, 4)
    whole, end = causal_conv1d(x, weight, bias, output_final_state=True)
    first, state = causal_conv1d(x[:, :2], weight, bias, output_final_state=True)
    second, end2 = causal_conv1d(x[:, 2:], weight, bias, initial_state=state, output_final_state=True)
    assert_close("y", torch.cat([first, second], dim=1), whole, 1e-14)
    assert torch.equal(end, end2)


BAD = [
    ({"x": torch.zeros(3, 5)}, ValueError, "x must have shape [B, T, D], got (3, 5)"),
    ({"x": torch.zeros(1, 3, 5).int()}, TypeError, "x must be bfloat16"),
    ({"weight": torch.zeros(5, 1, 4)}, ValueError, "weight must have shape [D, W] with D=5, got (5, 1, 4)"),
    ({"weight": torch.zeros(5, 0)}, ValueError, "W >= 1"),
    ({"bias": torch.zeros(4)}, ValueError, "bias must have shape [D] with D=5, got (4,)"),
    ({"activation": "gelu"}, ValueError, "activation must be 'silu' or 'swish' or None, got 'gelu'"),
    ({"initial_state": torch.zeros(1, 5, 4)}, ValueError, "[N, D, W-1] with N=1, D=5, W-1=3, got (1, 5, 4)"),
    ({"output_final_state": None}, TypeError, "output_final_state must be a bool"),
    ({"cu_seqlens": torch.tensor([0.0, 3])}, TypeError, "cu_seqlens must be int32 or int64"),
    ({"cu_seqlens": torch.tensor([1, 3])}, ValueError, "cu_seqlens must start at 0, got 1"),
    ({"cu_seqlens": torch.tensor([0, 3, 2])}, ValueError, "cu_seqlens must not decrease, got 3 then 2"),
    ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "cu_seqlens must end at or before T=3, got 4"),
    ({"x": torch.zeros(2, 3, 5), "cu_seqlens": torch.tensor([0, 3])}, ValueError, "x must have B=1, got B=2"),
]


@pytest.mark.parametrize(("change", "error", "text"), BAD, ids=[text[:40] for _, _, text in BAD])
def test_bad_input(change, error, text):
    good = {"x": torch.zeros(1, 3, 5), "weight": torch.zeros(5, 4)}
    with pytest.raises(error, match=re.escape(text)):
        causal_conv1d(**good | change)
