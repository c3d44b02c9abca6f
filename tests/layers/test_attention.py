"""Core attention against naive float64 attention of each document: outputs, gradients, context parallelism."""

import math

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from qla_megatron.data.zigzag import zigzag_index
from qla_megatron.layers.attention import CoreAttention, attend_dense, attend_packed
from qla_megatron.testing.distributed import run_ranks

# float32: scores of some tens, as a large scale makes them, lose a digit in the softmax.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 4e-6, torch.bfloat16: 8e-3}
DOCUMENTS = [8, 0, 24, 64, 32]  # an empty one; one whose piece is a single token at 4 ranks
TOKENS = sum(DOCUMENTS)


class OneRank:
    """Stands for the group of a single rank."""

    def size(self) -> int:
        return 1


def naive(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """[S, B, Hq, K], [S, B, Hk, K], [S, B, Hk, V] -> [S, B, Hq, V], each head by its own formula."""
    groups = query.shape[2] // key.shape[2]
    key, value = (t.repeat_interleave(groups, dim=2) for t in (key, value))
    scores = torch.einsum("sbhk,tbhk->bhst", query, key) * (scale or 1 / math.sqrt(query.shape[-1]))
    causal = torch.ones(len(query), len(query), dtype=torch.bool, device=query.device).tril()
    return torch.einsum("bhst,tbhv->sbhv", scores.masked_fill(~causal, -math.inf).softmax(-1), value)


def inputs(dtype: torch.dtype, heads: tuple[int, int], widths: tuple[int, int], batch: int = 1) -> list[Tensor]:
    """query, key, value and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    (hq, hk), (k, v) = heads, widths
    shapes = ((hq, k), (hk, k), (hk, v), (hq, v))
    return [torch.randn(TOKENS, batch, *shape, generator=generator).to(dtype) for shape in shapes]


def results(attend, tensors: list[Tensor]) -> list[Tensor]:
    """The output of `attend` and the gradients of query, key and value."""
    *leaves, d_out = tensors
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    out = attend(*leaves)
    out.backward(d_out.view_as(out))
    return [out.detach().view_as(d_out), *(t.grad for t in leaves)]


def per_document(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    documents = zip(*(t.split(DOCUMENTS) for t in (query, key, value)), strict=True)
    return torch.cat([naive(*document, scale) for document in documents])


def check(actual: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert a.shape == e.shape, name
        assert a.dtype == dtype, name
        error = ((a.double() - e).norm() / e.norm()).item()
        assert error < TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


def make_config(**changes) -> TransformerConfig:
    settings = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 8, "num_query_groups": 4}
    return TransformerConfig(**(settings | {"attention_dropout": 0.0, "use_cpu_initialization": True} | changes))


def make_attention(group=None, **arguments) -> CoreAttention:
    config = make_config(**arguments.pop("config", {}))
    groups = ProcessGroupCollection(cp=group or OneRank())
    arguments = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"} | arguments
    return CoreAttention(config=config, pg_collection=groups, cp_comm_type=None, **arguments)


def packed(lengths: list[int] = DOCUMENTS, **changes) -> PackedSeqParams:
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    fields = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "max_seqlen_q": max(lengths)}
    return PackedSeqParams(**({"qkv_format": "thd", "max_seqlen_kv": max(lengths)} | fields | changes))


GRID = [
    ((2, 2), (16, 16)),  # as many key heads as query heads
    ((8, 2), (256, 256)),  # Qwen3.5's heads: grouped, 256 wide
    ((4, 1), (16, 8)),  # values of another width
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "widths"), GRID)
def test_dense(dtype: torch.dtype, heads: tuple[int, int], widths: tuple[int, int]) -> None:
    tensors = inputs(dtype, heads, widths, batch=2)
    attention = make_attention()
    expected = results(naive, [t.double() for t in tensors])
    check(results(lambda q, k, v: attention(q, k, v, None), tensors), expected, dtype)
    unpacked = packed(qkv_format="bshd")  # carries offsets, but is not packing
    check(results(lambda q, k, v: attention(q, k, v, None, packed_seq_params=unpacked), tensors), expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "widths"), GRID)
def test_packed(dtype: torch.dtype, heads: tuple[int, int], widths: tuple[int, int]) -> None:
    tensors = inputs(dtype, heads, widths)
    attention = make_attention(softmax_scale=0.3)
    expected = results(lambda *qkv: per_document(*qkv, 0.3), [t.double() for t in tensors])
    params = packed()

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = attention(*(t.squeeze(1) for t in (query, key, value)), None, packed_seq_params=params)
        assert out.shape == (TOKENS, heads[0] * widths[1])
        return out

    check(results(attend, tensors), expected, dtype)


def test_padded_offsets_win() -> None:
    """Documents of 5, 20, 60 and 30 tokens in the room of DOCUMENTS."""
    tensors = inputs(torch.float64, (2, 2), (16, 16))
    room = packed().cu_seqlens_q
    short = torch.tensor([0, 5, 5, 25, 85, 115], dtype=torch.int32)
    params = packed(cu_seqlens_q=short, cu_seqlens_kv=short, cu_seqlens_q_padded=room, cu_seqlens_kv_padded=room)
    attend = make_attention()
    actual = results(lambda *qkv: attend(*(t.squeeze(1) for t in qkv), None, packed_seq_params=params), tensors)
    check(actual, results(per_document, tensors), torch.float64)


def test_documents_do_not_see_each_other() -> None:
    query, key, value, _ = (t.squeeze(1) for t in inputs(torch.float32, (2, 2), (16, 16)))
    attend, params, first = make_attention(), packed(), DOCUMENTS[0]
    before = attend(query, key, value, None, packed_seq_params=params)
    key, value = key.clone(), value.clone()
    key[:first], value[:first] = 7.0, math.nan
    after = attend(query, key, value, None, packed_seq_params=params)
    assert torch.equal(after[first:], before[first:])
    assert after[:first].isnan().all()


def check_context_parallel() -> None:
    cp, rank = dist.get_world_size(), dist.get_rank()
    attention = make_attention(dist.group.WORLD, config={"context_parallel_size": cp})
    for lengths, params, reference in ((DOCUMENTS, packed(), per_document), ([TOKENS], None, naive)):
        for heads, widths in (((8, 4), (16, 16)), ((4, 4), (16, 8))):
            tensors = inputs(torch.float32, heads, widths, batch=1 if params else 2)
            index = zigzag_index(torch.tensor([0, *lengths]).cumsum(0), cp, rank)

            def attend(*qkv: Tensor, params: PackedSeqParams | None = params) -> Tensor:
                qkv = tuple(t.squeeze(1) for t in qkv) if params else qkv
                return attention(*qkv, None, packed_seq_params=params)

            expected = [t[index] for t in results(reference, [t.double() for t in tensors])]
            check(results(attend, [t[index] for t in tensors]), expected, torch.float32)
    query, key, value, _ = inputs(torch.float32, (6, 3), (16, 16))
    with pytest.raises(NotImplementedError, match=f"multiple of the context parallel size {cp}, got 3"):
        attention(query, key, value, None)
    few = {"num_query_groups": 2, "tensor_model_parallel_size": 2}  # refused before a long start, not at the first step
    with pytest.raises(NotImplementedError, match=f"multiple of the context parallel size {cp}, got 1"):
        make_attention(dist.group.WORLD, config=few | {"context_parallel_size": cp})


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallel(cp: int) -> None:
    run_ranks(check_context_parallel, cp, context_parallel=cp)


def check_rotary() -> None:
    """Megatron's rotary embedding of packed, zigzag tokens: positions start at 0 in each document."""
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    cp, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    rotary = RotaryEmbedding(16, rotary_percent=0.5, use_cpu_initialization=True, cp_group=group)
    config, x = make_config(context_parallel_size=cp), inputs(torch.float32, (2, 2), (16, 16))[0].squeeze(1)
    for lengths in (DOCUMENTS, [TOKENS], [0, TOKENS]):
        params = packed(lengths)
        length = rotary.get_rotary_seq_len(None, None, x, config, params)
        angles = rotary(length, packed_seq=True)
        index = zigzag_index(params.cu_seqlens_q, cp, rank)
        turned = apply_rotary_pos_emb(x[index], angles, config, params.cu_seqlens_q, cp_group=group)

        position = torch.cat([torch.arange(n) for n in lengths])
        angle = position[:, None] / 10000 ** (torch.arange(4) / 4)  # half of 16 turns, in pairs (i, i + 4)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b, rest = x.split([4, 4, 8], -1)
        expected = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)[index]
        assert ((turned - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_megatrons_rotary_embedding_follows_the_documents(cp: int) -> None:
    run_ranks(check_rotary, cp, context_parallel=cp)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout must be 0 .*, got 0.1"),
        ({"config": {"attention_dropout": 0.2}}, "attention_dropout must be 0 .*, got 0.2"),
        ({"attn_mask_type": AttnMaskType.no_mask}, "attn_mask_type must be causal .*no_mask"),
        ({"attention_type": "cross"}, "attention_type must be 'self' .* 'cross'"),
        ({"config": {"window_size": (64, 0)}}, r"window_size must be None .* \(64, 0\)"),
        ({"config": {"softmax_type": "learnable"}}, "softmax_type must be 'vanilla' .* 'learnable'"),
    ],
)
def test_what_is_not_supported_is_refused(arguments: dict, text: str) -> None:
    with pytest.raises(NotImplementedError, match=text):
        make_attention(**arguments)


