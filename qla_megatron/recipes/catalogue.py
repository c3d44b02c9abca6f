"""All recipes by name: every public function of the recipe modules that takes nothing and returns a Recipe."""

import inspect
from collections.abc import Callable

from qla_megatron.recipes import qwen3_5, qwen3_6, tiny
from qla_megatron.recipes.overrides import nearest
from qla_megatron.recipes.recipe import Recipe

RECIPES: dict[str, Callable[[], Recipe]] = {
    name: function
    for module in (tiny, qwen3_5, qwen3_6)
    for name, function in vars(module).items()
    if inspect.isfunction(function)
    and function.__module__ == module.__name__
    and not inspect.signature(function).parameters
}


def find(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        ValueError: there is none; the text names the nearest one.
    """
    if name not in RECIPES:
        raise ValueError(f"no recipe {name!r}.{nearest(name, list(RECIPES))} See them all with --list.")
    return RECIPES[name]()
