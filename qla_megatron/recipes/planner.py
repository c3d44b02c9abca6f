"""What a recipe needs: parameters, memory, FLOPs, communication and expected time, without a GPU.

    python -m qla_megatron.recipes.run NAME --plan [path.to.field=value ...]

Memory is counted tensor by tensor (memory.py), time from measured rates (step_time.py). Where a recipe does not fit its
hardware, `alternatives` looks through other layouts, of the same GPUs first, for those that do.
"""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from qla_megatron.recipes import checks, flops, memory, overrides, parameters, step_time
from qla_megatron.recipes.memory import StageMemory
from qla_megatron.recipes.recipe import Recipe
from qla_megatron.recipes.step_time import StepTime

GIB = 2**30
DEVICE_GIB = {"h100": 79.1, "h200": 139.8}
"""What torch reports as a device's whole memory, GiB (SXM, 80 and 141 GB)."""
RESERVED_GIB = 3.0
"""Kept free of tensors: CUDA context, NCCL's buffers, workspaces of cuBLAS. An assumption."""
FRAGMENTATION = 0.05
"""Part of the tensors' memory that the caching allocator loses between blocks. An assumption."""
LONGEST_ASSUMED_DOCUMENT = 32_768
"""Documents are taken to be so long where sequences are longer, unless the caller says otherwise."""


@dataclass(frozen=True)
class Plan:
    """The figures of one recipe."""

    recipe: Recipe
    document_length: int
    parameters: int
    """Of the text model; prediction blocks beside it."""
    prediction_parameters: int
    active_parameters: int
    """That a token passes, of the text model."""
    stages: tuple[StageMemory, ...]
    flops_per_token: flops.Flops
    """Forward and backward, nothing counted that is computed again."""
    sent: dict[str, float]
    """Bytes that a GPU sends in a step, by kind."""
    time: StepTime

    @property
    def fullest(self) -> int:
        """The pipeline stage that needs the most memory."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].peak)

    @property
    def peak_gib(self) -> float:
        """Tensors on a GPU of the fullest stage at the worst moment, GiB: torch.cuda.max_memory_allocated."""
        return self.stages[self.fullest].peak / GIB

    @property
    def room_gib(self) -> float | None:
        """What tensors may take on the recipe's device, GiB; None on a CPU."""
        return room_gib(self.recipe)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the room."""
        return self.room_gib is None or self.peak_gib <= self.room_gib

    @property
    def tokens_per_step(self) -> int:
        """Token slots of a step, over all GPUs."""
        return self.recipe.train.global_batch * self.recipe.data.sequence_length

    @property
    def tokens_per_second(self) -> float:
        """A GPU's share of the expected rate."""
        return self.tokens_per_step / self.time.total / self.recipe.parallel.gpus

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over the bf16 peak; None on a CPU."""
        peak = flops.PEAK_BF16_FLOPS.get(self.recipe.parallel.device)
        return None if peak is None else self.tokens_per_second * self.flops_per_token.total / peak

    def as_dict(self) -> dict[str, Any]:
        """All figures, for machines: bytes, seconds, FLOPs."""
        memory_of = [
            asdict(stage) | {"static": stage.static, "saved": stage.saved, "peak": stage.peak} for stage in self.stages
        ]
        return {
            "recipe": asdict(self.recipe),
            "document_length": self.document_length,
            "parameters": {
                "text": self.parameters, "prediction": self.prediction_parameters, "active": self.active_parameters,
            },
            "memory_bytes": memory_of,
            "fullest_stage": self.fullest,
            "peak_gib": self.peak_gib,
            "room_gib": self.room_gib,
            "fits": self.fits,
            "flops_per_token": asdict(self.flops_per_token) | {"total": self.flops_per_token.total},
            "sent_bytes_per_step": self.sent,
            "step_seconds": asdict(self.time) | {"total": self.time.total},
            "tokens_per_step": self.tokens_per_step,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "mfu": self.mfu,
        }  # fmt: skip


def plan(recipe: Recipe, document_length: int | None = None) -> Plan:
    """The figures of a recipe that `checks.check` has passed.

    Args:
        document_length: tokens of the documents in a pack, all alike; None: the sequence, at most 32,768. What full
            attention costs grows with it; memory does not depend on it.

    Raises:
        ValueError: a document longer than the sequence, or without a token.
    """
    m, length = recipe.model, recipe.data.sequence_length
    document_length = min(length, LONGEST_ASSUMED_DOCUMENT) if document_length is None else document_length
    if not 1 <= document_length <= length:
        raise ValueError(f"document_length must be from 1 to data.sequence_length={length}, got {document_length}")
    return Plan(
        recipe=recipe,
        document_length=document_length,
        parameters=parameters.text_model(m).total,
        prediction_parameters=m.prediction_layers * parameters.prediction(m).total,
        active_parameters=parameters.active(m),
        stages=tuple(memory.of_stages(recipe)),
        flops_per_token=flops.flops_per_token(m, [document_length]),
        sent=step_time.sent_bytes(recipe),
        time=step_time.step_time(recipe, document_length),
    )


def alternatives(recipe: Recipe, document_length: int | None = None, most: int = 5) -> list[tuple[list[str], Plan]]:
    """Changes that let a recipe fit its hardware, each with its plan: on the fewest GPUs first, then of the fewest
    fields, then the fastest. The global batch and the model stay as they are. All are checked and planned.

    Args:
        most: so many at the most.
    """
    by_set = {}
    for changed in _layouts(recipe):
        changes = _differences(recipe, changed)
        if changes and not _is_refused(changed) and has_room(changed):
            by_set[tuple(changes)] = changes, plan(changed, document_length)
    minimal = [  # a change that does more than another which is enough by itself helps nobody
        pair for key, pair in by_set.items() if not any(set(other) < set(key) for other in by_set)
    ]
    minimal.sort(key=lambda pair: (pair[1].recipe.parallel.gpus, len(pair[0]), pair[1].time.total))
    return minimal[:most]


def has_room(recipe: Recipe) -> bool:
    """Whether a recipe's memory is within the room of its device."""
    room = room_gib(recipe)
    return room is None or max(stage.peak for stage in memory.of_stages(recipe)) <= room * GIB


