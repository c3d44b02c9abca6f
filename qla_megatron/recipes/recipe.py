"""What a training run is: one frozen dataclass of seven parts.

Every field has a unit or a meaning here and nowhere else; `build.py` turns a Recipe into Megatron's arguments,
`checks.py` refuses one that cannot work, `overrides.py` changes fields from the command line. A default stands here
only if every run shares it.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Model:
    """Shape and initial values of a Qwen3.5-like decoder: groups of Gated DeltaNet (GDN) layers, each closed by full
    attention.

    Layers: layer i (from 0) is full attention where (i + 1) % attention_interval == 0, else GDN. All linear layers are
    without bias; every RMSNorm weight is stored minus one, as Megatron's checkpoints hold it.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    """Query heads of a full-attention layer."""
    num_kv_heads: int
    """Key and value heads of a full-attention layer."""
    gdn_value_heads: int
    """Value heads of a GDN layer; a multiple of gdn_key_heads."""
    gdn_key_heads: int = 16
    """Key (and query) heads of a GDN layer."""
    gdn_key_dim: int = 128
    """Width of a GDN key head."""
    gdn_value_dim: int = 128
    """Width of a GDN value head."""
    gdn_conv_width: int = 4
    """Tokens that the causal convolution sees, the present one included."""
    gdn_decay_init: tuple[float, float] = (0.01, 16.0)
    """exp(A_log) starts uniform between these two (Hugging Face's start; Megatron's own layer takes 1 and 16)."""
    gdn: Literal["qla", "megatron"] = "qla"
    """Who computes the GDN layers: this package, or Megatron's own layer on flash-linear-attention (for comparison)."""
    gdn_backend: Literal["auto", "tilelang", "reference"] = "auto"
    """The gated delta rule of this package's layer: kernels on CUDA and the torch reference on CPU, or one of the two
    by name."""
    stack: Literal["gpt", "hybrid"] = "gpt"
    """Megatron's model class: GPTModel, or HybridModel with one pattern symbol per mixer and per MLP. Same
    mathematics."""
    attention_interval: int = 4
    """One layer in so many is full attention."""
    head_dim: int = 256
    """Width of a full-attention head."""
    rotary_fraction: float = 0.25
    """Leading part of a head that rotary embedding turns."""
    rotary_base: int = 10_000_000
    max_position: int = 262_144
    """Longest document in tokens that positions are prepared for."""
    ffn_hidden_size: int | None = None
    """Width of a dense SwiGLU layer; None in a mixture of experts."""
    num_experts: int | None = None
    """Routed experts a layer; None in a dense model."""
    experts_per_token: int = 8
    expert_hidden_size: int | None = None
    """Width of one routed expert."""
    shared_expert_hidden_size: int | None = None
    """Width of the expert that every token passes, behind a sigmoid gate."""
    router_balance_weight: float = 0.001
    """Weight of the load-balancing loss."""
    vocab_size: int = 248_320
    padded_vocab_size: int = 248_320
    """Rows of the embedding. Written down, so that it does not depend on the tensor-parallel size as Megatron's own
    padding does: a checkpoint then loads at any size."""
    tie_embeddings: bool = False
    """The output layer is the embedding, transposed."""
    prediction_layers: int = 0
    """Multi-token prediction blocks: each a projection of hidden state and next token's embedding, a full-attention
    layer, and the model's own output layer for one token further."""
    prediction_loss_weight: float = 0.1
    """Weight of the mean loss of the prediction blocks."""
    norm_eps: float = 1e-6
    init_std: float = 0.02
    """Standard deviation of the normal distribution that weights start from. The convolution's start uniform within
    +-1/sqrt(gdn_conv_width), as Megatron's."""


@dataclass(frozen=True)
class Parallel:
    """How the model is spread over processes, one process a GPU. Data parallel size is what remains of `gpus`."""

    gpus: int
    """Processes in all (torchrun's nodes times processes a node)."""
    device: Literal["h100", "h200", "cpu"]
    """What the layout is made for. `cpu` runs on gloo, without a GPU."""
    tensor: int = 1
    """Tensor parallel size: heads and widths are split over so many processes."""
    sequence: bool = False
    """Sequence parallel: between the split layers, each tensor-parallel process keeps only its part of the tokens."""
    context: int = 1
    """Context parallel size: every sequence is split over so many processes."""
    pipeline: int = 1
    """Pipeline parallel size: layers are split over so many stages."""
    layers_per_virtual_stage: int | None = None
    """Layers of one chunk in the interleaved pipeline schedule; None: each stage is one chunk."""
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage where the split is uneven."""
    last_stage_layers: int | None = None
    """Layers of the last pipeline stage where the split is uneven."""
    expert: int = 1
    """Expert parallel size: a layer's experts are split over so many processes."""
    gpus_per_node: int = 8
    """Processes of one machine, for the launch line."""

    @property
    def data(self) -> int:
        """Data parallel size: `gpus` over tensor x pipeline x context (rounded down; checks.py refuses a remainder)."""
        return self.gpus // (self.tensor * self.pipeline * self.context)


