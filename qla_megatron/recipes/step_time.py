"""The time of a training step and what it sends, from kernel rates measured one by one.

A model, not a measurement: products by their FLOPs, the gated delta rule by its chunks, everything element by element
by the bytes that it saves, communication by its bytes; added up, for the slowest pipeline stage. RATES says which of
its numbers were measured and which are assumed.
"""

from dataclasses import dataclass

from qla_megatron.recipes import flops, memory, parameters
from qla_megatron.recipes.memory import CHUNK
from qla_megatron.recipes.recipe import Recipe


@dataclass(frozen=True)
class Rate:
    """A number and where it comes from."""

    value: float
    unit: str
    source: str


RATES = {
    "gemm": Rate(790e12, "FLOP/s", "measured on H200: bf16 products of a layer of hidden size 2048, 32,768 tokens"),
    "small_gemm": Rate(0.75, "of gemm", "assumed: products with a dimension of 1024 or less, and those of experts"),
    "copy": Rate(4.3e12, "byte/s", "measured on H200: device copy, bytes read and written; H100: 3.0e12 assumed"),
    "copy_h100": Rate(3.0e12, "byte/s", "assumed: H200's, by the ratio of the data sheets' bandwidths"),
    "passes_gdn": Rate(3.5, "bytes moved a byte saved", "counted: what the fused kernels and the norm read and write"),
    "passes_attention": Rate(8.0, "bytes moved a byte saved", "measured on H200: a layer of plain torch operations"),
    "passes_mlp": Rate(5.0, "bytes moved a byte saved", "counted: SwiGLU and norm in plain torch operations"),
    "rule_forward": Rate(24e-9, "s a chunk and value head", "measured on H200: 16/64 heads, 8 documents of 4096"),
    "rule_backward": Rate(114e-9, "s a chunk and value head", "measured on H200 with FlashQLA 0.1.3, the same shape"),
    "rule_serial": Rate(1.25e-6, "s a chunk", "measured on H200: one document of 32,768 tokens and 8 heads"),
    "attention_forward": Rate(310e12, "FLOP/s", "measured on H200: torch varlen_attn, heads of 256, 32,768 tokens"),
    "attention_backward": Rate(208e12, "FLOP/s", "the same; a backward pass counted as two forward passes"),
    "nvlink": Rate(360e9, "byte/s a GPU and direction", "assumed: 80 % of the data sheet's 450e9"),
    "network": Rate(42e9, "byte/s a GPU and direction", "assumed: 85 % of one 400 Gb/s port a GPU"),
    "optimizer": Rate(60.0, "bytes moved a parameter of a shard", "assumed: torch's AdamW over lists of tensors"),
}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on one GPU of the slowest pipeline stage, by kind."""

    products: float
    rule: float
    attention: float
    elementwise: float
    communication: float
    """What is not hidden behind computation."""
    bubble: float
    """Waiting for other pipeline stages."""
    optimizer: float

    @property
    def total(self) -> float:
        """The whole step."""
        compute = self.products + self.rule + self.attention + self.elementwise
        return compute + self.communication + self.bubble + self.optimizer


@dataclass(frozen=True)
class _Pass:
    """Seconds of one forward or backward pass of a micro-batch through a stage."""

    products: float = 0.0
    rule: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.rule + self.attention + self.elementwise


def sent_bytes(recipe: Recipe) -> dict[str, float]:
    """Bytes that one GPU sends in a step, by kind; the busiest pipeline stage for each."""
    p, stages = recipe.parallel, range(recipe.parallel.pipeline)
    micro_batches = recipe.train.global_batch // max(p.data, 1)
    sent = dict.fromkeys(("gradients", "parameters", "tensor", "context", "pipeline", "expert"), 0.0)
    for stage in stages:
        here = _reduced_bytes(recipe, stage)
        sent["gradients"] = max(sent["gradients"], here[0])
        sent["parameters"] = max(sent["parameters"], here[1])
        for kind, size in _micro_batch_bytes(recipe, stage).items():
            sent[kind] = max(sent[kind], micro_batches * size)
    return sent


def _reduced_bytes(recipe: Recipe, stage: int) -> tuple[float, float]:
    """Gradients and parameters that a GPU sends to its data-parallel peers in a step."""
    p, is_bf16 = recipe.parallel, recipe.precision.dtype == "bf16"
    here = parameters.of_stage(recipe, stage)
    dense = (here.split + here.split_float32) / p.tensor + here.whole + here.whole_float32
    peers = (p.data * p.context, dense), (max(p.gpus // (p.expert * p.pipeline), 1), here.experts / p.expert)
    weighed = sum(size * (group - 1) / group for group, size in peers)
    gradient_bytes = 4 if recipe.precision.reduce_gradients_in_fp32 or not is_bf16 else 2
    if not recipe.optimizer.distributed:
        return 2 * gradient_bytes * weighed, 0.0
    return gradient_bytes * weighed, (2 if is_bf16 else 4) * weighed


def _micro_batch_bytes(recipe: Recipe, stage: int) -> dict[str, float]:
    m, p, n = recipe.model, recipe.parallel, memory.tokens_here(recipe)
    width = 2 if recipe.precision.dtype == "bf16" else 4
    gdn_layers, attention_layers = parameters.layers_of_stage(recipe, stage)
    is_last = stage == p.pipeline - 1
    attention_layers += m.prediction_layers * is_last
    layers = gdn_layers + attention_layers
    again = 1 if recipe.train.recompute == "full" else 0
    # Forward gathers tokens and scatters sums; backward gathers gradients and inputs, and scatters sums.
    pairs = layers * (1 if m.num_experts and m.shared_expert_hidden_size is None else 2) + is_last
    tensor = pairs * (5 + 2 * again) * width * m.hidden_size * n.gathered * (p.tensor - 1) / p.tensor
    key, value = m.gdn_key_heads * m.gdn_key_dim, m.gdn_value_heads * m.gdn_value_dim
    gdn = 2 * key + 3 * value + 2 * m.gdn_value_heads
    attention = (2 * m.num_heads + 2 * max(m.num_kv_heads, p.tensor)) * m.head_dim
    exchanged = gdn_layers * gdn + attention_layers * attention
    context = (2 + again) * width * exchanged / p.tensor * n.gathered * (p.context - 1) / p.context
    routed = m.experts_per_token * n.own * width * m.hidden_size if m.num_experts else 0.0
    again_experts = recipe.train.recompute in ("full", "mlp")
    expert = layers * 2 * (2 + again_experts) * routed * (p.expert - 1) / p.expert
    chunks = len(parameters.stage_layers(recipe)[stage])
    pipeline = 2 * chunks * width * m.hidden_size * n.own * (p.pipeline > 1)
    return {"tensor": tensor, "context": context, "expert": expert, "pipeline": pipeline}


def speed_between(recipe: Recipe, kind: str) -> float:
    """Bytes a second of the slowest link inside a group. Megatron places tensor, context, then data parallel processes
    next to one another, pipeline stages apart; experts over consecutive processes."""
    p = recipe.parallel
    spans = {
        "tensor": p.tensor,
        "context": p.tensor * p.context,
        "expert": p.expert,
        "pipeline": p.gpus if p.pipeline > 1 else 1,
        "gradients": p.tensor * p.context * p.data,
        "parameters": p.tensor * p.context * p.data,
    }
    return RATES["nvlink" if spans[kind] <= p.gpus_per_node else "network"].value


def step_time(recipe: Recipe, document_length: int) -> StepTime:
    """The expected step, with documents of `document_length` tokens."""
    p = recipe.parallel
    micro_batches = recipe.train.global_batch // max(p.data, 1)
    stages = range(p.pipeline)
    passes = [(_forward(recipe, s, document_length), _backward(recipe, s, document_length)) for s in stages]
    slowest = max(stages, key=lambda s: passes[s][0].total + passes[s][1].total)
    forward, backward = passes[slowest]
    sent, per_micro_batch = _reduced_bytes(recipe, slowest), _micro_batch_bytes(recipe, slowest)
    inside = sum(size / speed_between(recipe, kind) for kind, size in per_micro_batch.items())
    chunks = len(parameters.stage_layers(recipe)[slowest])
    bubble = (p.pipeline - 1) / chunks * (forward.total + backward.total + inside)
    reduce, gather = (size / speed_between(recipe, "gradients") for size in sent)
    if recipe.optimizer.overlap:  # with the last backward pass and the first forward pass
        reduce, gather = max(reduce - backward.total, 0.0), max(gather - forward.total, 0.0)
    here, (shards, expert_shards) = parameters.of_stage(recipe, slowest), memory.optimizer_shards(recipe)
    local, experts = here.split / p.tensor + here.whole, here.experts / p.expert
    moved = RATES["optimizer"].value * (local / shards + experts / expert_shards) + 8 * (local + experts)
    return StepTime(
        products=micro_batches * (forward.products + backward.products),
        rule=micro_batches * (forward.rule + backward.rule),
        attention=micro_batches * (forward.attention + backward.attention),
        elementwise=micro_batches * (forward.elementwise + backward.elementwise),
        communication=micro_batches * inside + reduce + gather,
        bubble=bubble,
        optimizer=moved / _copy_rate(recipe),
    )


def _copy_rate(recipe: Recipe) -> float:
    return RATES["copy_h100" if recipe.parallel.device == "h100" else "copy"].value


def _forward(recipe: Recipe, stage: int, document_length: int) -> _Pass:
    return _one_pass(recipe, stage, document_length, times=1, is_backward=False)


def _backward(recipe: Recipe, stage: int, document_length: int) -> _Pass:
    """Backward, and what it computes again."""
    backward = _one_pass(recipe, stage, document_length, times=2, is_backward=True)
    if recipe.train.recompute == "full":
        again = _one_pass(recipe, stage, document_length, times=1, is_backward=False, head=False)
    elif recipe.train.recompute == "mlp":
        again = _one_pass(recipe, stage, document_length, times=1, is_backward=False, head=False, mixers=False)
    else:
        again = _Pass()
    return _Pass(
        backward.products + again.products,
        backward.rule + again.rule,
        backward.attention + again.attention,
        backward.elementwise + again.elementwise,
    )


def _one_pass(
    recipe: Recipe, stage: int, document_length: int, *, times: int, is_backward: bool, head: bool = True,
    mixers: bool = True,
) -> _Pass:  # fmt: skip
    """`times` the products of a forward pass; of layers alone, or of their MLPs alone."""
    m, p = recipe.model, recipe.parallel
    is_last = stage == p.pipeline - 1
    predictions = m.prediction_layers * is_last
    gdn_layers, attention_layers = parameters.layers_of_stage(recipe, stage)
    attention_layers += predictions
    attended = (document_length + 1) / 2
    on_a_gpu = recipe.data.sequence_length / (p.context * p.tensor)
    gdn, attention = flops.gdn_flops(m), flops.attention_flops(m, attended)
    dense = (gdn_layers * gdn.projections + attention_layers * attention.projections) * mixers
    dense += 4 * m.hidden_size**2 * predictions
    dense += (1 + m.prediction_layers) * flops.output_flops(m).vocabulary * (is_last and head)
    mlps = (gdn_layers + attention_layers) * flops.mlp_flops(m).mlp
    small = RATES["small_gemm"].value
    dense_speed = RATES["gemm"].value * (small if m.hidden_size / p.tensor <= 1024 else 1.0)
    mlp_speed = RATES["gemm"].value * small if m.num_experts else dense_speed
    products = times * on_a_gpu * (dense / dense_speed + mlps / mlp_speed)

    direction = "backward" if is_backward else "forward"
    chunks = recipe.data.sequence_length / CHUNK
    heads = m.gdn_value_heads / (p.tensor * p.context)
    rule = max(
        RATES[f"rule_{direction}"].value * chunks * heads,
        RATES["rule_serial"].value * times * document_length / CHUNK,
    )
    scores = times * attention_layers * attention.attention * on_a_gpu / RATES[f"attention_{direction}"].value
    moved = 0.0
    for is_attention, count in ((False, gdn_layers), (True, attention_layers)):
        mixer, mlp = memory.layer_bytes(recipe, is_attention).values()
        passes = RATES["passes_attention" if is_attention else "passes_gdn"].value
        moved += count * (passes * mixer * mixers + RATES["passes_mlp"].value * mlp)
    moved *= times / 3  # of a forward and a backward pass, a third is forward
    return _Pass(products, gdn_layers * rule * mixers, scores * mixers, moved / _copy_rate(recipe))
