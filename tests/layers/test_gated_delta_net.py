"""The layer by itself: formula, construction, float32 parameters, recomputing, refusals."""

import logging
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from layer_cases import (
    HIDDEN,
    KEY_DIM,
    KEY_HEADS,
    QUERIES,
    RECOMPUTE,
    VALUE_DIM,
    VALUE_HEADS,
    VALUES,
    alone,
    assert_close,
    load,
    make_config,
    make_layer,
    packed,
    random_weights,
)
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as MegatronGatedDeltaNet
from megatron.core.ssm.gated_delta_net import common as megatron_common
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from qla_megatron.layers import GatedDeltaNet
from qla_megatron.testing.distributed import run_ranks

TOLERANCE = 1e-5  # float32 against float64
TOKENS = 80  # a whole chunk of 64 and a rest
FLOAT32 = {"A_log", "dt_bias", "out_norm.weight"}


def formula(x: Tensor, w: dict[str, Tensor], zero_centred: bool) -> Tensor:
    """The layer written out token by token in float64 (Hugging Face's Qwen3.5): x [T, B, D] -> [T, B, D]."""
    w = {name: tensor.double() for name, tensor in w.items()}
    T, B, _ = x.shape
    projected = x.double() @ w["in_proj.weight"].T
    qkv, z, beta, alpha = projected.split([2 * QUERIES + VALUES, VALUES, VALUE_HEADS, VALUE_HEADS], dim=-1)
    padded = F.pad(qkv.permute(1, 2, 0), (3, 0))
    qkv = F.silu(F.conv1d(padded, w["conv1d.weight"], groups=qkv.shape[-1])).permute(2, 0, 1)
    q, k, v = (
        part.unflatten(-1, (heads, -1))
        for part, heads in zip(
            qkv.split([QUERIES, QUERIES, VALUES], dim=-1), (KEY_HEADS, KEY_HEADS, VALUE_HEADS), strict=True
        )
    )
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q, k = (t.repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=2) for t in (q * KEY_DIM**-0.5, k))
    g, beta = -w["A_log"].exp() * F.softplus(alpha + w["dt_bias"]), beta.sigmoid()
    state, outputs = torch.zeros(B, VALUE_HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64), []
    for t in range(T):
        state = state * g[t].exp()[..., None, None]
        error = v[t] - torch.einsum("bhkv,bhk->bhv", state, k[t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[t], beta[t][..., None] * error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[t]))
    o = torch.stack(outputs)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-6) * (w["out_norm.weight"] + zero_centred)
    return (o * F.silu(z.unflatten(-1, (VALUE_HEADS, -1)))).flatten(2) @ w["out_proj.weight"].T


@pytest.mark.parametrize("zero_centred", [True, False])
def test_layer_equals_the_formula(zero_centred: bool) -> None:
    run_ranks(_check_formula, 1, zero_centred)


def _check_formula(zero_centred: bool) -> None:
    layer = make_layer(make_config(layernorm_zero_centered_gamma=zero_centred), alone())
    weights = random_weights()
    load(layer, weights)
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(TOKENS, 2, HIDDEN, generator=generator) for _ in range(2))
    leaves = {name: w.double().requires_grad_() for name, w in weights.items()}
    x_exact, x_layer = x.double().requires_grad_(), x.clone().requires_grad_()
    expected = formula(x_exact, leaves, zero_centred)
    (expected * dy).sum().backward()
    y, bias = layer(x_layer, None)
    assert bias is None
    (y * dy).sum().backward()
    assert_close(y.detach(), expected.detach(), TOLERANCE, "output")
    assert_close(x_layer.grad, x_exact.grad, TOLERANCE, "input gradient")
    for name, parameter in layer.named_parameters():
        assert_close(parameter.grad, leaves[name].grad, TOLERANCE, f"gradient of {name}")


def test_drop_in_for_megatrons_layer() -> None:
    run_ranks(_check_drop_in, 1)


