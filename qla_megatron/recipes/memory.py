"""Memory of one GPU, by kind, in bytes: what Megatron allocates for a recipe, without Transformer Engine.

Per parameter: its weight (bf16: 2; A_log, dt_bias and GDN's output norm: 4), its gradient in the data-parallel buffer
(4, or 2 where gradients are not reduced in float32), and in the optimizer two moments and, for bf16, the float32 weight
(12 in all, shared out over the data-parallel processes by the distributed optimizer).

Per token: what the layers save for backward, on the fused kernels. The tables `gdn_mixer`, `attention_mixer`,
`dense_mlp` and `mixture_of_experts` list the saved tensors one by one; tests compare them with what autograd really
saves. A tensor saved by two operations is counted once. float32 copies come from norms computed in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from qla_megatron.recipes import parameters
from qla_megatron.recipes.recipe import Model, Recipe

CHUNK = 64
"""Tokens of a chunk of the gated delta rule."""
STATE_INTERVAL = 16
"""The kernels save the state at the start of one chunk in so many."""
MEAN_DOCUMENT = 1024
"""Tokens of a mean document, an assumption: every document costs a chunk more, and a state."""
RULE_WORKSPACE = 2816 << 20
"""Bytes at most of the rule's backward pass beside its inputs and outputs (kernels/gated_delta_rule)."""
OUT_PROJ_INPUT = "out_proj's input"
EXPERT_IMBALANCE = 1.2
"""Tokens that come to the busiest expert-parallel process, over the mean: an assumption for a balanced router."""


@dataclass(frozen=True)
class Tokens:
    """Tokens of one micro-batch on one GPU."""

    gathered: float
    """Inside the tensor-parallel layers: the sequence over context parallel size."""
    own: float
    """Between them: under sequence parallelism, the same over tensor parallel size."""
    documents: float = 0.0
    """Documents of the micro-batch that a GPU sees, with context parallelism over head shards, as a share."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one GPU of a pipeline stage, by kind, and the peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: dict[str, float]
    """Saved for backward, all micro-batches in flight together: by GDN mixers, attention mixers, MLPs, boundaries."""
    loss: float
    """The most that output layer and loss hold at a time."""
    backward: float
    """The most that the backward pass of one layer holds beside what is saved, recomputed activations included."""
    optimizer_step: float
    """Temporary tensors of the optimizer's step, when activations are gone."""

    @property
    def static(self) -> float:
        """What stays from step to step."""
        return self.weights + self.gradients + self.optimizer

    @property
    def saved(self) -> float:
        """All activations."""
        return sum(self.activations.values())

    @property
    def peak(self) -> float:
        """The largest of the three moments: loss, first backward step, optimizer step."""
        return self.static + max(self.saved + max(self.loss, self.backward), self.optimizer_step)


def of_stages(recipe: Recipe) -> list[StageMemory]:
    """The memory of a GPU of each pipeline stage."""
    return [of_stage(recipe, stage) for stage in range(recipe.parallel.pipeline)]


def of_stage(recipe: Recipe, stage: int) -> StageMemory:
    """The memory of a GPU of one pipeline stage."""
    weights, gradients, optimizer, step = _static(recipe, stage)
    is_last = stage == recipe.parallel.pipeline - 1
    return StageMemory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=_activations(recipe, stage),
        loss=_loss(recipe) if is_last else 0.0,
        backward=_backward(recipe),
        optimizer_step=step,
    )


def tokens_here(recipe: Recipe) -> Tokens:
    """Tokens of a micro-batch (one sequence) on one GPU."""
    p = recipe.parallel
    gathered = recipe.data.sequence_length / p.context
    return Tokens(gathered, gathered / (p.tensor if p.sequence else 1), gathered / MEAN_DOCUMENT)


# --- weights, gradients, optimizer ---


