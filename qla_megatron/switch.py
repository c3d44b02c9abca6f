"""Make models that Megatron builds from its own specs take our Gated DeltaNet.

Three ways, none of which changes a configuration value (`experimental_attention_variant` stays "gated_delta_net", or
"gdn" in later versions of Megatron):

- by configuration alone: `--spec qla_megatron.layers.spec gpt_block_spec`, or `hybrid_stack_spec` for HybridModel.
  The only way without Transformer Engine, which Megatron's own Gated DeltaNet specs need.
- `swap_gdn(spec)`: a spec with our layer in place of Megatron's, for callers that hold the spec.
- `enable()`: one call before the model is built, for callers that build Megatron's specs themselves.

Megatron-Bridge works with all three: it maps weights by `type(module).__name__`, and our class is called
GatedDeltaNet too, has the same parameters and is a subclass of Megatron's.
"""

import logging
import threading
from typing import Any

from megatron.core.models.gpt import experimental_attention_variant_module_specs as gpt_specs
from megatron.core.models.hybrid import hybrid_layer_specs
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.post_training.modelopt.hybrid import model_specs as modelopt_specs
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as MegatronGatedDeltaNet
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import log_single_rank

from qla_megatron.layers.gated_delta_net import GatedDeltaNet
from qla_megatron.layers.spec import swap_gdn

__all__ = ["disable", "enable", "is_enabled", "swap_gdn"]

logger = logging.getLogger(__name__)
_replaced: list[tuple[Any, str]] = []
_lock = threading.Lock()


def _places() -> list[tuple[Any, str]]:
    """Where Megatron looks its GatedDeltaNet up when it makes or holds a spec: objects and names of attributes."""
    specs = [value for value in vars(hybrid_layer_specs).values() if isinstance(value, ModuleSpec)]
    layers = [spec.submodules.gdn_layer for spec in specs if isinstance(spec.submodules, HybridStackSubmodules)]
    mixers = {id(m): m for m in (layer.submodules.self_attention for layer in layers if isinstance(layer, ModuleSpec))}
    modules = [(gpt_specs, "GatedDeltaNet"), (modelopt_specs, "GatedDeltaNet")]
    return [*modules, *((mixer, "module") for mixer in mixers.values())]


def enable() -> None:
    """Let Megatron's own spec functions build our layer, in GPT block specs and for a hybrid stack's symbol G.

    Models that exist already stay as they are. A second call does nothing; `disable()` undoes it. Logs one line (INFO).

    Raises:
        RuntimeError: this version of Megatron keeps its GatedDeltaNet in none of the places known here.
    """
    with _lock:
        found = [(holder, name) for holder, name in _places() if getattr(holder, name) is MegatronGatedDeltaNet]
        if not found and not _replaced:
            raise RuntimeError("found no GatedDeltaNet of Megatron to replace: this needs megatron-core 0.19")
        for holder, name in found:
            setattr(holder, name, GatedDeltaNet)
        _replaced.extend(found)
    if found:
        text = "%s.GatedDeltaNet replaced by %s.GatedDeltaNet in Megatron's GPT and hybrid layer specs"
        log_single_rank(logger, logging.INFO, text, MegatronGatedDeltaNet.__module__, GatedDeltaNet.__module__)


def disable() -> None:
    """Undo `enable()`: specs made from now on name Megatron's layer. Does nothing where nothing was enabled."""
    with _lock:
        for holder, name in _replaced:
            setattr(holder, name, MegatronGatedDeltaNet)
        _replaced.clear()


def is_enabled() -> bool:
    """Whether `enable()` is in effect."""
    return bool(_replaced)
