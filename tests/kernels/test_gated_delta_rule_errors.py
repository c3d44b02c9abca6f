"""Every bad input of the gated delta rule: the error's type and what it says."""

import re

import pytest
import torch

from qla_megatron.kernels import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from qla_megatron.testing.inputs import make_rule_inputs


def arguments(**changes):
    inputs = make_rule_inputs(((0, 5, 9), 9), dtype=torch.float32, key_heads=2, value_heads=4)
    good = {name: getattr(inputs, name) for name in ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")}
    return good | changes


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def offsets(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


BAD = [
    ({"q": 3}, TypeError, "q must be a torch.Tensor, got int"),
    ({"q": zeros(9, 2, 16)}, ValueError, "q must have shape [B, T, H, K], got (9, 2, 16)"),
    ({"q": zeros(1, 9, 2, 0)}, ValueError, "q must have shape [B, T, H, K] with K >= 1, got K=0"),
    (
        {"k": zeros(1, 8, 2, 16)},
        ValueError,
        "k must have shape [B, T, H, K] with B=1, T=9, H=2, K=16, got (1, 8, 2, 16)",
    ),
    ({"v": zeros(1, 8, 4, 8)}, ValueError, "v must have shape [B, T, HV, V] with B=1, T=9, got (1, 8, 4, 8)"),
    ({"v": zeros(1, 9, 3, 8)}, ValueError, "multiple of the heads of q and k, got HV=3 and H=2"),
    ({"g": zeros(1, 9, 2)}, ValueError, "g must have shape [B, T, HV] with B=1, T=9, HV=4, got (1, 9, 2)"),
    ({"beta": zeros(1, 9)}, ValueError, "beta must have shape [B, T, HV]"),
    (
        {"q": zeros(1, 9, 2, 16, dtype=torch.int32)},
        TypeError,
        "q must be bfloat16 or float16 or float32 or float64, got int32",
    ),
    ({"v": zeros(1, 9, 4, 8).half()}, TypeError, "v must have the dtype of q, torch.float32, got torch.float16"),
    ({"g": zeros(1, 9, 4).long()}, TypeError, "g must be bfloat16"),
    ({"beta": torch.zeros(1, 9, 4, device="meta")}, ValueError, "beta must be on the device of q, cpu, got meta"),
    ({"scale": "1"}, TypeError, "scale must be a number, got str"),
    ({"output_final_state": 1}, TypeError, "output_final_state must be a bool, got 1"),
    ({"auto_cp": None}, TypeError, "auto_cp must be a bool, got None"),
    ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True"),
    ({"initial_state": zeros(1, 4, 16, 8)}, ValueError, "[N, HV, K, V] with N=2, HV=4, K=16, V=8, got (1, 4, 16, 8)"),
    ({"state_v_first": True}, ValueError, "[N, HV, V, K] with N=2, HV=4, V=8, K=16, got (2, 4, 16, 8)"),
    ({"initial_state": zeros(2, 4, 16, 8).int()}, TypeError, "initial_state must be bfloat16"),
    ({"cu_seqlens": [0, 9]}, TypeError, "cu_seqlens must be a torch.Tensor, got list"),
    ({"cu_seqlens": offsets(0, 5, 9).float()}, TypeError, "cu_seqlens must be int32 or int64, got float32"),
    ({"cu_seqlens": offsets(0), "initial_state": None}, ValueError, "N+1 offsets of N >= 1 documents, got 1"),
    ({"cu_seqlens": offsets(1, 5, 9)}, ValueError, "cu_seqlens must start at 0, got 1"),
    ({"cu_seqlens": offsets(0, 7, 5)}, ValueError, "cu_seqlens must not decrease, got 7 then 5 at document 1"),
    ({"cu_seqlens": offsets(0, 7, 10)}, ValueError, "cu_seqlens must end at or before T=9, got 10"),
    (
        {"cu_seqlens": None, "cu_seqlens_cpu": offsets(0, 9)},
        ValueError,
        "cu_seqlens_cpu is the host copy of cu_seqlens",
    ),
    ({"cu_seqlens_cpu": offsets(0, 9)}, ValueError, "cu_seqlens_cpu must have shape [N+1] with N+1=3, got (2,)"),
    ({"cu_seqlens_cpu": offsets(0, 4, 9)}, ValueError, "must equal cu_seqlens, (0, 5, 9), got (0, 4, 9)"),
    ({"cp_context": object()}, NotImplementedError, "cp_context must be None"),
    ({"chunk_size": 32}, NotImplementedError, "chunk_size must be 64, got 32"),
    ({"use_gate_in_kernel": True}, ValueError, "A_log must be given with use_gate_in_kernel=True"),
    ({"A_log": zeros(4)}, ValueError, "A_log needs use_gate_in_kernel=True"),
    ({"use_gate_in_kernel": True, "A_log": zeros(2)}, ValueError, "A_log must have shape [HV] with HV=4, got (2,)"),
    ({"backend": "triton"}, ValueError, "backend must be 'auto' or 'tilelang' or 'reference', got 'triton'"),
    ({"backend": "tilelang"}, NotImplementedError, 'backend="tilelang" serves CUDA tensors'),
    ({"head_first": False}, TypeError, "head_first"),
]


@pytest.mark.parametrize(("change", "error", "text"), BAD, ids=[text[:40] for _, _, text in BAD])
def test_bad_input(change, error, text):
    with pytest.raises(error, match=re.escape(text)):
        chunk_gated_delta_rule(**arguments(**change))


def test_packing_needs_one_row():
    inputs = make_rule_inputs("rows", batch=2)
    with pytest.raises(ValueError, match="q must have B=1, got B=2"):
        chunk_gated_delta_rule(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, cu_seqlens=offsets(0, 150))


def test_chunk_indices_are_not_needed():
    o, _ = chunk_gated_delta_rule(**arguments(chunk_indices=offsets(0, 0, 1, 0).view(2, 2)))
    assert torch.equal(o, chunk_gated_delta_rule(**arguments())[0])


LOW_LEVEL = [
    ({"g": zeros(1, 9, 4).bfloat16()}, TypeError, "g must be float32, got bfloat16"),
    ({"initial_state": zeros(2, 4, 16, 8).double()}, TypeError, "initial_state must be float32, got float64"),
    ({"plan": 1}, NotImplementedError, "plan must be None"),
]


@pytest.mark.parametrize(("change", "error", "text"), LOW_LEVEL, ids=[text for _, _, text in LOW_LEVEL])
def test_bad_low_level_input(change, error, text):
    with pytest.raises(error, match=re.escape(text)):
        chunk_gated_delta_rule_fwd(**arguments(**change))


def test_bad_gradient():
    o, _, saved = chunk_gated_delta_rule_fwd(**arguments())
    with pytest.raises(ValueError, match=re.escape("do must have shape [B, T, HV, V]")):
        chunk_gated_delta_rule_bwd(o[:, :3], None, saved)
    with pytest.raises(ValueError, match=re.escape("dht must have shape [N, HV, K, V]")):
        chunk_gated_delta_rule_bwd(o, zeros(1, 4, 16, 8), saved)
    with pytest.raises(TypeError, match="saved must be what chunk_gated_delta_rule_fwd returned"):
        chunk_gated_delta_rule_bwd(o, None, (o,))