def test_bad_inputs_are_refused() -> None:
    query, key, value, _ = inputs(torch.float32, (4, 2), (16, 16))
    attend = make_attention()
    for bad, text in (
        ((query, key[:5], value), "must agree in tokens"),
        ((query, key[..., :8], value), "must agree in tokens, batch, key heads and head size"),
        ((query[:, :, :3], key, value), "query heads must be a multiple of the key heads"),
        ((query[0], key, value), r"must have shape \[S, B, H, K\]"),
    ):
        with pytest.raises(ValueError, match=text):
            attend(*bad, None)
    with pytest.raises(NotImplementedError, match="attention_bias must be None"):
        attend(query, key, value, None, attention_bias=query)
    with pytest.raises(NotImplementedError, match="attn_mask_type must be causal"):
        attend(query, key, value, None, attn_mask_type=AttnMaskType.arbitrary)
    with pytest.raises(ValueError, match="number of tokens"):
        attend(query, key, value, None, packed_seq_params=packed([8, 8]))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "widths"), [((2, 2), (128, 128)), ((16, 4), (256, 256))])
def test_on_the_gpu(heads: tuple[int, int], widths: tuple[int, int]) -> None:
    tensors = [t.cuda() for t in inputs(torch.bfloat16, heads, widths)]
    wide = [t.double() for t in tensors]
    check(results(attend_dense, tensors), results(naive, wide), torch.bfloat16)
    offsets = packed().cu_seqlens_q.cuda()
    actual = results(lambda *qkv: attend_packed(*(t.squeeze(1) for t in qkv), offsets, max(DOCUMENTS)), tensors)
    check(actual, results(per_document, wide), torch.bfloat16)
    with pytest.raises(NotImplementedError, match="float16 or bfloat16"):
        attend_packed(*(t.squeeze(1).float() for t in tensors[:3]), offsets, max(DOCUMENTS))