@dataclass(frozen=True)
class Precision:
    """Number formats. Master weights and Adam's moments are always float32."""

    dtype: Literal["bf16", "fp32"] = "bf16"
    """Parameters and activations. A_log, dt_bias and GDN's output norm stay float32."""
    reduce_gradients_in_fp32: bool = True
    """Gradients are accumulated and reduced in float32."""


@dataclass(frozen=True)
class Data:
    """Packed documents. A sequence holds whole documents one after another; a mixer never sees across a boundary."""

    sequence_length: int
    """Tokens of one packed sequence."""
    paths: tuple[str, ...] = ()
    """Prefixes of .bin/.idx files (tools/pack_dataset.py writes them), or weight, prefix, weight, prefix, ..."""
    split: str = "99,1,0"
    """Shares of the documents for training, held-out evaluation and test, in document order."""
    alignment: int = 64
    """Documents start at multiples of so many tokens: the chunk of the gated delta rule."""
    balance: bool = True
    """Hand the sequences of a step out so that data-parallel processes get even work: attention costs by the squares
    of document lengths. The step's sequences stay the same."""
    workers: int = 2
    """Loader processes a rank; 0 loads in the training process."""
    cache: str | None = None
    """Folder for dataset indices; None: inside the run folder."""


@dataclass(frozen=True)
class Train:
    """The loop."""

    steps: int
    """Optimizer steps."""
    global_batch: int
    """Sequences of one step, over all processes. A forward pass takes one: more tokens at a time is a longer
    sequence."""
    stop_after: int | None = None
    """Stop (and save) at the next multiple of so many steps, the schedule unchanged; None: run to `steps`."""
    seed: int = 1234
    evaluate_every: int = 500
    """Steps between two evaluations on held-out documents; there is always one at the start and one at the end."""
    evaluate_sequences: int = 256
    """Held-out sequences of one evaluation, always the same ones; 0: no evaluation."""
    evaluate_without_mixers: bool = False
    """Evaluate once more at the end with every mixer's output (GDN and attention) set to zero: what the model owes to
    them."""
    log_every: int = 10
    """Steps between two progress lines. Every step is recorded in the run folder."""
    skip_steps: tuple[int, ...] = ()
    """Steps whose sequences are passed over without training: what the guard's message about a step proposes."""
    tensorboard: bool = False
    """Write losses, learning rate, gradient norms, speed and memory for TensorBoard, too, into the run folder."""
    wandb: str | None = None
    """Write the same to this project of Weights & Biases (package wandb, not installed by default)."""
    log_module_grad_norms: bool = False
    """Record the gradient norm of every module at each logged step, before clipping."""
    chunked_loss: bool = True
    """Compute output layer and loss in chunks of tokens (layers/chunked_loss.py), so that logits are never whole;
    false: Megatron's own."""
    loss_chunk_mib: int = 1024
    """Largest logits of one such chunk on one process, MiB. Smaller chunks read and write the output layer's float32
    gradient more often, which costs time."""
    recompute: Literal["none", "norms", "mlp", "full"] = "none"
    """Activations computed again in the backward pass: none, the GDN output norms, these and the MLPs (mixtures of
    experts included), or whole layers."""


@dataclass(frozen=True)
class Optimizer:
    """AdamW. Norms, A_log and dt_bias get no weight decay."""

    lr: float
    """Highest learning rate."""
    min_lr: float
    """Learning rate at the end of the decay."""
    warmup_steps: int
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    decay_steps: int | None = None
    """Steps until min_lr, warm-up included; None: train.steps."""
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0
    """Largest norm of the whole gradient; 0: no clipping."""
    distributed: bool = True
    """Shard master weights and moments over the data-parallel processes."""
    overlap: bool = True
    """Reduce gradients and gather parameters during computation (needs `distributed`)."""


@dataclass(frozen=True)
class Checkpoint:
    """Where a run lives and what it keeps."""

    folder: str | None = None
    """The run folder: checkpoints, log.jsonl, the full recipe, Megatron's own output. None: runs/NAME."""
    save: bool = True
    save_every: int = 500
    """Steps between two checkpoints; there is always one at the end and one on SIGTERM."""
    load: str | None = None
    """Checkpoint folder to start from where the run folder has none yet. None: start from random weights."""
    load_step: int | None = None
    """Which checkpoint of `load`; None: the latest."""
    expected_loss: float | None = None
    """Loss that the first step after a load must have, within loss_tolerance: else the run stops before a checkpoint.
    None: compare with the log beside the loaded checkpoint, if there is one, and only warn."""
    loss_tolerance: float = 0.5
    """Nats that the first step's loss may differ by."""


@dataclass(frozen=True)
class Recipe:
    """One complete run."""

    model: Model
    parallel: Parallel
    precision: Precision
    data: Data
    train: Train
    optimizer: Optimizer
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
