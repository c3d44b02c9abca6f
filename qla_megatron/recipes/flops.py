"""Floating-point operations of a model, by kind: what MFU and a plan count.

Conventions, as usual for model FLOPs: a multiplication and an addition are two; backward is twice forward; activations
computed again are not counted, nor is what is done element by element (norms, gates, softmax, rotary embedding), nor
the lookup of embeddings. Causal attention is counted by the pairs that the mask leaves: a document of L tokens has
L (L + 1) / 2. The gated delta rule is counted as its recurrence, whatever a kernel does in chunks: for each value head
and token 2 K V each for S^T k, for the update by an outer product and for S^T q, and K V for the decay.
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from qla_megatron.recipes.recipe import Model

PEAK_BF16_FLOPS = {"h100": 989.4e12, "h200": 989.4e12}
"""Dense bf16 tensor-core peak of one device by `parallel.device`, FLOPs a second (NVIDIA's data sheets, SXM)."""


@dataclass(frozen=True)
class Flops:
    """FLOPs of one token slot, by kind. They add, and scale by a number."""

    projections: float = 0.0
    """Linear layers of the mixers (gates included), the convolution, and the joining projection of token prediction."""
    rule: float = 0.0
    """The gated delta rule."""
    attention: float = 0.0
    """Scores and weighted sums of full attention."""
    mlp: float = 0.0
    """SwiGLU layers; in a mixture: the router, the experts that a token passes, the shared expert and its gate."""
    vocabulary: float = 0.0
    """The output layer."""

    @property
    def total(self) -> float:
        """All kinds together."""
        return sum(astuple(self))

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, factor: float) -> "Flops":
        return Flops(*(factor * value for value in astuple(self)))

    __rmul__ = __mul__


def flops_per_token(model: Model, document_lengths: Iterable[int], *, backward: bool = True) -> Flops:
    """Mean FLOPs of one token slot of a pack, over the whole model.

    Args:
        model: the shapes; each multi-token prediction block has an output layer's work of its own.
        document_lengths: padded lengths of the documents of one pack or of several, tokens.
        backward: whether to count backward, too.

    Raises:
        ValueError: there is no token in `document_lengths`, or a negative length.
    """
    return flops_at(model, attended_tokens(document_lengths), backward=backward)


def flops_at(model: Model, attended: float, *, backward: bool = True) -> Flops:
    """The same, with the mean number of tokens that a token attends to (see `attended_tokens`)."""
    full = model.num_layers // model.attention_interval
    mlp = mlp_flops(model)
    forward = full * (attention_flops(model, attended) + mlp) + output_flops(model)
    forward += (model.num_layers - full) * (gdn_flops(model) + mlp)
    join = Flops(projections=2 * 2 * model.hidden_size**2)
    forward += model.prediction_layers * (join + attention_flops(model, attended) + mlp + output_flops(model))
    return 3 * forward if backward else forward


def attended_tokens(document_lengths: Iterable[int]) -> float:
    """Mean number of tokens that a token sees in full attention, itself included: sum L (L + 1) / 2 over sum L.

    Raises:
        ValueError: there is no token, or a negative length.
    """
    lengths = [int(length) for length in document_lengths]
    if min(lengths, default=0) < 0 or not sum(lengths):
        raise ValueError(f"document_lengths must be numbers of tokens, at least one above 0, got {lengths[:8]}")
    return sum(length * (length + 1) for length in lengths) / (2 * sum(lengths))


def gdn_flops(model: Model) -> Flops:
    """One GDN mixer, forward, a token."""
    key, value = model.gdn_key_heads * model.gdn_key_dim, model.gdn_value_heads * model.gdn_value_dim
    in_rows = 2 * key + 2 * value + 2 * model.gdn_value_heads  # q k, v and its gate, beta and alpha
    convolution = model.gdn_conv_width * (2 * key + value)
    return Flops(
        projections=2 * (model.hidden_size * (in_rows + value) + convolution), rule=7 * value * model.gdn_key_dim
    )


def attention_flops(model: Model, attended: float) -> Flops:
    """One full-attention mixer with output gate, forward, a token that attends to `attended` tokens."""
    width, key_value = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    return Flops(
        projections=2 * model.hidden_size * (2 * width + key_value + width), attention=2 * 2 * width * attended
    )


def mlp_flops(model: Model) -> Flops:
    """One layer's MLP or mixture of experts, forward, a token."""
    if model.num_experts is None:
        return Flops(mlp=2 * 3 * model.hidden_size * (model.ffn_hidden_size or 0))
    shared = model.shared_expert_hidden_size
    width = model.experts_per_token * (model.expert_hidden_size or 0) + (shared or 0)
    gates = model.num_experts + (shared is not None)
    return Flops(mlp=2 * model.hidden_size * (3 * width + gates))


def output_flops(model: Model) -> Flops:
    """The output layer, forward, a token."""
    return Flops(vocabulary=2 * model.hidden_size * model.padded_vocab_size)