def _check_drop_in() -> None:
    with mock.patch.object(megatron_common, "HAVE_FLA", False):  # Megatron's own __init__ raises without it
        layer = make_layer(make_config(), alone(), name="layers.0", cp_comm_type="p2p", pp_layer_offset=0)
    assert isinstance(layer, MegatronGatedDeltaNet)
    assert type(layer).__name__ == "GatedDeltaNet"
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    rows = 2 * QUERIES + 2 * VALUES + 2 * VALUE_HEADS
    assert shapes == {
        "dt_bias": (VALUE_HEADS,),
        "A_log": (VALUE_HEADS,),
        "in_proj.weight": (rows, HIDDEN),
        "conv1d.weight": (2 * QUERIES + VALUES, 1, 4),
        "out_norm.weight": (VALUE_DIM,),
        "out_proj.weight": (HIDDEN, VALUES),
    }
    expected = {
        "qk_dim": QUERIES,
        "v_dim": VALUES,
        "in_proj_dim": rows,
        "tp_size": 1,
        "num_value_heads": VALUE_HEADS,
        "qk_dim_local_tp": QUERIES,
        "v_dim_local_tp": VALUES,
        "conv_dim_local_tp": 2 * QUERIES + VALUES,
        "in_proj_split_names": ["query", "key", "value", "z", "beta", "alpha"],
        "recompute_norm_out": False,
        "norm_out_checkpoint": None,
    }
    assert {name: getattr(layer, name) for name in expected} == expected
    layer.backward_dw()


def test_start_values() -> None:
    run_ranks(_check_start_values, 1)


def _check_start_values() -> None:
    many = {"linear_num_key_heads": 64, "linear_num_value_heads": 4096, "linear_key_head_dim": 1}
    config = make_config(**many, linear_value_head_dim=1, hidden_size=8)

    def decays(**arguments: object) -> tuple[float, float, float]:
        decay = make_layer(config, alone(), **arguments).A_log.exp()
        return decay.min().item(), decay.max().item(), decay.mean().item()

    assert decays() == pytest.approx((1, 16, 8.5), abs=0.3)  # uniform in Megatron's range
    config.gdn_A_init_range = (0.01, 16.0)
    assert decays() == pytest.approx((0.01, 16, 8), abs=0.3)
    assert decays(A_init_range=(2, 3)) == pytest.approx((2, 3, 2.5), abs=0.02)
    layer = make_layer(config, alone(), conv_init=0.25)
    assert layer.conv1d.weight.abs().max().item() == pytest.approx(0.25, abs=0.001)
    assert make_layer(config, alone()).conv1d.weight.abs().max().item() == pytest.approx(0.5, abs=0.001)
    assert torch.equal(layer.dt_bias, torch.ones(4096))


def test_backend_reaches_the_rule() -> None:
    run_ranks(_check_backend, 1)


def _check_backend() -> None:
    config = make_config()
    assert make_layer(config, alone()).gated_delta_rule.keywords == {"backend": "auto"}
    config.gdn_backend = "reference"
    assert make_layer(config, alone()).gated_delta_rule.keywords == {"backend": "reference"}
    assert make_layer(config, alone(), backend="tilelang").gated_delta_rule.keywords == {"backend": "tilelang"}


@pytest.mark.parametrize("convert", ["bfloat16", "half", "to", "wrap"])
def test_float32_parameters_stay(convert: str) -> None:
    run_ranks(_check_float32_parameters, 1, convert)


def _check_float32_parameters(convert: str) -> None:
    config = make_config(bf16=convert == "wrap", params_dtype=torch.bfloat16 if convert == "wrap" else torch.float32)
    layer = make_layer(config, alone())
    weights = random_weights()
    load(layer, weights)
    identities = {name: id(p) for name, p in layer.named_parameters()}
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    narrow = torch.float16 if convert == "half" else torch.bfloat16
    if convert == "to":
        layer.to(narrow)
    elif convert == "wrap":
        Float16Module(config, layer)
    else:
        getattr(layer, convert)()
    for name, parameter in layer.named_parameters():
        kept = name in FLOAT32
        assert parameter.dtype == parameter.grad.dtype == (torch.float32 if kept else narrow), name
        assert id(parameter) == identities[name], name
        assert torch.equal(parameter, weights[name].to(parameter.dtype)), name
        assert getattr(parameter, "tensor_model_parallel", False) == (name != "out_norm.weight"), name
    output, _ = layer(torch.randn(8, 1, HIDDEN).to(narrow), None)
    assert output.dtype == narrow
    output.sum().backward()
    layer.double()
    assert {p.dtype for p in layer.parameters()} == {torch.float64}