def _static(recipe: Recipe, stage: int) -> tuple[float, float, float, float]:
    p, is_bf16 = recipe.parallel, recipe.precision.dtype == "bf16"
    here = parameters.of_stage(recipe, stage)
    dense, wide = here.split / p.tensor + here.whole, here.split_float32 / p.tensor + here.whole_float32
    experts = here.experts / p.expert
    weights = (2 if is_bf16 else 4) * (dense + experts) + 4 * wide
    gradient_bytes = 4 if recipe.precision.reduce_gradients_in_fp32 or not is_bf16 else 2
    gradients = gradient_bytes * (dense + experts) + 4 * wide
    shards, expert_shards = optimizer_shards(recipe)
    main = 4 if is_bf16 else 0
    optimizer = (8 + main) * (dense / shards + experts / expert_shards) + 8 * wide / shards
    step = 4 * ((dense + wide) / shards + experts / expert_shards)  # torch's AdamW: the root of the second moment
    return weights, gradients, optimizer, step


def optimizer_shards(recipe: Recipe) -> tuple[int, int]:
    """Over how many processes the optimizer's states are shared out: of dense parameters, of experts."""
    p = recipe.parallel
    if not recipe.optimizer.distributed:
        return 1, 1
    return p.data * p.context, max(p.gpus // (p.expert * p.pipeline), 1)


# --- activations ---


def gdn_mixer(m: Model, n: Tokens, tensor: int, *, width: int = 2) -> Iterator[tuple[str, float]]:
    """What a Gated DeltaNet mixer on the fused kernels saves in one forward pass, by name.

    Args:
        width: bytes of an activation.
    """
    heads = m.gdn_value_heads / tensor
    key, value = m.gdn_key_heads / tensor * m.gdn_key_dim, heads * m.gdn_value_dim
    yield from norm(m, n, width)
    yield "in_proj's output", width * (2 * key + 2 * value + 2 * heads) * n.gathered
    yield "rule: query, key, value", width * (2 * key + value) * n.gathered
    yield "rule: gate and strength", 2 * 4 * heads * n.gathered
    chunks = n.gathered / CHUNK + n.documents
    yield "rule: inverses of chunks, their gates", (width * CHUNK + 2 * 4) * heads * CHUNK * chunks
    yield "rule: states", 4 * m.gdn_key_dim * value * (chunks / STATE_INTERVAL + n.documents)
    yield "rule: output", width * value * n.gathered
    yield OUT_PROJ_INPUT, width * value * n.gathered


def attention_mixer(
    m: Model, n: Tokens, tensor: int, *, width: int = 2, context: int = 1
) -> Iterator[tuple[str, float]]:
    """What a full-attention mixer saves in one forward pass, by name."""
    heads, key_heads = m.num_heads / tensor, max(m.num_kv_heads / tensor, 1)
    query, key = heads * m.head_dim, key_heads * m.head_dim
    yield from norm(m, n, width)
    yield "query and key norms, float32", (4 * (query + key) + 4 * (heads + key_heads)) * n.gathered
    yield "rotary cosines and sines", 4 * width * m.head_dim * m.rotary_fraction * n.gathered
    yield "attention: query, key, value", width * (query + 2 * key) * n.gathered
    yield "attention: output and logarithms of sums", (width * query + 4 * heads) * n.gathered
    if context > 1:
        yield "attention: output, brought back to this GPU's tokens", width * query * n.gathered
    yield "output gate, float32", 4 * query * n.gathered
    yield "linear_proj's input", width * query * n.gathered


def norm(m: Model, n: Tokens, width: int) -> Iterator[tuple[str, float]]:
    """The norm before a mixer or an MLP, and its output, which the linear layer behind it saves."""
    yield "norm: float32 copy and root", (4 * m.hidden_size + 4) * n.own
    yield "norm's output", width * m.hidden_size * n.own


def dense_mlp(m: Model, n: Tokens, tensor: int, *, width: int = 2) -> Iterator[tuple[str, float]]:
    """What a SwiGLU layer saves in one forward pass, by name."""
    ffn = (m.ffn_hidden_size or 0) / tensor
    yield from norm(m, n, width)
    yield "linear_fc1's output", 2 * width * ffn * n.gathered
    yield "SwiGLU: SiLU, copy, product", 3 * width * ffn * n.gathered


def mixture_of_experts(
    m: Model, n: Tokens, tensor: int, *, width: int = 2, imbalance: float = 1.0
) -> Iterator[tuple[str, float]]:
    """What a mixture of experts saves in one forward pass, by name.

    Args:
        imbalance: routed tokens that come here, over the mean.
    """
    assert m.num_experts is not None
    chosen, experts = m.experts_per_token, m.num_experts
    yield from norm(m, n, width)
    yield "router: probabilities and places", (4 * experts + 20 * chosen + 8 * experts + 8 * chosen) * n.own
    if m.shared_expert_hidden_size is not None:
        yield "shared expert", 5 * width * m.shared_expert_hidden_size / tensor * n.gathered
        yield "shared expert's output and gate", width * (m.hidden_size + 1) * n.own
    routed = imbalance * chosen * n.own
    yield "tokens of experts", width * m.hidden_size * routed
    yield "experts: linear_fc1's output, SiLU, copy, products", (6 * width * (m.expert_hidden_size or 0) + 4) * routed


def layer_bytes(recipe: Recipe, is_attention: bool) -> dict[str, float]:
    """What one layer saves in one forward pass without recompute, by part."""
    m, n, p = recipe.model, tokens_here(recipe), recipe.parallel
    width = 2 if recipe.precision.dtype == "bf16" else 4
    if is_attention:
        mixer = sum(size for _, size in attention_mixer(m, n, p.tensor, width=width, context=p.context))
    else:
        mixer = sum(size for _, size in gdn_mixer(m, n, p.tensor, width=width))
    if m.num_experts is None:
        mlp = sum(size for _, size in dense_mlp(m, n, p.tensor, width=width))
    else:
        imbalance = EXPERT_IMBALANCE if p.expert > 1 else 1.0
        mlp = sum(size for _, size in mixture_of_experts(m, n, p.tensor, width=width, imbalance=imbalance))
    return {"attention mixers" if is_attention else "GDN mixers": mixer, "MLPs": mlp}


def kept_bytes(recipe: Recipe, is_attention: bool) -> dict[str, float]:
    """What of one layer stays from forward to backward under the recipe's recompute, by part."""
    m, n, recompute = recipe.model, tokens_here(recipe), recipe.train.recompute
    width = 2 if recipe.precision.dtype == "bf16" else 4
    whole = layer_bytes(recipe, is_attention)
    if recompute == "full":
        return {"layer inputs": width * m.hidden_size * n.own}
    if recompute == "mlp":
        whole["MLPs"] = sum(size for _, size in norm(m, n, width))
    if recompute in ("norms", "mlp") and not is_attention:
        whole["GDN mixers"] -= dict(gdn_mixer(m, n, recipe.parallel.tensor, width=width))[OUT_PROJ_INPUT]
    return whole


def in_flight(recipe: Recipe, stage: int) -> float:
    """Passes through all layers of a stage whose activations it holds at the most, in micro-batches.

    One-forward-one-backward: a stage is as many forward passes ahead as there are stages behind it, and one.
    Interleaved: Megatron's count of warm-up passes through chunks, and one.
    """
    p, micro_batches = recipe.parallel, recipe.train.global_batch // max(recipe.parallel.data, 1)
    if not p.layers_per_virtual_stage:
        return min(p.pipeline - stage, micro_batches)
    chunks = len(parameters.stage_layers(recipe)[stage])
    warm_up = 2 * (p.pipeline - stage - 1) + (chunks - 1) * p.pipeline
    return min(warm_up + 1, micro_batches * chunks) / chunks


def _activations(recipe: Recipe, stage: int) -> dict[str, float]:
    m, n = recipe.model, tokens_here(recipe)
    width = 2 if recipe.precision.dtype == "bf16" else 4
    kept: dict[str, float] = {}
    for is_attention, layers in zip((False, True), parameters.layers_of_stage(recipe, stage), strict=True):
        for part, size in kept_bytes(recipe, is_attention).items():
            kept[part] = kept.get(part, 0.0) + layers * size * in_flight(recipe, stage)
    boundaries = 4 * 8 * n.gathered  # tokens, labels, positions, mask
    if stage == 0 or recipe.parallel.pipeline > 1:
        boundaries += width * m.hidden_size * n.own * in_flight(recipe, stage)  # the embeddings, or what came in
    if stage == recipe.parallel.pipeline - 1:
        final_norm = sum(size for _, size in norm(m, n, width))
        boundaries += final_norm
        kept["prediction blocks"] = m.prediction_layers * _prediction_bytes(recipe)
    return kept | {"boundaries": boundaries}


def _prediction_bytes(recipe: Recipe) -> float:
    m, n = recipe.model, tokens_here(recipe)
    width = 2 if recipe.precision.dtype == "bf16" else 4
    if recipe.train.recompute == "full":
        return (2 * width + width) * m.hidden_size * n.own
    # Two norms, and what they make, side by side: the projection's input.
    joined = (2 * (4 * m.hidden_size + 4) + 2 * width * m.hidden_size) * n.own
    final_norm = sum(size for _, size in norm(m, n, width))
    return joined + sum(kept_bytes(recipe, True).values()) + final_norm


def _loss(recipe: Recipe) -> float:
    m, n, tensor = recipe.model, tokens_here(recipe), recipe.parallel.tensor
    width = 2 if recipe.precision.dtype == "bf16" else 4
    rows = m.padded_vocab_size / tensor
    if recipe.train.chunked_loss:
        chunk = min(recipe.train.loss_chunk_mib << 20, width * rows * n.gathered)
        losses, hidden = 1 + m.prediction_layers, width * m.hidden_size * n.gathered
        # Logits of a chunk, their gradient, and one of the two from the chunk before; for each loss the output layer's
        # gradient in float32, and its hidden states; the main loss's gradient of them.
        return 3 * chunk + losses * (4 * rows * m.hidden_size + hidden) + hidden
    # Logits and their float32 copy, which becomes the softmax; that of a prediction block is made before, and stays.
    return (width + 4 + 4 * m.prediction_layers) * rows * n.gathered


def _backward(recipe: Recipe) -> float:
    """Gradients of a layer's largest tensors at one moment, and its activations where they are computed again.

    A layer's backward pass begins with its MLP; when it comes to the mixer, what the MLP saved is gone.
    """
    m, n, recompute = recipe.model, tokens_here(recipe), recipe.train.recompute
    width, tensor = 2 if recipe.precision.dtype == "bf16" else 4, recipe.parallel.tensor
    key, value = m.gdn_key_heads * m.gdn_key_dim / tensor, m.gdn_value_heads * m.gdn_value_dim / tensor
    residual = (2 * width + 4) * m.hidden_size * n.own
    if m.num_experts is None:
        mlp = 3 * width * (m.ffn_hidden_size or 0) / tensor * n.gathered
    else:
        routed = m.experts_per_token * n.own * (EXPERT_IMBALANCE if recipe.parallel.expert > 1 else 1.0)
        mlp = (3 * width * m.hidden_size + 3 * width * (m.expert_hidden_size or 0)) * routed
    states = 2 * m.gdn_value_heads / tensor * m.gdn_value_dim * (2 * m.gdn_key_dim + CHUNK) * n.gathered / CHUNK
    # Gradients of q, k, v, of in_proj's output, and of the rule's output and gate.
    gdn = width * (2 * (2 * key + value) + 4 * value) * n.gathered + min(states, RULE_WORKSPACE)
    attention = 4 * m.num_heads * m.head_dim / tensor * 3 * n.gathered
    most = 0.0
    for is_attention, mixer in ((False, gdn), (True, attention)):
        mixers, mlps = layer_bytes(recipe, is_attention).values()
        if recompute == "full":
            moments = mlp + mixers + mlps, mixer + mixers
        elif recompute == "mlp":
            moments = mlp + mlps, mixer
        else:
            moments = mlp, mixer - mlps
        most = max(most, *moments)
    return residual + most
