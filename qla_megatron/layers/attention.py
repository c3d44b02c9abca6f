"""Core attention without Transformer Engine: causal, memory-efficient, dense or packed, grouped key and value heads.

What runs:

    on CUDA, dense    scaled_dot_product_attention by cuDNN, else by flash attention; never the quadratic math backend
    on CUDA, packed   torch.nn.attention.varlen, all documents in one call
    on the CPU        scaled_dot_product_attention, document by document

Context parallelism is by head exchange: each rank attends over all tokens for its part of the heads.
"""

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from qla_megatron.layers.context_parallel import to_head_shards, to_sequence_shards
from qla_megatron.layers.packing import document_offsets

CUDA_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]  # in the order of their speed on an H200
CAUSAL_MASKS = (AttnMaskType.causal, AttnMaskType.padding_causal)  # padding is at the end of a document: after it


class CoreAttention(torch.nn.Module):
    """softmax(q k^T * scale) v under a causal mask, as Megatron's SelfAttention calls it.

    Args:
        config: `attention_dropout`, `num_query_groups`, `tensor_model_parallel_size` and the fields refused below are
            used.
        layer_number, attention_type, cp_comm_type: taken because SelfAttention passes them; without effect, except
            that only self-attention is supported. Context parallelism always exchanges heads.
        attn_mask_type: causal or padding_causal, which are the same here.
        attention_dropout: None: the configuration's. Must be 0.
        softmax_scale: None: 1 / sqrt(head_dim).
        pg_collection: its `cp` is used. None: Megatron's global group.

    Raises:
        NotImplementedError: dropout, another mask, cross-attention, windows, softmax offsets, scaling by the layer's
            number, fewer key and value heads on a tensor parallel rank than context parallel ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        for name, value, supported in (
            ("attention_dropout", dropout, (0,)),
            ("attention_type", attention_type, ("self",)),
            ("window_size", config.window_size, (None,)),
            ("softmax_type", config.softmax_type, ("vanilla",)),
            ("apply_query_key_layer_scaling", config.apply_query_key_layer_scaling, (False,)),
        ):
            if value not in supported:
                raise NotImplementedError(f"{name} must be {supported[0]!r} without Transformer Engine, got {value!r}")
        _check_mask(attn_mask_type)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group = pg_collection.cp
        # Megatron counts a key and value head once for each tensor parallel rank where there are fewer than ranks.
        _check_exchange(config.num_query_groups // config.tensor_model_parallel_size, self.cp_group.size())
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [S / c, B, Hq, K], or packed [S / c, Hq, K]; under context parallelism tokens are in zigzag order,
                packed: document by document.
            key, value: [S / c, B, Hk, K] and [S / c, B, Hk, V]; Hk divides Hq, and c divides Hk.
            attention_mask: not read: the mask is causal within each sequence or document.
            packed_seq_params: documents, where its `qkv_format` is "thd"; another format is not packing. Padded offsets
                are taken where there are both: the padding at a document's end is then part of it, and seen by no
                token before it. Offsets cover all tokens.

        Returns:
            [S / c, B, Hq V], packed [S / c, Hq V].

        Raises:
            NotImplementedError: a bias, another mask, what the GPU's kernels don't take.
            ValueError: shapes or offsets that do not fit.
        """
        if attention_bias is not None:
            raise NotImplementedError("attention_bias must be None: biased attention needs Transformer Engine")
        if attn_mask_type is not None:
            _check_mask(attn_mask_type)
        is_packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if is_packed:
            query, key, value = (t.unsqueeze(1) if t.dim() == 3 else t for t in (query, key, value))
        _check_shapes(query, key, value)
        c = self.cp_group.size()
        cu_seqlens = document_offsets(packed_seq_params, query.shape[0] * c, query.shape[1], c)

        if c > 1:
            query, key, value = self._exchange(query, key, value, cu_seqlens)
        if packed_seq_params is None or cu_seqlens is None:
            out = attend_dense(query, key, value, self.softmax_scale)
        else:
            longest = packed_seq_params.max_seqlen_q
            longest = query.shape[0] if longest is None else int(longest)
            query, key, value = (t.squeeze(1) for t in (query, key, value))
            out = attend_packed(query, key, value, cu_seqlens, longest, self.softmax_scale).unsqueeze(1)
        out = out.flatten(2)
        if c > 1:
            out = to_sequence_shards(out, self.cp_group, cu_seqlens)
        return out.squeeze(1) if is_packed else out

    def _exchange(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens of this rank's heads; query, key and value travel together."""
        c = self.cp_group.size()
        _check_exchange(key.shape[2], c)
        tensors = (query, key, value)
        widths = [t.shape[2] * t.shape[3] for t in tensors]
        exchanged = to_head_shards(torch.cat([t.flatten(2) for t in tensors], -1), widths, self.cp_group, cu_seqlens)
        parts = exchanged.split([width // c for width in widths], dim=-1)
        query, key, value = (part.unflatten(-1, (-1, t.shape[3])) for part, t in zip(parts, tensors, strict=True))
        return query, key, value


def attend_dense(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention over each sequence of a batch.

    Args:
        query: [S, B, Hq, K]. key, value: [S, B, Hk, K] and [S, B, Hk, V]; Hk divides Hq.
        scale: None: 1 / sqrt(K).

    Returns:
        [S, B, Hq, V].

    Raises:
        RuntimeError: on CUDA, from torch: neither cuDNN nor flash attention takes these dtypes or head sizes.
    """
    query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    is_grouped = query.shape[1] != key.shape[1]
    if query.is_cuda:
        with sdpa_kernel(CUDA_BACKENDS, set_priority=True):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped)
    else:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped)
    return out.permute(2, 0, 1, 3)


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float | None = None
) -> Tensor:
    """Causal attention within each document of a pack.

    Args:
        query: [T, Hq, K]. key, value: [T, Hk, K] and [T, Hk, V]; Hk divides Hq. On CUDA: float16 or bfloat16, V = K.
        cu_seqlens: [N + 1], offsets of the documents, from 0 to T. On CUDA not read by the host.
        longest: at least the length of the longest document.
        scale: None: 1 / sqrt(K).

    Returns:
        [T, Hq, V].

    Raises:
        NotImplementedError: on CUDA, another dtype, heads wider than 256, V different from K.
    """
    if not query.is_cuda:
        lengths = cu_seqlens.diff().tolist()
        documents = zip(*(t.unsqueeze(1).split(lengths) for t in (query, key, value)), strict=True)
        return torch.cat([attend_dense(q, k, v, scale).squeeze(1) for q, k, v in documents if len(q)])
    if query.dtype not in (torch.float16, torch.bfloat16) or query.shape[-1] > 256 or value.shape != key.shape:
        raise NotImplementedError(
            "packed attention on CUDA takes float16 or bfloat16 and equal head sizes up to 256, got "
            f"{query.dtype}, query {tuple(query.shape)}, value {tuple(value.shape)}"
        )
    offsets = cu_seqlens.to(query.device, torch.int32).contiguous()
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    # A window of all tokens to the left and none to the right is the causal mask.
    out = varlen_attn(query, key, value, offsets, offsets, longest, longest, scale=scale, window_size=(-1, 0))
    assert isinstance(out, Tensor)  # a tuple only where more is asked for
    return out


def _check_mask(mask: AttnMaskType) -> None:
    if mask not in CAUSAL_MASKS:
        raise NotImplementedError(f"attn_mask_type must be causal without Transformer Engine, got {mask}")


def _check_exchange(key_heads: int, c: int) -> None:
    if key_heads % c:
        raise NotImplementedError(
            f"context parallelism exchanges heads: the key and value heads on a tensor parallel rank must be a "
            f"multiple of the context parallel size {c}, got {key_heads}; use a smaller context or tensor parallel size"
        )


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise ValueError(f"query, key and value must have shape [S, B, H, K], or [S, H, K] when packed, got {shapes}")
    if query.shape[:2] != key.shape[:2] or key.shape[:3] != value.shape[:3] or query.shape[3] != key.shape[3]:
        raise ValueError(f"query, key and value must agree in tokens, batch, key heads and head size, got {shapes}")
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"the query heads must be a multiple of the key heads, got {shapes}")
