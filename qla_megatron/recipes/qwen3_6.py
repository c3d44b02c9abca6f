"""Recipes of the Qwen3.6 sizes, 27B and 35B-A3B: the shapes and the layouts of Qwen3.5's."""

from qla_megatron.recipes import qwen3_5
from qla_megatron.recipes.models import MODELS

_ALIKE = tuple(name.replace("qwen3_6", "qwen3_5") + "_" for name in MODELS if name.startswith("qwen3_6"))
RUNS = {name.replace("qwen3_5", "qwen3_6"): run for name, run in qwen3_5.RUNS.items() if name.startswith(_ALIKE)}
