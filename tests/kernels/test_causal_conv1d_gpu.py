"""The fused convolution, with norms and gates, against the float64 reference, on a GPU."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from qla_megatron.kernels import causal_conv1d
from qla_megatron.kernels.causal_conv1d import convolve_projection
from qla_megatron.testing.numerics import assert_close

pytestmark = pytest.mark.gpu

# Relative L2 errors: results are rounded once (2^-9 and 2^-12 at most), sums are made in float32.
TOLERANCES = {torch.bfloat16: 3e-3, torch.float16: 4e-4}
WIDE = 2e-5  # of float32 results: the inputs are exact, exponentials and divisions are those of fast math
D = 128

# (offsets or None, tokens, rows). One row: a token, less than a window, less than a tile of 16, tiles and a rest; rows
# of a batch; documents shorter than the window, empty ones at the front, in the middle and at the end, borders at and
# around tiles, with a tail and without; all tail.
LAYOUTS = [
    (None, 1, 1),
    (None, 2, 3),
    (None, 15, 1),
    (None, 77, 2),
    ((0, 0, 1, 3, 3, 6, 17, 17, 37, 39, 40, 40), 45, 1),
    ((0, 16, 18, 32, 35, 48, 49, 63, 80), 80, 1),
    ((0, 1, 2, 3, 4, 5, 21, 34), 34, 1),
    ((0, 0), 20, 1),
]
# Key heads and value heads: pairs of heads that mix q and k, an odd number of heads, groups, rows of 16, 8 and 4 bytes.
HEADS = [(1, 1), (1, 2), (1, 3), (2, 4), (3, 3), (2, 6), (4, 8)]


def make(layout, heads=(1, 2), *, dtype=torch.bfloat16, bias=True, state=True, seed=0) -> dict:
    offsets, tokens, rows = layout
    H, HV = heads
    channels = D * (2 * H + HV)
    documents = rows if offsets is None else len(offsets) - 1
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype=dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to("cuda", dtype)

    return {
        "projected": normal(tokens, rows, channels + D * HV + 2 * HV),
        "weight": normal(channels, 4) / 2,
        "bias": normal(channels) if bias else None,
        "A_log": normal(HV, dtype=torch.float32),
        "dt_bias": normal(HV, dtype=torch.float32),
        "initial_state": normal(documents, channels, 3) if state else None,
        "cu_seqlens": None if offsets is None else torch.tensor(offsets, device="cuda"),
    }


def run(inputs: dict, heads, backend: str, wide: bool, use_qk_l2norm=True, seed=1) -> tuple[dict, dict]:
    """Results and gradients by name; what lies past the last document is NaN for the kernels, in and out."""
    H, HV = heads
    leaves = {
        name: x if x is None or name == "cu_seqlens" else x.detach().to(torch.float64 if wide else x.dtype).clone()
        for name, x in inputs.items()
    }
    cu = inputs["cu_seqlens"]
    end = leaves["projected"].shape[0] if cu is None else int(cu[-1])
    if not wide:
        leaves["projected"][end:] = float("nan")
    leaves = {n: x if x is None or n == "cu_seqlens" else x.requires_grad_() for n, x in leaves.items()}
    out = convolve_projection(
        **leaves,
        key_heads=H,
        value_heads=HV,
        value_dim=D,
        use_qk_l2norm=use_qk_l2norm,
        output_final_state=True,
        backend=backend,
    )
    results = {name: getattr(out, name) for name in ("q", "k", "v", "g", "beta", "final_state")}
    generator = torch.Generator().manual_seed(seed)
    grads = []
    for name, x in results.items():
        grad = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        grad = grad.to("cuda", inputs["projected"].dtype if name in "qkv" or name == "final_state" else torch.float32)
        if name != "final_state" and not wide:
            grad[:, end:] = float("nan")
        grads.append(grad.to(x.dtype))
    names = [n for n, x in leaves.items() if x is not None and n != "cu_seqlens"]
    gradients = torch.autograd.grad(
        list(results.values()), [leaves[n] for n in names], grads, allow_unused=True, materialize_grads=True
    )
    return {n: x.detach() for n, x in results.items()}, dict(zip(names, gradients, strict=True))


def check(layout, heads, **settings) -> None:
    use_qk_l2norm = settings.pop("use_qk_l2norm", True)
    inputs = make(layout, heads, **settings)
    have, have_grads = run(inputs, heads, "auto", False, use_qk_l2norm)
    want, want_grads = run(inputs, heads, "reference", True, use_qk_l2norm)
    narrow = TOLERANCES[inputs["projected"].dtype]
    for name, x in want.items():
        exact = name == "final_state"
        assert_close(name, have[name], x, 0 if exact else WIDE if name in ("g", "beta") else narrow)
    for name, x in want_grads.items():
        assert have_grads[name].dtype == inputs[name].dtype
        assert_close(f"d{name}", have_grads[name], x, WIDE if name in ("A_log", "dt_bias") else narrow)
    if layout[0] is not None:
        end = layout[0][-1]
        assert all(bool((have[n][:, end:] == 0).all()) for n in ("q", "k", "v", "g", "beta"))
        assert bool((have_grads["projected"][end:] == 0).all())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(layout):
    check(layout, (1, 2))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_heads(heads, dtype):
    check(((0, 5, 5, 40, 61), 64, 1), heads, dtype=dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("use_qk_l2norm", [False, True])
def test_options(bias, state, use_qk_l2norm):
    check(((0, 2, 30, 41), 50, 1), (1, 3), bias=bias, state=state, use_qk_l2norm=use_qk_l2norm)


def test_many_tiles():
    # More tiles than a device holds at once, of all heads of a layer; documents of all lengths.
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 400, (60,), generator=generator)
    offsets = (0, *lengths.cumsum(0).tolist())
    check((offsets, offsets[-1] + 5, 1), (16, 32))


def test_weights_in_float32():
    inputs = make((None, 30, 1))
    other = inputs | {name: inputs[name].float() for name in ("weight", "bias")}
    for a, b in zip(run(inputs, (1, 2), "auto", False), run(other, (1, 2), "auto", False), strict=True):
        for name, x in a.items():
            assert torch.equal(x, b[name].to(x.dtype)), name


def test_gradient_of_z_is_zero_without_a_norm():
    inputs = make((None, 30, 1))
    _, grads = run(inputs, (1, 2), "auto", False)
    assert bool((grads["projected"][..., 4 * D : 6 * D] == 0).all())


def test_documents_are_independent():
    offsets = (0, 30, 30, 31, 90)
    inputs = make((offsets, 90, 1), (2, 2))
    whole, _ = run(inputs, (2, 2), "auto", False)
    for n, (start, end) in enumerate(pairwise(offsets)):
        if start == end:
            continue
        alone = inputs | {"projected": inputs["projected"][start:end], "cu_seqlens": None}
        alone["initial_state"] = inputs["initial_state"][n : n + 1]
        part, _ = run(alone, (2, 2), "auto", False)
        for name in ("q", "k", "v", "g", "beta"):
            assert torch.equal(whole[name][:, start:end], part[name]), name


def test_same_bits_every_time():
    inputs = make(((0, 300, 1000), 1000, 1), (2, 4))
    first = run(inputs, (2, 4), "auto", False)
    for _ in range(50):
        again = run(inputs, (2, 4), "auto", False)
        for a, b in zip(first, again, strict=True):
            assert all(torch.equal(x, b[name]) for name, x in a.items())


def test_graph_replay_with_other_offsets():
    inputs = make(((0, 100, 300), 300, 1))
    arguments = {"key_heads": 1, "value_heads": 2, "value_dim": D, "use_qk_l2norm": True}
    convolve_projection(**inputs, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = convolve_projection(**inputs, **arguments)
    inputs["cu_seqlens"].copy_(torch.tensor([0, 217, 281]))
    graph.replay()
    want = convolve_projection(**inputs, **arguments)
    assert all(torch.equal(getattr(out, name), getattr(want, name)) for name in ("q", "k", "v", "g", "beta"))


@pytest.mark.parametrize("layout", LAYOUTS[:6], ids=str)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_plain_convolution_of_a_view(layout, activation):
    offsets, tokens, rows = layout
    documents = rows if offsets is None else len(offsets) - 1
    generator = torch.Generator("cuda").manual_seed(0)
    whole = torch.randn(rows, tokens, 3 * D + 8, device="cuda", generator=generator).bfloat16()
    weight, bias = (torch.randn(*s, device="cuda", generator=generator).bfloat16() for s in ((2 * D, 4), (2 * D,)))
    state = torch.randn(documents, 2 * D, 3, device="cuda", generator=generator).bfloat16()
    cu = None if offsets is None else torch.tensor(offsets, device="cuda", dtype=torch.int32)
    results = []
    for backend, dtype in (("tilelang", torch.bfloat16), ("reference", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (whole, weight, bias, state)]
        x = leaves[0][..., 8 : 8 + 2 * D]
        y, final = causal_conv1d(x, *leaves[1:3], activation, leaves[3], True, cu, backend=backend)
        dy = torch.randn(y.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
        grads = torch.autograd.grad((y, final), leaves, (dy.to(dtype), torch.ones_like(final)))
        results.append((y.detach(), final.detach(), *grads))
    names = ("y", "final_state", "dx", "dweight", "dbias", "dstate")
    for name, a, b in zip(names, *results, strict=True):
        assert_close(name, a, b, TOLERANCES[torch.bfloat16])


def test_offsets_beyond_2_to_the_31():
    # The last rows of a projection of more than 2^32 numbers.
    tokens, heads = 360_000, (16, 32)
    columns = D * (32 + 64) + 64
    projected = torch.zeros(tokens, 1, columns, dtype=torch.bfloat16, device="cuda")
    end = torch.randn(200, 1, columns, device="cuda").bfloat16()
    projected[-200:] = end
    inputs = make((None, 1, 1), heads, state=False) | {"projected": projected}
    arguments = {"key_heads": 16, "value_heads": 32, "value_dim": D, "use_qk_l2norm": True}
    leaf = projected.requires_grad_()
    out = convolve_projection(**(inputs | {"projected": leaf}), **arguments)
    short = torch.cat([torch.zeros_like(end[:10]), end]).requires_grad_()
    want = convolve_projection(**(inputs | {"projected": short}), **arguments)
    grads = []
    for result, x in ((out, leaf), (want, short)):
        loss = sum(getattr(result, name)[:, -200:].float().square().sum() for name in ("q", "k", "v", "g", "beta"))
        grads.append(torch.autograd.grad(loss, x)[0][-200:])
    for name in ("q", "k", "v", "g", "beta"):
        assert torch.equal(getattr(out, name)[:, -200:], getattr(want, name)[:, -200:]), name
    assert torch.equal(*grads)


def test_compiles_without_a_graph_break():
    inputs = make(((0, 20, 33), 40, 1))
    names = [n for n, x in inputs.items() if x is not None and n != "cu_seqlens"]

    def loss(cu_seqlens, *tensors):
        out = convolve_projection(
            **dict(zip(names, tensors, strict=True)),
            cu_seqlens=cu_seqlens,
            key_heads=1,
            value_heads=2,
            value_dim=D,
            use_qk_l2norm=True,
            output_final_state=True,
        )
        return sum(getattr(out, n).float().square().sum() for n in ("q", "k", "v", "g", "beta", "final_state"))

    results = []
    for f in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [inputs[n].detach().clone().requires_grad_() for n in names]
        results.append(torch.autograd.grad(f(inputs["cu_seqlens"], *leaves), leaves))
    for name, a, b in zip(names, *results, strict=True):
        assert torch.equal(a, b), name


def test_refuses_what_it_does_not_serve():
    inputs = make((None, 5, 1))
    arguments = {"key_heads": 1, "value_heads": 2, "value_dim": D}
    with pytest.raises(NotImplementedError, match="bfloat16 or float16"):
        convolve_projection(**(inputs | {"projected": inputs["projected"].float()}), **arguments)
    with pytest.raises(NotImplementedError, match="W = 4, got W = 3"):
        convolve_projection(**(inputs | {"weight": inputs["weight"][:, :3], "initial_state": None}), **arguments)
    with pytest.raises(NotImplementedError, match="D a multiple of 128"):
        causal_conv1d(torch.zeros(1, 3, 64, device="cuda").bfloat16(), torch.zeros(64, 4, device="cuda").bfloat16())
