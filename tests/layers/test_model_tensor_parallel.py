"""A model of Gated DeltaNet and full-attention layers, split over tensor parallel ranks: losses and every gradient.

The ranks are more than the key and value heads of full attention, as in most mixtures of experts at TP 4.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from layer_cases import assert_close, packed, sum_replicated_gradients
from megatron.core import dist_checkpointing
from megatron.core.transformer.module import MegatronModule
from test_spec import four_layers, gpt, losses, randomise

from qla_megatron.testing.distributed import run_ranks

TOLERANCE = 1e-4  # float32 through four layers; what is summed twice or not at all is off by more than 0.1
DOCUMENTS = [24, 40]
KV_HEADS = 2


def _model(sequence_parallel: bool) -> MegatronModule:
    ranks = dist.get_world_size()
    changes = {"tensor_model_parallel_size": ranks, "sequence_parallel": sequence_parallel}
    return gpt(four_layers(num_query_groups=KV_HEADS, **changes))


def _save(folder: Path) -> None:
    """The whole model's weights and losses, and its gradients in the place of weights."""
    model = _model(sequence_parallel=False)
    randomise(model)
    dist_checkpointing.save(model.sharded_state_dict(), str(folder / "weights"))
    loss = losses(model, packed(DOCUMENTS))
    torch.save(loss.detach(), folder / "losses.pt")
    loss.mean().backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    dist_checkpointing.save(model.sharded_state_dict(), str(folder / "gradients"))


def _load(folder: Path) -> None:
    for sequence_parallel in (False, True):
        model, expected = _model(sequence_parallel), _model(sequence_parallel)
        for target, name in ((model, "weights"), (expected, "gradients")):
            target.load_state_dict(dist_checkpointing.load(target.sharded_state_dict(), str(folder / name)))
        loss = losses(model, packed(DOCUMENTS))
        assert_close(loss.detach(), torch.load(folder / "losses.pt"), TOLERANCE, "losses")
        loss.mean().backward()
        sum_replicated_gradients(model, model.config)
        for (name, parameter), gradient in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert_close(parameter.grad, gradient.detach(), TOLERANCE, f"gradient of {name}")


def test_more_ranks_than_key_and_value_heads(tmp_path: Path) -> None:
    for name in ("weights", "gradients"):
        (tmp_path / name).mkdir()
    run_ranks(_save, 1, tmp_path)
    run_ranks(_load, 2 * KV_HEADS, tmp_path)
