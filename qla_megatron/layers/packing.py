"""The offsets of packed documents, checked without waiting for a device."""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


def document_offsets(packed: PackedSeqParams | None, tokens: int, batch: int, cp_size: int) -> Tensor | None:
    """The offsets [N + 1] of the documents in `tokens` tokens, or None where the batch is not packed.

    Packed means a `qkv_format` of "thd". Padded offsets are taken where there are both.

    Raises:
        NotImplementedError: a batch of packed sequences; context parallel groups that change from batch to batch.
        ValueError: offsets that do not fit, as far as they are on the CPU (see `checked_offsets`).
    """
    if packed is None or packed.qkv_format != "thd":
        return None
    if batch != 1:
        raise NotImplementedError(f"hidden_states must have batch 1 when packed, got {batch}")
    if packed.local_cp_size is not None and packed.local_cp_size != cp_size:
        raise NotImplementedError(
            f"context parallel groups of varying size are not supported: packed_seq_params.local_cp_size must be None "
            f"or {cp_size}, got {packed.local_cp_size}"
        )
    offsets = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    of_keys = packed.cu_seqlens_kv if packed.cu_seqlens_kv_padded is None else packed.cu_seqlens_kv_padded
    checked = (tokens, cp_size, _version(offsets), _version(of_keys))
    if getattr(packed, "_offsets_checked", (None,))[0] == checked:
        return offsets
    offsets = checked_offsets(offsets, tokens, "cu_seqlens_q", cp_size)
    if of_keys is not None and of_keys is not offsets:
        if of_keys.shape != offsets.shape:
            raise ValueError(f"cu_seqlens_kv must equal cu_seqlens_q, got {of_keys.shape} and {offsets.shape}")
        _require((of_keys == offsets).all(), "cu_seqlens_kv must equal cu_seqlens_q", of_keys)
    # Every layer is handed the same object: the first one checks. The tensors are kept, so that none gets another's id.
    packed._offsets_checked = checked, offsets, of_keys
    return offsets


def _version(offsets: Tensor | None) -> tuple[int, int] | None:
    """What changes when another tensor takes the place of this one, or other values are written into it."""
    if not isinstance(offsets, Tensor):
        return None
    return id(offsets), 0 if offsets.is_inference() else offsets._version


def checked_offsets(offsets: Tensor | None, tokens: int, name: str, cp_size: int) -> Tensor:
    """`offsets` as they are. They start at 0, never fall and end at `tokens`; with context parallelism every length
    divides by 2 `cp_size`, for zigzag gives a rank one piece from a document's front and one from its back.

    Raises:
        ValueError: not so, for offsets on the CPU. Those on a device are checked there, which aborts the run with the
            message, since reading them would make the host wait in every layer.
    """
    if not isinstance(offsets, Tensor) or offsets.dim() != 1 or offsets.numel() < 2:
        raise ValueError(f"{name} must have shape [N + 1] with N > 0, got {offsets}")
    lengths = offsets.diff()
    _require((offsets[0] == 0) & (lengths >= 0).all(), f"{name} must start at 0 and never fall", offsets)
    _require(
        offsets[-1] == tokens,
        f"{name}[-1] must be the number of tokens: it does not match the total sequence length {tokens}",
        offsets,
    )
    if cp_size > 1:
        _require(
            (lengths % (2 * cp_size) == 0).all(),
            f"lengths in {name} must be divisible by cp_size and by two pieces a rank, {2 * cp_size}",
            offsets,
        )
    return offsets


def _require(condition: Tensor, message: str, offsets: Tensor) -> None:
    """Raise ValueError unless the boolean scalar holds; on a device, abort there instead of waiting for it."""
    if condition.device.type != "cpu":
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(f"{message}, got {offsets.tolist()}")
