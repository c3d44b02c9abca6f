"""Gated DeltaNet as a Megatron layer: a drop-in for megatron-core 0.19's, on this package's kernels.

The way of a tensor, with tensor parallel size t, context parallel size c, sequence parallelism on:

    hidden [T / (t c), B, D] -> in_proj, which gathers the sequence [T / c, B, P / t] -> head exchange [T, B, P / (t c)]
    -> convolution with SiLU over query, key, value, l2 norm of query and key, gates from beta and alpha
    -> gated delta rule [B, T, HV / (t c), V] -> RMSNorm gated by z -> exchange back -> out_proj [T / (t c), B, D]

On CUDA, one kernel makes what the rule takes, one gates and normalises what it returns. Both read in_proj's output in
place, and their backward passes write its gradient in place. Saved between the projections: in_proj's output, what the
rule saves, and the rule's output.

The formulas are those of Hugging Face's Qwen3.5 (transformers 5.24, models/qwen3_next) and of Megatron's own layer.
"""

import logging
import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as MegatronGatedDeltaNet
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from qla_megatron.kernels.backend import BACKENDS
from qla_megatron.kernels.causal_conv1d import convolve_projection
from qla_megatron.kernels.checks import check_choice
from qla_megatron.kernels.gated_delta_rule import chunk_gated_delta_rule
from qla_megatron.kernels.gated_norm import gated_rms_norm
from qla_megatron.layers.checkpoint import keep_float32, let_megatron_save_float32_parameters, to_float32
from qla_megatron.layers.context_parallel import slice_sections, to_head_shards, to_sequence_shards
from qla_megatron.layers.packing import checked_offsets, document_offsets
from qla_megatron.layers.projections import PROJECTION_PARTS, HeadSizes, split_over_ranks

logger = logging.getLogger(__name__)


