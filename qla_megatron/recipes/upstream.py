"""Work-arounds for faults of megatron-core 0.19, each with the fault named. `apply()` installs what is needed."""

import importlib.util
import logging
import queue
import warnings
from typing import Any


def apply() -> None:
    """Install the work-arounds, once."""
    _skip_missing_makefile()
    _save_without_manager_process()
    _resume_with_torch_adamw()
    _count_tokens_of_experts_on_cpu()
    _predict_tokens_of_gated_delta_net_models()
    _rotate_packed_documents_on_the_device()


def quiet_imports() -> None:
    """Leave out what importing Megatron says on machines without Apex, Transformer Engine or a GPU: each run would
    begin with a screen of it."""
    warnings.filterwarnings("ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed")
    warnings.filterwarnings("ignore", message="Could not determine rank")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _skip_missing_makefile() -> None:
    """Fault: start-up always runs `make` in megatron/core/datasets, but the wheel has no Makefile: rank 0 exits with 1.

    The wheel does ship the compiled helpers, so that there is nothing to make. Where they are missing, Megatron's own
    call stays.
    """
    from megatron.core.datasets import utils

    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        utils.compile_helpers = _nothing_to_compile


def _nothing_to_compile() -> None:
    pass


def _save_without_manager_process() -> None:
    """Fault: a synchronous save, too, starts a manager process by spawn, which imports all of Megatron (about 10 s).

    It holds a queue between the trainer and an asynchronous writer; without one, both ends are in this process. Recipes
    do not save asynchronously.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def _resume_with_torch_adamw() -> None:
    """Fault: without Transformer Engine and Apex, the distributed optimizer cannot resume.

    Three faults in core/optimizer/distrib_optimizer.py on torch's AdamW, which keeps a step count per parameter:
    1. `state_dict` asserts that there is one step count, but a fresh optimizer, the template that a checkpoint is
       loaded into, has none: AssertionError.
    2. `_set_main_param_and_optimizer_states` looks up every state by name in what was loaded, "step" too: KeyError.
    3. `load_state_dict` gives all parameters one shared tensor as step count, which each of them advances: training
       goes on with a wrong bias correction, without any error.
    """
    from megatron.core.optimizer import distrib_optimizer

    cls = distrib_optimizer.DistributedOptimizer
    if distrib_optimizer.HAVE_APEX_OR_TE or getattr(cls, "_qla_resumes", False):
        return
    state_dict, load_state_dict = cls.state_dict, cls.load_state_dict
    set_states = cls._set_main_param_and_optimizer_states

    def state_dict_of_fresh_optimizer_too(self: Any) -> Any:
        if not self.optimizer.state:
            self.init_state_fn(self.optimizer)
        for state in self.optimizer.state.values():
            state.setdefault("step", _zero_step())
        return state_dict(self)

    def load_state_dict_with_own_steps(self: Any, loaded: Any) -> None:
        load_state_dict(self, loaded)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    def set_states_but_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, position = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][position]]
        set_states(self, model_param, {"step": state["step"], **tensors})

    cls.state_dict = state_dict_of_fresh_optimizer_too
    cls.load_state_dict = load_state_dict_with_own_steps
    cls._set_main_param_and_optimizer_states = set_states_but_step
    cls._qla_resumes = True


def _count_tokens_of_experts_on_cpu() -> None:
    """Fault: the all-to-all dispatcher of experts makes NumPy arrays of its counts, which are the sizes that torch's
    collective wants, only where they come from a GPU. With expert parallelism on a CPU: TypeError.
    """
    import torch
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    move = moe_utils.maybe_move_tensor_to_cpu

    def move_and_convert(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = move(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    token_dispatcher.maybe_move_tensor_to_cpu = move_and_convert


def _predict_tokens_of_gated_delta_net_models() -> None:
    """Fault: the model's builder makes the layers of multi-token prediction by get_gpt_decoder_layer_specs, which
    asserts that there is no attention variant: no Gated DeltaNet model can have them. AssertionError.
    """
    from megatron.training.models import gpt

    from qla_megatron.layers.spec import GDN_VARIANTS, mtp_block_spec

    original = gpt.mtp_block_spec
    if getattr(original, "_qla_knows_gdn", False):
        return

    def block_spec(config: Any, transformer_layer_spec: Any, vp_stage: int | None = None) -> Any:
        if config.transformer.experimental_attention_variant in GDN_VARIANTS:
            return mtp_block_spec(config, vp_stage)
        return original(config, transformer_layer_spec, vp_stage=vp_stage)

    block_spec._qla_knows_gdn = True  # type: ignore[attr-defined]
    gpt.mtp_block_spec = block_spec


def _rotate_packed_documents_on_the_device() -> None:
    """Fault: rotary embedding of packed documents reads all offsets on the host, for queries and for keys of each
    layer, and turns the documents one by one: the host waits for the device, and launches kernels for each document.

    Every token's position follows from the offsets on the device. The arithmetic is Megatron's own, on all tokens at
    once, so that results are the same bits.
    """
    from megatron.core.models.common.embeddings import rope_utils

    rope_utils._apply_rotary_pos_emb_thd = rotate_packed


def rotate_packed(
    t: Any, cu_seqlens: Any, freqs: Any, rotary_interleaved: bool = False, mla_rotary_interleaved: bool = False,
    mscale: float = 1.0, cp_group: Any = None, multi_latent_attention: bool | None = None,
) -> Any:  # fmt: skip
    """Rotary embedding of packed documents: what stands in for Megatron's _apply_rotary_pos_emb_thd.

    Args:
        t: [T / c, H, K], the tokens of this context parallel rank, documents in zigzag; they cover all tokens.
        cu_seqlens: [N + 1], padded offsets in the whole pack, on the device; not read by the host.
        freqs: [P, 1, 1, R] angles of positions; of the whole pack (P = T), each token has its own place's, else its
            place within the document.
        cp_group: the c context parallel ranks.
    """
    import torch
    from megatron.core.models.common.embeddings import rope_utils

    if cp_group is None:
        raise ValueError("cp_group must be given for packed documents, got None")
    if multi_latent_attention is not None:  # its former name
        mla_rotary_interleaved = multi_latent_attention
    size, count = cp_group.size(), len(t)
    offsets = cu_seqlens.long()
    place = torch.arange(count, device=t.device)
    document = torch.searchsorted(offsets[1:] // size, place, right=True)
    start = offsets[document]
    position = place - start // size
    if size > 1:
        piece = offsets.diff()[document] // (2 * size)
        back = (2 * size - 2 - cp_group.rank()) * piece + position
        position = torch.where(position < piece, cp_group.rank() * piece + position, back)
    if len(freqs) == count * size:
        position = position + start
    return rope_utils._apply_rotary_pos_emb_bshd(
        t.unsqueeze(1), freqs[position], rotary_interleaved=rotary_interleaved,
        mla_rotary_interleaved=mla_rotary_interleaved, mscale=mscale,
    ).squeeze(1)  # fmt: skip


def _zero_step() -> Any:
    import torch

    return torch.tensor(0.0)