def room_gib(recipe: Recipe) -> float | None:
    """What tensors may take on a recipe's device, GiB; None on a CPU."""
    device = DEVICE_GIB.get(recipe.parallel.device)
    return None if device is None else (device - RESERVED_GIB) / (1 + FRAGMENTATION)


def _is_refused(recipe: Recipe) -> bool:
    try:
        checks.check(recipe)
    except checks.RecipeError:
        return True
    return False


def _layouts(recipe: Recipe) -> Iterator[Recipe]:
    """Other layouts, on the same GPUs or twice and four times as many."""
    p, m, t = recipe.parallel, recipe.model, recipe.train
    fractions = {
        "tensor": _powers(p.tensor, 8), "context": _powers(p.context, 16), "pipeline": _powers(p.pipeline, 16),
        "expert": _powers(p.expert, 64) if m.num_experts else [1],
    }  # fmt: skip
    order: tuple[Literal["none", "norms", "mlp", "full"], ...] = ("none", "norms", "mlp", "full")
    for gpus, *sizes in itertools.product((p.gpus, 2 * p.gpus, 4 * p.gpus), *fractions.values()):
        tensor, context, pipeline, expert = sizes
        if tensor * context * pipeline > gpus or pipeline * expert > gpus or tensor * context > m.gdn_key_heads:
            continue
        moved = pipeline != p.pipeline
        layout = replace(
            p, gpus=gpus, tensor=tensor, context=context, pipeline=pipeline, expert=expert,
            sequence=p.sequence if tensor == p.tensor else tensor > 1,
            layers_per_virtual_stage=None if moved else p.layers_per_virtual_stage,
            first_stage_layers=None if moved else p.first_stage_layers,
            last_stage_layers=None if moved else p.last_stage_layers,
        )  # fmt: skip
        for recompute in order[order.index(t.recompute) :]:
            for chunked in {t.chunked_loss, True}:
                yield replace(recipe, parallel=layout, train=replace(t, recompute=recompute, chunked_loss=chunked))


def _powers(smallest: int, largest: int) -> list[int]:
    sizes = [smallest]
    while sizes[-1] * 2 <= largest:
        sizes.append(sizes[-1] * 2)
    return sizes


def _differences(before: Recipe, after: Recipe) -> list[str]:
    """The overrides that lead from one recipe to the other."""
    changes = []
    for path in overrides.paths(before):
        part, name = path.split(".")
        old, new = (getattr(getattr(recipe, part), name) for recipe in (before, after))
        if old != new:
            changes.append(f"{path}={'null' if new is None else str(new).lower() if isinstance(new, bool) else new}")
    return changes
