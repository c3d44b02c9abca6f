"""`path.to.field=value` on the command line: typed, and a wrong name answered with the nearest right one."""

import difflib
from dataclasses import fields, is_dataclass
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qla_megatron.recipes.recipe import Recipe


def nearest(word: str, choices: list[str]) -> str:
    """ " Did you mean X?" for the choice nearest to `word`, or "" where none is near."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else ""


def paths(recipe: Any, prefix: str = "") -> list[str]:
    """Every path that can be set, `part.field`."""
    found = []
    for item in fields(recipe):
        value = getattr(recipe, item.name)
        path = prefix + item.name
        found += paths(value, path + ".") if is_dataclass(value) else [path]
    return found


def apply(recipe: Recipe, assignments: list[str]) -> Recipe:
    """The recipe with each `path=value` applied, in order.

    Values are read as YAML: 3, 1e-4, true, null, [a, b]. Types are those of the fields.

    Raises:
        ValueError: no `=`, an unknown path (with the nearest known one), or a value that does not fit the field's type.
    """
    known = paths(recipe)
    config = OmegaConf.structured(recipe)
    OmegaConf.set_readonly(config, False)
    for item in fields(recipe):
        OmegaConf.set_readonly(config[item.name], False)
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(f"expected path.to.field=value, got {assignment!r}")
        if path not in known:
            raise ValueError(f"no field {path!r} in a recipe.{_suggest(path, known)}")
        try:
            config = cast(DictConfig, OmegaConf.merge(config, OmegaConf.from_dotlist([assignment])))
            OmegaConf.to_object(config)
        except OmegaConfBaseException as error:
            raise ValueError(f"{path}={value}: {str(error).splitlines()[0]}") from error
        except Exception as error:  # the YAML reader's own, which OmegaConf lets through
            raise ValueError(f"{path}={value}: the value is not YAML") from error
    return cast(Recipe, OmegaConf.to_object(config))


def _suggest(path: str, known: list[str]) -> str:
    # A field's bare name, or a right name in a wrong part, is nearer to what was meant than the spelling of the path.
    name = path.rpartition(".")[2]
    same_name = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
    if same_name:
        return f" Did you mean {' or '.join(same_name)}?"
    return nearest(path, known) or nearest(name, [candidate.rpartition(".")[2] for candidate in known])
