"""Output layer and cross entropy in chunks of tokens: the logits of a long sequence are never whole.

With a vocabulary of 248,320 tokens the bf16 logits of 262,144 tokens would take 121 GiB. Here a chunk of tokens passes
the output layer, gives its losses, and its logits are gone before the next. With y the label, p = softmax(logits) and
g the gradient of a token's loss:

    loss = log sum exp(logits) - logits[y]
    dlogits = g (p - onehot(y)),  dhidden = dlogits W,  dW = dlogits^T hidden

Two ways to the gradients, both exact:

- Losses that are only summed (`is_summed`) have one g for all tokens, so that dhidden and dW of g = 1 are made in the
  forward pass, while a chunk's logits are there, and backward multiplies them by g: three matrix products, as in the
  plain path. It costs memory for dW in float32 from forward to backward. A gradient that is not one number for all
  tokens is refused.
- Else g is known in backward alone, and dW cannot be corrected for it afterwards: backward makes the logits of each
  chunk again. Four matrix products. Multi-token prediction masks and weights its losses, and takes this way.

Over tensor parallel ranks each holds a part of the vocabulary's rows: they exchange, per token, the logarithm of their
sum of exponentials and the label's logit, in float32, and all come to the same loss. The logits themselves have the
dtype of the hidden states, as in the plain path; exponentials, sums and losses are float32; dW is summed up in float32.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

CHUNK_BYTES = 256 << 20
"""Default limit for the logits of one chunk on one rank, bytes. Larger chunks read and write dW less often."""
IGNORED = -100
"""The label of a token without loss."""


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    sequence_parallel: bool = False,
    is_summed: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Cross entropy of each token, nats.

    Args:
        hidden: [T, B, D]; under sequence parallelism this rank's part of the tokens, [T / t, B, D].
        weight: [V / t, D], this rank's rows of the output layer, in the order of ranks; the dtype of `hidden`.
        labels: int64 [B, T], the same on all ranks; IGNORED where there is no loss. Another label outside [0, V) has
            the loss NaN: labels on a device are not read by the host.
        group: the t tensor parallel ranks; None: this rank alone.
        sequence_parallel: whether `hidden` is split over the ranks by tokens.
        is_summed: the losses are summed and nothing else: their gradient is one number (see above).
        chunk_bytes: limit for the logits of a chunk, which has at least one token.

    Returns:
        [B, T] float32, 0 where the label is IGNORED.

    Raises:
        ValueError: shapes that do not fit, `chunk_bytes` below 1.
        TypeError: dtypes that do not fit.
        NotImplementedError: in backward: `is_summed`, but the gradient is not one number for all tokens.
    """
    return _losses(hidden, weight, labels, group, sequence_parallel, is_summed, chunk_bytes, finds_largest=False)[0]


