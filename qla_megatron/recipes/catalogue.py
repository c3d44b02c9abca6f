"""All recipes by name: those of tables, one a line, and every public function of tiny.py."""

import inspect
from collections.abc import Callable
from functools import partial

from qla_megatron.recipes import qwen3_5, qwen3_6, tiny
from qla_megatron.recipes.models import MODELS
from qla_megatron.recipes.overrides import nearest
from qla_megatron.recipes.recipe import Recipe

RECIPES: dict[str, Callable[[], Recipe]] = {
    name: function
    for name, function in vars(tiny).items()
    if inspect.isfunction(function) and function.__module__ == tiny.__name__
}
for _table in (qwen3_5.RUNS, qwen3_6.RUNS):
    RECIPES |= {name: partial(qwen3_5.recipe, name, run) for name, run in _table.items()}


def find(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        ValueError: there is none; the text names the nearest one.
    """
    if name not in RECIPES:
        raise ValueError(f"no recipe {name!r}.{nearest(name, list(RECIPES))} See them all with --list.")
    return RECIPES[name]()


def by_model() -> dict[str, list[str]]:
    """The names of all recipes, grouped by the models' names; by purpose, sequence and GPUs within a group."""
    models = [*dict.fromkeys(name.rsplit("_", 3)[0] for name in RECIPES)]
    models.sort(key=lambda model: list(MODELS).index(model) if model in MODELS else -1)
    return {model: [name for name in RECIPES if name.rsplit("_", 3)[0] == model] for model in models}
