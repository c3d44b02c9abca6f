"""A plan for people: tables of memory, work, messages and time, and what to change where it does not fit."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from qla_megatron.recipes import build, planner, step_time
from qla_megatron.recipes.planner import GIB, Plan
from qla_megatron.recipes.recipe import Recipe

PARALLEL = ("tensor", "context", "pipeline", "expert")


def print_plan(name: str, plan: Plan, console: Console) -> None:
    """All figures of a plan, and, where it does not fit, changes that do."""
    p = plan.recipe.parallel
    console.print(f"{name}: {p.gpus} {p.device}, {layout(plan.recipe)}", highlight=False, markup=False)
    console.print(
        f"{plan.tokens_per_step:,} tokens a step, sequences of {plan.recipe.data.sequence_length:,}, documents of "
        f"{plan.document_length:,}; recompute {plan.recipe.train.recompute}",
        highlight=False,
    )
    for table in (_memory(plan), _work(plan), _time(plan)):
        console.print()
        console.print(table)
    console.print()
    for note in notes(plan.recipe):
        console.print(f"Note: {note}", highlight=False, markup=False)
    console.print(verdict(plan), highlight=False, markup=False)
    if not plan.fits:
        _print_alternatives(plan, console)


def layout(recipe: Recipe) -> str:
    """Parallel sizes in short, as TP2 PP4 EP16 DP8."""
    p = recipe.parallel
    sizes = {"TP": p.tensor, "CP": p.context, "PP": p.pipeline, "EP": p.expert, "DP": p.data}
    return " ".join(f"{short}{size}" for short, size in sizes.items() if size > 1) or "one process"


def verdict(plan: Plan) -> str:
    """Whether it fits, in a sentence."""
    if plan.room_gib is None:
        return "Memory of a CPU is not judged."
    p = plan.recipe.parallel
    says = "Fits" if plan.fits else "Does not fit"
    return (
        f"{says}: {plan.peak_gib:.1f} GiB of tensors at the peak, room for {plan.room_gib:.1f} on an {p.device} "
        f"({planner.DEVICE_GIB[p.device]} GiB less {planner.RESERVED_GIB} for CUDA and NCCL, "
        f"{planner.FRAGMENTATION:.0%} lost between blocks)."
    )


def notes(recipe: Recipe) -> list[str]:
    """Where the figures are those of something else than what will run."""
    m, p = recipe.model, recipe.parallel
    found = []
    if build.has_transformer_engine():
        found.append("with Transformer Engine, which is installed, layers save less than is counted here.")
    if p.device == "cpu":
        found.append("activations are counted as on CUDA; time is not that of a CPU.")
    elif m.gdn == "megatron" or m.gdn_backend == "reference":
        found.append("GDN layers are counted on this package's kernels, not as model.gdn and gdn_backend ask for.")
    return found


def _memory(plan: Plan) -> Table:
    stage = plan.stages[plan.fullest]
    table = Table("memory of a GPU", "GiB", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    where = "" if len(plan.stages) == 1 else f" (pipeline stage {plan.fullest + 1} of {len(plan.stages)}, the fullest)"
    table.columns[0].header = f"memory of a GPU{where}"
    rows = {"weights": stage.weights, "gradients": stage.gradients, "optimizer": stage.optimizer}
    rows |= {f"activations: {part}": size for part, size in stage.activations.items() if size}
    _add(table, rows, GIB, "{:.2f}")
    moments = {
        f"at the loss: logits{' of a chunk, gradients' if plan.recipe.train.chunked_loss else ''}": stage.loss,
        "in backward: one layer's gradients" + _again(plan.recipe): stage.backward,
        "in the optimizer's step, instead of activations": stage.optimizer_step,
    }
    _add(table, {name: size for name, size in moments.items() if size}, GIB, "{:.2f}")
    table.add_row("peak", f"{stage.peak / GIB:.2f}", style="bold")
    return table


def _again(recipe: Recipe) -> str:
    return {"full": ", its activations made again", "mlp": ", its MLP's activations made again"}.get(
        recipe.train.recompute, ""
    )


def _work(plan: Plan) -> Table:
    table = Table(
        "parameters", "millions", "GFLOPs a token", "", "sent by a GPU a step", "GB", box=None, pad_edge=False
    )
    for column in (1, 3, 5):
        table.columns[column].justify = "right"
    parameters = {"text model": plan.parameters, "prediction blocks": plan.prediction_parameters}
    parameters["active a token"] = plan.active_parameters
    flops = {
        "projections": plan.flops_per_token.projections,
        "gated delta rule": plan.flops_per_token.rule,
        "attention": plan.flops_per_token.attention,
        "MLPs": plan.flops_per_token.mlp,
        "vocabulary": plan.flops_per_token.vocabulary,
        "all": plan.flops_per_token.total,
    }
    columns: list[list[tuple[str, str]]] = [
        [(name, f"{number / 1e6:,.1f}") for name, number in parameters.items()],
        [(name, f"{number / 1e9:.2f}") for name, number in flops.items()],
        [(f"{name} parallel" if name in PARALLEL else name, f"{size / 1e9:.1f}") for name, size in plan.sent.items()],
    ]
    for row in range(max(len(column) for column in columns)):
        table.add_row(*(cell for column in columns for cell in (column[row] if row < len(column) else ("", ""))))
    return table


def _time(plan: Plan) -> Table:
    table = Table("expected step", "seconds", "", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    t = plan.time
    kinds = {
        "matrix products": t.products,
        "gated delta rule": t.rule,
        "attention": t.attention,
        "element by element": t.elementwise,
        "communication that is not hidden": t.communication,
        "waiting for other pipeline stages": t.bubble,
        "optimizer": t.optimizer,
    }
    for name, seconds in kinds.items():
        table.add_row(name, f"{seconds:.3f}", f"{seconds / t.total:.0%}")
    mfu = "" if plan.mfu is None else f", MFU {plan.mfu:.1%}"
    table.add_row("all", f"{t.total:.3f}", f"{plan.tokens_per_second:,.0f} tokens/s a GPU{mfu}", style="bold")
    return table


def print_rates(console: Console) -> None:
    """The numbers that expected times rest on, measured or assumed."""
    table = Table("rate", "value", "unit", "source", box=None, pad_edge=False)
    for name, rate in step_time.RATES.items():
        table.add_row(name, f"{rate.value:g}", rate.unit, rate.source)
    console.print(table)


def _add(table: Table, rows: dict[str, float], unit: float, form: str) -> None:
    for name, size in rows.items():
        table.add_row(name, form.format(size / unit))


def _print_alternatives(plan: Plan, console: Console) -> None:
    found = planner.alternatives(plan.recipe, plan.document_length)
    if not found:
        console.print(
            "No layout of up to four times as many GPUs fits. Shorter sequences (data.sequence_length) or GPUs with "
            "more memory (parallel.device) would.",
            highlight=False,
        )
        return
    console.print("These changes do, each checked and planned:", highlight=False)
    for changes, changed in found:
        console.print(
            f"    {' '.join(changes)}    {changed.peak_gib:.1f} GiB, {changed.tokens_per_second:,.0f} tokens/s a GPU",
            highlight=False,
            markup=False,
        )


SUMMARY = ("recipe", "GPUs", "sequence", "layout", "recompute", "tokens a step", "GiB a GPU", "tokens/s a GPU", "MFU")
"""The columns of a table of recipes: a name, and what `summary_row` gives."""


def summary_row(plan: Plan) -> Iterable[str]:
    """One recipe in a table: GPUs, sequence, layout, tokens, memory, expected rate."""
    recipe = plan.recipe
    room = "" if plan.room_gib is None else f" of {plan.room_gib:.0f}"
    return (
        f"{recipe.parallel.gpus} {recipe.parallel.device}",
        f"{recipe.data.sequence_length:,}",
        layout(recipe),
        recipe.train.recompute,
        f"{plan.tokens_per_step / 1e6:.1f}M" if plan.tokens_per_step >= 1e5 else f"{plan.tokens_per_step:,}",
        f"{plan.peak_gib:.0f}{room}" if plan.peak_gib >= 1 else f"{plan.peak_gib:.1f}{room}",
        "" if plan.mfu is None else f"{plan.tokens_per_second:,.0f}",
        "" if plan.mfu is None else f"{plan.mfu:.0%}",
    )


def size_of(plan: Plan) -> str:
    """Parameters of a model, as 396.3B, 17.3B active, 6.6B in prediction blocks."""
    parts = [number(plan.parameters)]
    if plan.active_parameters != plan.parameters:
        parts.append(f"{number(plan.active_parameters)} active")
    if plan.prediction_parameters:
        parts.append(f"{number(plan.prediction_parameters)} in prediction blocks")
    return ", ".join(parts)


def number(value: float) -> str:
    """A count with three digits: 0.75B, 20.5M."""
    return f"{value / 1e9:.3g}B" if value >= 1e9 else f"{value / 1e6:.3g}M"