def use_chunked_loss(model: LanguageModule, *, is_summed: bool = False, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Let a GPTModel or HybridModel compute its losses, multi-token prediction's too, by `chunked_cross_entropy`.

    Called with labels, the model returns losses as before, [B, T]; without, logits. To be called before the model is
    wrapped (the builder's `pre_wrap_hooks`). A pipeline stage without an output layer is left as it is.

    Args:
        model: the model, or its last pipeline stage.
        is_summed: the caller sums the main losses and does nothing else to them.
        chunk_bytes: limit for the logits of a chunk.

    Raises:
        NotImplementedError: an output layer with a bias, of another class than ColumnParallelLinear, which gathers its
            output or defers its weight's gradient; scaled logits (`use_mup`).
    """
    if model.post_process:
        _Head(model, is_summed, chunk_bytes)


class _Head:
    """The seam: where the model was given labels, the output layer hands its input on, and the loss does both.

    The model passes what the output layer returns to `compute_language_model_loss` and looks at it nowhere else, but
    for the greedy tokens of multi-token prediction, which `_PostponedLogits` knows.
    """

    def __init__(self, model: LanguageModule, is_summed: bool, chunk_bytes: int) -> None:
        layer = model.output_layer
        for what, found, supported in (
            ("output_layer", type(layer), ColumnParallelLinear),
            ("output_layer.bias", layer.bias, None),
            ("output_layer.gather_output", layer.gather_output, False),
            ("defer_embedding_wgrad_compute", model.config.defer_embedding_wgrad_compute, False),
            ("use_mup", model.config.use_mup, False),
        ):
            if found is not supported:
                raise NotImplementedError(f"{what} must be {supported} with the chunked loss, got {found}")
        self.model, self.layer, self.is_summed, self.chunk_bytes = model, layer, is_summed, chunk_bytes
        self.labels: Tensor | None = None
        self.parameters = inspect.signature(model.forward)
        self.layers_forward, self.models_loss = layer.forward, model.compute_language_model_loss
        model.register_forward_pre_hook(self.note_labels, with_kwargs=True)
        layer.forward, model.compute_language_model_loss = self.output, self.loss

    def note_labels(self, model: LanguageModule, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.labels = self.parameters.bind(*args, **keywords).arguments.get("labels")

    def output(self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        if self.labels is None:
            return self.layers_forward(hidden, weight=weight, runtime_gather_output=runtime_gather_output)
        return _PostponedLogits(hidden, self.layer.weight if weight is None else weight), None

    def loss(self, labels: Tensor, logits: Any) -> Tensor:
        if not isinstance(logits, _PostponedLogits):
            return self.models_loss(labels, logits)
        is_main = labels is self.labels  # multi-token prediction has rolled copies
        losses, *logits.largest = _losses(
            logits.hidden, logits.weight, labels, self.layer.tp_group, self.layer.sequence_parallel,
            is_main and self.is_summed, self.chunk_bytes, finds_largest=not is_main and self.model.training,
        )  # fmt: skip
        return losses


class _PostponedLogits:
    """The logits that would be `hidden` through the output layer: their largest are known once the loss is computed."""

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self.hidden, self.weight = hidden, weight
        self.largest: list[Tensor] = []

    def size(self, dim: int) -> int:
        """Rows of the vocabulary here; of other dimensions nobody asks."""
        assert dim == -1
        return self.weight.shape[0]

    def max(self, dim: int) -> list[Tensor]:
        """The largest logit here and its row, [T, B] each."""
        assert dim == -1
        return self.largest

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), keywords: Any = None) -> Tensor:
        if func is not torch.argmax:
            raise NotImplementedError(f"logits are never whole with the chunked loss, asked for {func.__name__}")
        return args[0].largest[1]


def _losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup | None, sequence_parallel: bool,
    is_summed: bool, chunk_bytes: int, *, finds_largest: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Losses [B, T], and of this rank's logits the largest and its row, both [T, B] (empty if not `finds_largest`)."""
    if group is not None and group.size() == 1:
        group = None
    _check(hidden, weight, labels, group.size() if group is not None and sequence_parallel else 1, chunk_bytes)
    if group is not None:  # their backwards sum the ranks' parts of dhidden
        if sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    has_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _ChunkedCrossEntropy.apply(
        hidden, weight, labels, group, chunk_bytes, is_summed and has_gradient, finds_largest
    )  # fmt: skip


class _ChunkedCrossEntropy(torch.autograd.Function):
    """On all tokens and this rank's rows. `in_forward`: make the gradients of g = 1 in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup | None, chunk_bytes: int,
        in_forward: bool, finds_largest: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        tokens, width = math.prod(hidden.shape[:2]), hidden.shape[2]
        x, y = hidden.reshape(tokens, width), labels.t().reshape(tokens)
        rows = weight.shape[0]
        first = 0 if group is None else group.rank() * rows
        vocabulary = rows * (1 if group is None else group.size())
        losses, sums = (x.new_empty(tokens, dtype=torch.float32) for _ in range(2))
        found = tokens if finds_largest else 0
        largest, place = x.new_empty(found, dtype=torch.float32), y.new_empty(found)
        dx = torch.empty_like(x) if in_forward and hidden.requires_grad else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if in_forward and weight.requires_grad else None
        for part in _chunks(tokens, rows * x.element_size(), chunk_bytes):
            logits, label = x[part] @ weight.t(), y[part]
            if finds_largest:
                values, place[part] = logits.max(dim=-1)
                largest[part] = values
            sums[part], target = _over_ranks(_log_sum_exp(logits), _target(logits, label - first), group)
            has_loss = label != IGNORED
            is_wrong = has_loss & ((label < 0) | (label >= vocabulary))
            losses[part] = (sums[part] - target).masked_fill(~has_loss, 0.0).masked_fill(is_wrong, math.nan)
            if in_forward:
                dlogits = _softmax_less_label(logits, sums[part], label - first, has_loss.float())
                _gradients(dlogits, x[part], weight, None if dx is None else dx[part], dw)
        ctx.in_forward, ctx.first, ctx.chunk_bytes, ctx.shape = in_forward, first, chunk_bytes, hidden.shape
        ctx.save_for_backward(weight, dx, dw, *(() if in_forward else (x, y, sums)))
        shape = hidden.shape[:2] if finds_largest else (0,)
        outputs = losses.view(hidden.shape[:2]).t(), largest.view(shape), place.view(shape)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Any, ...]:
        weight, dx, dw, *rest = ctx.saved_tensors
        if ctx.in_forward:
            factor = _one_number(g)
            dx = None if dx is None else _scaled(dx, factor)
            dweight = None if dw is None else _deliver(weight, dw, factor)
        else:
            x, y, sums = rest
            dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
            dw = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
            g = g.t().reshape(-1).float().masked_fill(y == IGNORED, 0.0)
            for part in _chunks(len(x), weight.shape[0] * x.element_size(), ctx.chunk_bytes):
                dlogits = _softmax_less_label(x[part] @ weight.t(), sums[part], y[part] - ctx.first, g[part])
                _gradients(dlogits, x[part], weight, None if dx is None else dx[part], dw)
            dweight = None if dw is None else _deliver(weight, dw)
        return None if dx is None else dx.view(ctx.shape), dweight, None, None, None, None, None


def _chunks(tokens: int, token_bytes: int, chunk_bytes: int) -> Iterator[slice]:
    """Even parts of the tokens, each below the limit; whole blocks of 128 where they fit, for the matrix products."""
    most = max(1, chunk_bytes // token_bytes)
    size = -(-tokens // -(-tokens // most)) if tokens else 1
    if most >= 128:
        size = min(-(-size // 128), most // 128) * 128
    return (slice(begin, min(begin + size, tokens)) for begin in range(0, tokens, size))


def _fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function through torch.compile on a GPU, where it would else pass over its first argument several times."""
    compiled = functools.cache(lambda: torch.compile(function))

    @functools.wraps(function)
    def call(logits: Tensor, *rest: Tensor) -> Tensor:
        return (compiled() if logits.is_cuda else function)(logits, *rest)

    return call


@_fused
def _log_sum_exp(logits: Tensor) -> Tensor:
    """[C, V] -> [C] float32, the largest logit taken out before exp."""
    return torch.logsumexp(logits.float(), dim=-1)


@_fused
def _softmax_less_label(logits: Tensor, sums: Tensor, row: Tensor, g: Tensor) -> Tensor:
    """g (softmax - onehot), [C, V] in the logits' dtype. `row` [C]: the label's row, anything else where not here."""
    softmax = torch.exp(logits.float() - sums[:, None])
    is_label = torch.arange(logits.shape[1], device=logits.device) == row[:, None]
    return ((softmax - is_label.float()) * g[:, None]).to(logits.dtype)


@_fused
def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    """factor x in the dtype of x; the factor is not rounded to it."""
    return (x.float() * factor).to(x.dtype)


def _target(logits: Tensor, row: Tensor) -> Tensor:
    """The logit of the label, [C] float32; 0 where its row is not here."""
    is_here = (row >= 0) & (row < logits.shape[1])
    return logits.gather(1, row.where(is_here, 0)[:, None])[:, 0].float().where(is_here, 0.0)


def _over_ranks(sums: Tensor, target: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """The two of the whole vocabulary, each [C]: every rank adds the same numbers in the same order."""
    if group is None:
        return sums, target
    both = torch.stack([sums, target])
    everyone = both.new_empty(group.size() * 2, sums.shape[0])
    dist.all_gather_into_tensor(everyone, both, group=group)
    everyone = everyone.view(group.size(), 2, -1)
    return torch.logsumexp(everyone[:, 0], dim=0), everyone[:, 1].sum(dim=0)


def _gradients(dlogits: Tensor, x: Tensor, weight: Tensor, dx: Tensor | None, dw: Tensor | None) -> None:
    """Write dx [C, D] and add to dw [V, D] float32."""
    if dx is not None:
        torch.mm(dlogits, weight, out=dx)
    if dw is None:
        return
    if dw.dtype == x.dtype:
        dw.addmm_(dlogits.t(), x)
    elif dw.is_cuda:
        torch.addmm(dw, dlogits.t(), x, out_dtype=dw.dtype, out=dw)
    else:  # torch has no mixed product on the CPU
        dw.addmm_(dlogits.t().to(dw.dtype), x.to(dw.dtype))


def _one_number(g: Tensor) -> Tensor:
    """The number that all elements of g [B, T] are, as `.sum()` sends back: an expanded scalar, seen by its strides."""
    if any(stride for stride, size in zip(g.stride(), g.shape, strict=True) if size > 1):
        raise NotImplementedError(
            "is_summed=True takes the gradient of a sum, one number for all tokens, got a gradient for each token; "
            "use is_summed=False where losses are weighted, and IGNORED labels for tokens without loss"
        )
    return g[(0,) * g.dim()]


def _deliver(weight: Tensor, dw: Tensor, factor: Tensor | None = None) -> Tensor:
    """Hand over factor * dw: added to Megatron's gradient buffer where there is one, without a rounding to bf16."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return (dw if factor is None else dw * factor).to(weight.dtype)
    if factor is not None and main_grad.dtype == dw.dtype:
        main_grad.addcmul_(dw, factor)
    else:
        main_grad.add_(dw if factor is None else dw * factor)
    # Zeros, for the hooks that add what comes to the buffer and reduce it run only where a gradient comes. They are not
    # told that it is there already (grad_added_to_main_grad): they would drop the embedding's part of a tied weight.
    return weight.new_zeros(()).expand_as(weight)


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, splits: int, chunk_bytes: int) -> None:
    if hidden.dim() != 3 or weight.dim() != 2 or hidden.shape[2] != weight.shape[1]:
        raise ValueError(
            f"hidden must have shape [T, B, D] and weight [V, D], got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    expected = hidden.shape[1], hidden.shape[0] * splits
    if labels.shape != expected:
        raise ValueError(f"labels must have shape [B, T] = {expected}, got {tuple(labels.shape)}")
    if labels.dtype != torch.int64:
        raise TypeError(f"labels must be int64, got {labels.dtype}")
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise TypeError(f"hidden and weight must have the same floating dtype, got {hidden.dtype} and {weight.dtype}")
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
