"""What one layer of each kind really saves for backward on CUDA, counted without a GPU: prints JSON.

    python tests/recipes/saved_bytes.py TOKENS DOCUMENTS TENSORxCONTEXT [TENSORxCONTEXT ...]

The tensors are torch's fake ones, which have a device, a shape and a storage but no memory, so that operations take the
way of CUDA tensors; the processes are torch's fake group: this one is rank 0, and nobody answers.
"""

import contextlib
import io
import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.arguments import parse_args, validate_args
from megatron.training.models.gpt import GPTModelBuilder
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from qla_megatron.recipes import build, catalogue, overrides, upstream
from qla_megatron.recipes.recipe import Parallel


def saved_bytes(call: Any, parameters: set[int]) -> int:
    """Bytes of the storages that autograd saves while `call` runs, parameters aside."""
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = call()
    assert kept is not None
    return sum(storage.nbytes() for key, storage in storages.items() if key not in parameters)


def bytes_of(tensor: int, context: int, tokens: int, documents: int) -> dict[str, int]:
    """Bytes by kind of layer, of Qwen3.5-0.8B's, for tensor (with sequence) and context parallel sizes."""
    world = tensor * context
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    parallel_state.initialize_model_parallel(tensor, context_parallel_size=context, create_gloo_process_groups=False)
    torch._dynamo.config.disable = True  # no compiler is wanted, and none may be there
    os.environ |= {"WORLD_SIZE": str(world), "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0)
    torch.cuda.current_device = lambda: torch.device("cuda:0")
    # What a fake tensor cannot do: exchange its data with another's.
    torch.nn.utils.skip_init = lambda module, *args, **keywords: module(*args, **keywords)
    upstream.apply()
    short = ["model.num_layers=4", "model.prediction_layers=0"]
    recipe = overrides.apply(catalogue.find("qwen3_5_0_8b_pretrain_4k_1xh200"), short)
    layout = Parallel(gpus=world, device="h200", tensor=tensor, sequence=tensor > 1, context=context)
    recipe = replace(recipe, parallel=layout, data=replace(recipe.data, sequence_length=tokens))
    recipe = replace(recipe, train=replace(recipe.train, global_batch=1, evaluate_sequences=0))
    sys.argv[1:] = [*build.megatron_flags(recipe, "test"), "--use-cpu-initialization", "--no-initialization"]
    with contextlib.redirect_stdout(io.StringIO()):
        args = parse_args()
        validate_args(args, {})
    config = build.model_config(recipe, args)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda:0"):
        found = _of_layers(recipe, config, tokens, documents)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found


def _of_layers(recipe: Any, config: Any, tokens: int, documents: int) -> dict[str, int]:
    model = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    own = tokens // recipe.parallel.context // (recipe.parallel.tensor if recipe.parallel.sequence else 1)
    offsets, longest = torch.zeros(documents + 1, dtype=torch.int32), tokens // documents
    packed = PackedSeqParams("thd", offsets, offsets, offsets, offsets, longest, longest, pad_between_seqs=False)
    rotary = torch.empty(longest, 1, 1, int(recipe.model.head_dim * recipe.model.rotary_fraction))
    hidden = torch.empty(own, 1, recipe.model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    found = {}
    for kind, index in (("gdn", 0), ("attention", recipe.model.attention_interval - 1)):
        layer = model.decoder.layers[index]
        found[kind] = saved_bytes(
            lambda layer=layer: layer(hidden, None, packed_seq_params=packed, rotary_pos_emb=rotary), parameters
        )
    return found


if __name__ == "__main__":
    tokens, documents = map(int, sys.argv[1:3])
    layouts = [tuple(map(int, layout.split("x"))) for layout in sys.argv[3:]]
    print(json.dumps([bytes_of(tensor, context, tokens, documents) for tensor, context in layouts]))
