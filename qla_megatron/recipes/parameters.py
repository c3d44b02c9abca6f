"""Parameters of a model, exactly, and the part of them that one GPU holds."""

from dataclasses import astuple, dataclass

from qla_megatron.recipes.recipe import Model, Recipe


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters by how they are spread. They add, and scale by a whole number."""

    split: int = 0
    """Divided over tensor parallel processes."""
    whole: int = 0
    """The same on every tensor parallel process: norms, routers, gates."""
    experts: int = 0
    """Routed experts, divided over expert parallel processes; their tensor parallel size is 1."""
    split_float32: int = 0
    """As `split`, but float32 in a bf16 model: A_log and dt_bias."""
    whole_float32: int = 0
    """As `whole`, but float32 in a bf16 model: GDN's output norm."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(astuple(self))

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __rmul__(self, times: int) -> "Parameters":
        return Parameters(*(times * number for number in astuple(self)))


def gdn_mixer(m: Model) -> Parameters:
    """One Gated DeltaNet mixer, without the layer's norm."""
    key, value = m.gdn_key_heads * m.gdn_key_dim, m.gdn_value_heads * m.gdn_value_dim
    in_proj = m.hidden_size * (2 * key + 2 * value + 2 * m.gdn_value_heads)
    convolution = (2 * key + value) * m.gdn_conv_width
    return Parameters(
        split=in_proj + convolution + value * m.hidden_size,
        split_float32=2 * m.gdn_value_heads,
        whole_float32=m.gdn_value_dim,
    )


def attention_mixer(m: Model) -> Parameters:
    """One full-attention mixer with its output gate and the norms of query and key heads."""
    queries, keys = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
    return Parameters(split=m.hidden_size * (2 * queries + 2 * keys + queries), whole=2 * m.head_dim)


def mlp(m: Model) -> Parameters:
    """One SwiGLU layer, or mixture of experts."""
    if m.num_experts is None:
        return Parameters(split=3 * m.hidden_size * (m.ffn_hidden_size or 0))
    has_shared = m.shared_expert_hidden_size is not None
    return Parameters(
        split=3 * m.hidden_size * (m.shared_expert_hidden_size or 0),
        whole=m.hidden_size * (m.num_experts + has_shared),
        experts=3 * m.hidden_size * (m.expert_hidden_size or 0) * m.num_experts,
    )


def layer(m: Model, is_attention: bool) -> Parameters:
    """A mixer, an MLP and the norms before them."""
    return (attention_mixer(m) if is_attention else gdn_mixer(m)) + mlp(m) + Parameters(whole=2 * m.hidden_size)


def embedding(m: Model) -> Parameters:
    """The embedding table; the output layer has as many."""
    return Parameters(split=m.padded_vocab_size * m.hidden_size)


def prediction(m: Model) -> Parameters:
    """One multi-token prediction block: the joining projection, three norms, an attention layer."""
    return layer(m, True) + Parameters(split=2 * m.hidden_size**2, whole=3 * m.hidden_size)


def is_attention(m: Model, index: int) -> bool:
    """Whether layer `index`, from 0, is full attention."""
    return (index + 1) % m.attention_interval == 0


def text_model(m: Model) -> Parameters:
    """The whole model without prediction blocks."""
    tables = 1 if m.tie_embeddings else 2
    full = m.num_layers // m.attention_interval
    layers = full * layer(m, True) + (m.num_layers - full) * layer(m, False)
    return layers + tables * embedding(m) + Parameters(whole=m.hidden_size)


def active(m: Model) -> int:
    """Parameters of the text model that one token passes, its tables whole."""
    if m.num_experts is None:
        return text_model(m).total
    idle = mlp(m).experts * (m.num_experts - m.experts_per_token) // m.num_experts
    return text_model(m).total - m.num_layers * idle


def stage_layers(recipe: Recipe) -> list[list[list[int]]]:
    """The layers of every pipeline stage, chunk by chunk: [stage][chunk][...], numbers from 0."""
    m, p = recipe.model, recipe.parallel
    if p.layers_per_virtual_stage:
        size = p.layers_per_virtual_stage
        chunks = m.num_layers // (p.pipeline * size)
        first = [[(chunk * p.pipeline + stage) * size for chunk in range(chunks)] for stage in range(p.pipeline)]
        return [[list(range(begin, begin + size)) for begin in begins] for begins in first]
    ends = [n for n in (p.first_stage_layers, p.last_stage_layers) if n is not None]
    middle = (m.num_layers - sum(ends)) // max(p.pipeline - len(ends), 1)
    sizes = [middle] * p.pipeline
    sizes[0] = p.first_stage_layers or sizes[0]
    sizes[-1] = p.last_stage_layers or sizes[-1]
    begins = [sum(sizes[:stage]) for stage in range(p.pipeline)]
    return [[list(range(begin, begin + size))] for begin, size in zip(begins, sizes, strict=True)]


def layers_of_stage(recipe: Recipe, stage: int) -> tuple[int, int]:
    """How many GDN layers and how many attention layers a stage has."""
    kinds = [is_attention(recipe.model, i) for chunk in stage_layers(recipe)[stage] for i in chunk]
    return kinds.count(False), kinds.count(True)


def of_stage(recipe: Recipe, stage: int) -> Parameters:
    """The parameters of one pipeline stage, over all its processes.

    Where stages are several, the last one has a copy of the embedding if the output layer is tied to it, or if it
    predicts further tokens.
    """
    m, last = recipe.model, recipe.parallel.pipeline - 1
    gdn, attention = layers_of_stage(recipe, stage)
    here = gdn * layer(m, False) + attention * layer(m, True)
    tables = 0
    if stage == 0:
        tables += 1
    if stage == last:
        here += Parameters(whole=m.hidden_size) + m.prediction_layers * prediction(m)
        tables += not m.tie_embeddings
        tables += last > 0 and (m.tie_embeddings or m.prediction_layers > 0)
    return here + tables * embedding(m)