class GatedDeltaNet(MegatronGatedDeltaNet):
    """Gated DeltaNet with Megatron's constructor, forward, parameter names and checkpoint keys, without FLA.

    It has the name of its base class, because Megatron-Bridge maps weights by `type(module).__name__`, and is a
    subclass, because others ask `isinstance`. What differs from Megatron's own layer:

    - query and key heads are never repeated to the value heads;
    - A_log, dt_bias and out_norm.weight are float32, whatever the model is wrapped in;
    - out_norm's gradient is summed over tensor parallel ranks with sequence parallelism off, too;
    - packing works in deterministic mode (the kernels are deterministic), and makes no layer wait for the device;
    - convolution weights start differently on different tensor parallel ranks;
    - a bias of in_proj, which Qwen's models don't have, is saved part by part, under other keys than Megatron's.

    Args:
        config: its `linear_*` fields give the sizes. Two optional attributes, which are not fields of Megatron's, stand
            in where the argument below is not given: `gdn_A_init_range` and `gdn_backend`.
        submodules: in_proj (Megatron's or Transformer Engine's column-parallel linear, with or without a norm in it),
            out_norm (an RMSNorm over the value width; the layer uses its weight), out_proj (row-parallel linear).
        layer_number: number of the layer in the model, from 1.
        bias: biases in in_proj and out_proj.
        conv_bias: a bias in the convolution.
        conv_init: convolution weights start uniform in +-conv_init; None: +-1/sqrt(width), as torch's Conv1d.
        use_qk_l2norm: normalise queries and keys to length 1.
        A_init_range: exp(A_log) starts uniform in this range; None: the config's `gdn_A_init_range`, else (1, 16).
        pg_collection: process groups; `tp` and `cp` are used.
        name: name of the module instance, passed down to the projections.
        cp_comm_type, pp_layer_offset: taken because Megatron's TransformerLayer passes them; without effect.
        backend: of convolution, gated delta rule and norm: "auto", "tilelang" or "reference"; None: the config's
            `gdn_backend`, else "auto".

    Raises:
        ValueError: heads that do not divide by the parallel sizes, a size that is missing, a bad range, an unknown
            backend, rows that FP8 cannot take.
        NotImplementedError: an activation other than SiLU, a normalization other than RMSNorm.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int | None = None,
        bias: bool = False,
        conv_bias: bool = False,
        conv_init: float | None = None,
        use_qk_l2norm: bool = True,
        A_init_range: tuple[float, float] | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        name: str | None = None,
        cp_comm_type: str | None = None,
        pp_layer_offset: int | None = None,
        backend: str | None = None,
        **kwargs: Any,
    ) -> None:
        MegatronModule.__init__(self, config)  # the base class's own __init__ demands FLA
        if pg_collection is None:
            raise ValueError("pg_collection must be given: the process groups tp and cp, got None")
        if kwargs:
            logger.warning("GatedDeltaNet ignores the arguments %s, which it does not know", sorted(kwargs))
        self.layer_number, self.pp_layer_offset = layer_number, pp_layer_offset
        self.bias, self.conv_bias, self.conv_init, self.use_qk_l2norm = bias, conv_bias, conv_init, use_qk_l2norm
        self.A_init_range = A_init_range or getattr(config, "gdn_A_init_range", None) or (1, 16)
        self.backend = backend or getattr(config, "gdn_backend", None) or "auto"
        self._set_groups(pg_collection)
        self._set_sizes()
        self._check_config()
        self._setup_variant_attrs()

        build = partial(self._build_linear, name=name, bias=bias)
        self.in_proj = build("in_proj", submodules.in_proj, self.hidden_size, self.in_proj_dim)
        self._build_own_parameters()
        self.out_norm = build_module(
            submodules.out_norm, config=config, hidden_size=self.value_head_dim, eps=config.layernorm_epsilon
        )
        to_float32(self.out_norm.weight)
        let_megatron_save_float32_parameters()
        self.out_proj = build("out_proj", submodules.out_proj, self.v_dim, self.hidden_size)
        self.recompute_norm_out = (
            config.recompute_granularity == "selective" and "gdn_norm_out" in config.recompute_modules
        )
        self.norm_out_checkpoint: tensor_parallel.CheckpointWithoutOutput | None = None
        self.reset_parameters()

    def _set_groups(self, pg_collection: ProcessGroupCollection) -> None:
        self.pg_collection = pg_collection
        self.tp_group = pg_collection.tp
        self.tp_size, self.cp_size = pg_collection.tp.size(), pg_collection.cp.size()
        self.sp_size = self.tp_size if self.config.sequence_parallel else 1

    def _set_sizes(self) -> None:
        """The attributes by which Megatron's FSDP and converters recognise the layer, under the names they read."""
        config = self.config
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"):
            size = getattr(config, f"linear_{name}")
            if size is None or size < 1:
                raise ValueError(f"linear_{name} must be at least 1, got {size}")
        self.hidden_size = config.hidden_size
        self.act_fn = config.activation_func
        self.activation = getattr(self.act_fn, "__name__", repr(self.act_fn))
        self.conv_kernel_dim = config.linear_conv_kernel_dim
        self.key_head_dim, self.value_head_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.num_key_heads, self.num_value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads must be a multiple of linear_num_key_heads = {self.num_key_heads}, "
                f"got {self.num_value_heads}"
            )
        self.sizes = HeadSizes(self.num_key_heads, self.num_value_heads, self.key_head_dim, self.value_head_dim)
        self.sizes_tp = self.sizes.share(self.tp_size, "the tensor parallel size")
        self.sizes_local = self.sizes.share(self.tp_size * self.cp_size, "tensor times context parallel size")
        self.qk_dim, self.v_dim = self.sizes.query_key_width, self.sizes.value_width
        self.qk_dim_local_tp, self.v_dim_local_tp = self.sizes_tp.query_key_width, self.sizes_tp.value_width
        self.num_k_heads_local_tp, self.num_v_heads_local_tp = self.sizes_tp.key_heads, self.sizes_tp.value_heads
        self.in_proj_qkvg_dim = 2 * self.qk_dim + 2 * self.v_dim
        self.in_proj_dim = sum(self.sizes.projection)
        self.conv_dim, self.conv_dim_local_tp = sum(self.sizes.convolution), sum(self.sizes_tp.convolution)

    def _check_config(self) -> None:
        check_choice("backend", self.backend, BACKENDS)
        low, high = self.A_init_range
        if not 0 <= low <= high or high == 0:
            raise ValueError(
                f"A_init_range must be two numbers with 0 <= low <= high, high > 0, got {self.A_init_range}"
            )
        if self.activation not in ("silu", "swish"):
            raise NotImplementedError(f"activation_func must be silu, got {self.activation}")
        if self.config.normalization != "RMSNorm":
            raise NotImplementedError(f"normalization must be 'RMSNorm', got {self.config.normalization!r}")
        if self.config.fp8:
            multiple, rows = get_fp8_align_size(self.config.fp8_recipe), sum(self.sizes_tp.projection)
            if rows % multiple:
                raise ValueError(
                    f"in_proj has {rows} rows on each of {self.tp_size} tensor parallel ranks, FP8 needs a multiple of "
                    f"{multiple}: use a smaller tensor parallel size or keep this layer out of FP8"
                )

    def _setup_variant_attrs(self) -> None:
        """What Megatron's base class expects of a variant: tables of the parts, sizes of the gates, the rule."""
        self.in_proj_split_names = list(PROJECTION_PARTS)
        self.in_proj_split_sections = self.sizes_tp.projection
        qkv, z, gate = sum(self.sizes_local.convolution), self.sizes_local.value_width, self.sizes_local.value_heads
        self.feat_dim_split = (qkv, z, gate, gate)
        self.in_proj_extra_dim = 2 * self.num_value_heads
        self.dt_bias_dim = self.a_log_dim = self.num_v_heads_local_tp
        self.gated_delta_rule = partial(chunk_gated_delta_rule, backend=self.backend)

    def _build_linear(self, part: str, spec: Any, inputs: int, outputs: int, *, name: str | None, bias: bool) -> Any:
        """in_proj, split over its rows, or out_proj, split over its columns."""
        if part == "in_proj":
            special = {"gather_output": False, "skip_bias_add": False, "init_method": self.config.init_method}
        else:
            special = {"input_is_parallel": True, "skip_bias_add": True}
            special["init_method"] = self.config.output_layer_init_method
        return build_module(
            spec,
            inputs,
            outputs,
            config=self.config,
            bias=bias,
            is_expert=False,
            tp_comm_buffer_name="fc1" if part == "in_proj" else "fc2",
            tp_group=self.tp_group,
            name=None if name is None else f"{name}.{part}",
            **special,
        )

    def _build_own_parameters(self) -> None:
        on_cpu = self.config.use_cpu_initialization
        device = torch.get_default_device() if on_cpu else torch.cuda.current_device()
        self.conv1d = torch.nn.utils.skip_init(  # torch's own start values would use up random numbers by local size
            torch.nn.Conv1d,
            self.conv_dim_local_tp,
            self.conv_dim_local_tp,
            self.conv_kernel_dim,
            groups=self.conv_dim_local_tp,
            padding=self.conv_kernel_dim - 1,
            bias=self.conv_bias,
            device=device,
            dtype=self.config.params_dtype,
        )
        self.dt_bias = torch.nn.Parameter(torch.empty(self.dt_bias_dim, dtype=torch.float32, device=device))
        self.A_log = torch.nn.Parameter(torch.empty(self.a_log_dim, dtype=torch.float32, device=device))
        for parameter in (*self.conv1d.parameters(), self.dt_bias, self.A_log):
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start values of the layer's own parameters: exp(A_log) uniform, dt_bias 1, the convolution uniform.

        Each tensor parallel rank draws its own. A model that is initialised on the CPU does not depend on the tensor
        parallel size: all ranks draw the whole from the same generator and keep their share.
        """
        if not self.config.perform_initialization:
            return
        bound = self.conv_init if self.conv_init is not None else 1 / math.sqrt(self.conv_kernel_dim)
        convolution = [(p, self.sizes.convolution, -bound, bound) for p in self.conv1d.parameters()]
        draws = [*convolution, (self.A_log, (self.num_value_heads,), *self.A_init_range)]
        if self.config.use_cpu_initialization:
            for parameter, parts, low, high in draws:
                whole = torch.empty(sum(parts), *parameter.shape[1:], dtype=torch.float32).uniform_(low, high)
                parameter.copy_(split_over_ranks(whole, parts, self.tp_size)[self.tp_group.rank()])
        else:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                for parameter, _, low, high in draws:
                    parameter.uniform_(low, high)
        self.A_log.log_()
        self.dt_bias.fill_(1.0)

    def _apply(self, fn: Any, recurse: bool = True) -> "GatedDeltaNet":
        return super()._apply(keep_float32(fn, (self.A_log, self.dt_bias, self.out_norm.weight)), recurse)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
        tp_group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Megatron's, with in_proj's bias split into the parts of in_proj's rows as its weight is.

        Megatron saves that bias as one block, which comes out wrong at another tensor parallel size.
        """
        sharded = super().sharded_state_dict(prefix, sharded_offsets, metadata, tp_group)
        if self.bias:
            rows, key = list(self.in_proj_split_sections), f"{prefix}in_proj.bias"
            sharded[key] = _split_tensor_factory(sharded[key], rows, self.in_proj_split_names, 0)
        return sharded

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix tokens over the sequence.

        Args:
            hidden_states: [T / (SP CP), B, D], SP being the tensor parallel size under sequence parallelism, else 1.
                With context parallelism the tokens are in zigzag order, over the sequence or, packed, over each
                document.
            attention_mask: not used; the layer is causal.
            packed_seq_params: documents, where its `qkv_format` is "thd" (then B = 1); another format is not packing.
                Padded offsets are taken where there are both. They must cover all T tokens.

        Returns:
            The output, shaped as `hidden_states`, and out_proj's bias, which the caller adds (None without bias).

        Raises:
            NotImplementedError: an inference context is given; a batch of packed sequences; context parallel groups
                that change from batch to batch.
            ValueError: offsets on the CPU that do not fit. Those on a device are checked there, and abort the run.
        """
        if inference_context is not None or inference_params is not None:
            raise NotImplementedError(
                "GatedDeltaNet has no inference path: inference_context must be None; it is a training layer"
            )
        tokens = hidden_states.shape[0] * self.sp_size * self.cp_size
        cu_seqlens = document_offsets(packed_seq_params, tokens, hidden_states.shape[1], self.cp_size)

        projected, _ = self.in_proj(hidden_states)
        projected = to_head_shards(projected, self.in_proj_split_sections, self.pg_collection.cp, cu_seqlens)

        weight, bias, A_log, dt_bias = self._parameters_of_this_rank()
        inputs = convolve_projection(
            projected,
            weight,
            bias,
            A_log,
            dt_bias,
            key_heads=self.sizes_local.key_heads,
            value_heads=self.sizes_local.value_heads,
            value_dim=self.value_head_dim,
            use_qk_l2norm=self.use_qk_l2norm,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        mixed, _ = self.gated_delta_rule(
            inputs.q,
            inputs.k,
            inputs.v,
            g=inputs.g,
            beta=inputs.beta,
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=False,
            cu_seqlens=cu_seqlens,
        )

        normalise = partial(self._normalise_and_exchange, cu_seqlens=cu_seqlens, room_column=inputs.room_column)
        if not self.recompute_norm_out:
            return self.out_proj(normalise(mixed, inputs.gate, inputs.room))
        self.norm_out_checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=self.config.fp8)
        normed = self.norm_out_checkpoint.checkpoint(normalise, mixed, inputs.gate, inputs.room)
        out, out_bias = self.out_proj(normed)
        self.norm_out_checkpoint.discard_output_and_register_recompute(out)
        return out, out_bias

    def _parameters_of_this_rank(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Convolution weight [D, W] and bias [D], A_log and dt_bias [HV], for the heads that this rank computes."""
        channels, heads = self.sizes_tp.convolution, (self.num_v_heads_local_tp,)
        bias, group = self.conv1d.bias, self.pg_collection.cp
        return (
            slice_sections(self.conv1d.weight.squeeze(1), channels, group),
            None if bias is None else slice_sections(bias, channels, group),
            slice_sections(self.A_log, heads, group),
            slice_sections(self.dt_bias, heads, group),
        )

    def _normalise_and_exchange(
        self, mixed: Tensor, gate: Tensor, room: Tensor | None, *, cu_seqlens: Tensor | None, room_column: int
    ) -> Tensor:
        """Gated RMSNorm over each value head, then sequence first: [B, T, HV, V] -> [T / CP, B, HV CP V]."""
        normed = gated_rms_norm(
            mixed,
            gate,
            self._norm_weight(),
            self.config.layernorm_epsilon,
            zero_centered=self.config.layernorm_zero_centered_gamma,
            room=room,
            room_column=room_column,
            backend=self.backend,
        )
        return to_sequence_shards(normed.flatten(2).transpose(0, 1), self.pg_collection.cp, cu_seqlens).contiguous()

    def _norm_weight(self) -> Tensor:
        """out_norm's weight, whose gradient ends up summed over the tensor parallel ranks exactly once.

        Every rank sees only its own heads, so that its gradient is a part of the whole. Megatron sums the parts at
        the end of a step (finalize_model_grads) for parameters marked `sequence_parallel`, but only where sequence
        parallelism is on. Otherwise the backward pass sums them here: the forward of this copy is the identity.
        """
        weight = self.out_norm.weight
        is_summed_by_megatron = self.config.sequence_parallel and getattr(weight, "sequence_parallel", False)
        if self.tp_size == 1 or is_summed_by_megatron:
            return weight
        return tensor_parallel.copy_to_tensor_model_parallel_region(weight, group=self.tp_group)

    def _resolve_cu_seqlens(
        self,
        cu_seqlens_padded: Tensor | None,
        cu_seqlens_actual: Tensor | None,
        total_seq_len: int,
        name: str,
        cp_size: int = 1,
    ) -> Tensor:
        """Megatron's name for choosing offsets, for those who call it; `forward` uses packing.py itself."""
        chosen = cu_seqlens_actual if cu_seqlens_padded is None else cu_seqlens_padded
        return checked_offsets(chosen, total_seq_len, name, cp_size)
