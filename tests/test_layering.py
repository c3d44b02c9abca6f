"""Imports point one way: ARCHITECTURE.md, "Layout"."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "qla_megatron"

# part -> what its modules may import, as prefixes; the standard library is always allowed
EXTERNAL = {
    "kernels": {"torch", "tilelang", "tvm"},
    "layers": {"torch", "megatron"},
    "layers/spec.py": {"torch", "megatron", "transformer_engine"},
    "data": {"torch", "megatron", "numpy", "tokenizers", "transformers", "rich"},
    "recipes": {"torch", "megatron", "numpy", "omegaconf", "rich"},
    "recipes/hugging_face/files.py": {"torch", "safetensors"},
    "recipes/hugging_face/check.py": {"torch", "rich", "transformers"},
    "switch.py": {"megatron"},
    "testing": {"torch"},
    "testing/platform.py": {"torch", "megatron"},
    "testing/distributed.py": {"torch", "megatron"},
    "__init__.py": set(),
}
INTERNAL = {
    "kernels": {"kernels"},
    "layers": {"layers", "kernels", "data.zigzag"},
    "data": {"data"},
    "recipes": {"recipes", "layers", "data", "switch", "testing.platform"},
    "switch.py": {"layers"},
    "testing": {"testing"},
    "__init__.py": set(),
}


def imported_names(path: Path) -> list[str]:
    package = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def allowed(table: dict[str, set[str]], where: Path) -> set[str]:
    return table[where.as_posix()] if where.as_posix() in table else table[where.parts[0]]


def begins_with(name: str, prefixes: set[str]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in prefixes)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_point_one_way(path: Path) -> None:
    where = path.relative_to(PACKAGE)
    for name in imported_names(path):
        if name.split(".")[0] in sys.stdlib_module_names:
            continue
        if name.startswith("qla_megatron."):
            inside = name.removeprefix("qla_megatron.")
            assert begins_with(inside, allowed(INTERNAL, where)), f"{where} must not import {name}"
        else:
            assert begins_with(name, allowed(EXTERNAL, where)), f"{where} must not import {name}"


OP = PACKAGE / "kernels" / "gated_delta_rule"
OP_LEVELS = [
    {"reference", "tiles"},
    {"triangle", "backward_tiles"},
    {"prepare_chunks", "state_output", "state_gradient", "recompute_states", "chunk_gradients"},
    {"fused_forward", "fused_backward"},
    {"chunked"},
    {"autograd"},
    {"op"},
]


def test_op_files_point_down() -> None:
    level = {name: n for n, names in enumerate(OP_LEVELS) for name in names}
    assert {path.stem for path in OP.glob("*.py")} == {*level, "__init__"}
    for name, own in level.items():
        for imported in imported_names(OP / f"{name}.py"):
            other = imported.removeprefix("qla_megatron.kernels.gated_delta_rule.").split(".")[0]
            assert level.get(other, -1) < own, f"{name} imports {other}"


def test_import_touches_no_gpu_and_no_megatron() -> None:
    code = (
        "import sys, qla_megatron, qla_megatron.kernels.gated_delta_rule, torch;"
        "assert not torch.cuda.is_initialized();"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'megatron'];"
        "assert 'kernels' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_public_names_exist() -> None:
    import qla_megatron

    for name in qla_megatron.__all__:
        assert getattr(qla_megatron, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        qla_megatron.no_such_name  # noqa: B018