def test_recomputing_the_norm_changes_no_bit() -> None:
    run_ranks(_check_recompute, 1)


def _check_recompute() -> None:
    results = []
    for changes in ({}, RECOMPUTE):
        layer = make_layer(make_config(**changes), alone())
        assert layer.recompute_norm_out == bool(changes)
        load(layer, random_weights())
        x = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y, _ = layer(x, None, packed_seq_params=packed([30, 50]))
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


def test_refusals() -> None:
    run_ranks(_check_refusals, 1)


def _check_refusals() -> None:
    layer = make_layer(make_config(), alone())
    for keyword in ("inference_context", "inference_params"):
        with pytest.raises(NotImplementedError, match="inference_context must be None"):
            layer(torch.zeros(8, 1, HIDDEN), None, **{keyword: object()})
    with pytest.raises(ValueError, match="pg_collection must be given"):
        make_layer(make_config(), None)
    for bad in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="A_init_range must be two numbers"):
            make_layer(make_config(), alone(), A_init_range=bad)
    with pytest.raises(NotImplementedError, match="activation_func must be silu, got gelu"):
        make_layer(make_config(activation_func=F.gelu), alone())
    with pytest.raises(NotImplementedError, match=r"activation_func must be silu, got SiLU\(\)"):
        make_layer(make_config(activation_func=torch.nn.SiLU()), alone())
    with pytest.raises(NotImplementedError, match="normalization must be 'RMSNorm', got 'LayerNorm'"):
        make_layer(make_config(normalization="LayerNorm"), alone())
    with pytest.raises(ValueError, match="backend must be 'auto' or 'tilelang' or 'reference', got 'triton'"):
        make_layer(make_config(), alone(), backend="triton")
    for name, size in (("linear_num_key_heads", 0), ("linear_value_head_dim", None)):
        config = make_config()
        setattr(config, name, size)
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got {size}"):
            make_layer(config, alone())
    config = make_config()
    config.linear_num_value_heads = 12
    with pytest.raises(
        ValueError, match="linear_num_value_heads must be a multiple of linear_num_key_heads = 8, got 12"
    ):
        make_layer(config, alone())
    config = make_config(linear_num_value_heads=8)
    config.fp8, config.fp8_recipe = "e4m3", "mxfp8"  # 2 * 128 + 2 * 64 + 16 = 400 rows, a multiple of 16 but not of 32
    with pytest.raises(
        ValueError, match="in_proj has 400 rows on each of 1 tensor parallel ranks, FP8 needs a multiple"
    ):
        make_layer(config, alone())


def test_unknown_arguments_are_named() -> None:
    run_ranks(_check_unknown_arguments, 1)


def _check_unknown_arguments() -> None:
    log = logging.getLogger("qla_megatron.layers.gated_delta_net")
    with mock.patch.object(log, "warning") as warning:
        make_layer(make_config(), alone(), from_a_later_version=1)
    assert warning.call_args.args[1] == ["from_a_later_version"]


def test_no_layer_waits_for_the_device() -> None:
    run_ranks(_check_no_host_reads, 1)


def _check_no_host_reads() -> None:
    """The layer on tensors without values: whatever reads one on the host raises. The rule is stood in for."""

    def rule(q: Tensor, k: Tensor, v: Tensor, **_: object) -> tuple[Tensor, None]:
        return v * (q.sum() + k.sum()), None

    params = packed([8, 16])
    with torch.device("meta"):
        config = make_config(perform_initialization=False)
        layer: GatedDeltaNet = make_layer(config, alone(), backend="reference")
        layer.gated_delta_rule = rule
        for name in ("cu_seqlens_q", "cu_seqlens_kv"):
            setattr(params, name, getattr(params, name).to("meta"))
        x = torch.empty(24, 1, HIDDEN, requires_grad=True)
        output, _ = layer(x, None, packed_seq_params=params)
        output.sum().backward()
    assert output.shape == x.grad.shape == (24, 1, HIDDEN)
