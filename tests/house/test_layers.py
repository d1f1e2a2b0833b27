"""Three layers, one direction: passes know rewriter and runtime, which know neither passes nor each
other. Only the public entry sees all three. Checked on all imports, wherever in a file they are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("rewriter", "passes", "runtime")
SEES = {"rewriter": set(), "passes": {"rewriter", "runtime"}, "runtime": set()}
ENTRY = (
    "rewriter/api*.py",
    "rewriter/cli/*.py",
    "rewriter/pytest_plugin.py",
    "rewriter/spread/*.py",
)
FORBIDDEN = {"runtime": "torch.fx"}  # the runtime knows no graphs


def files(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py"))


def imports(source: str, package: str) -> Iterator[tuple[str, int]]:
    """``(absolute module name, line)`` of every import in ``source``, a file of ``package``.

    ``from a import b`` yields both ``a`` and ``a.b``: ``b`` may be a module.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(up if node.level else []), *([node.module] if node.module else [])])
            yield base, node.lineno
            yield from ((f"{base}.{name.name}", node.lineno) for name in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            named = (a.value for a in node.args[:1] if isinstance(a, ast.Constant))
            yield from ((str(name), node.lineno) for name in named)


def violations(layer: str, source: str) -> Iterator[str]:
    for name, line in imports(source, f"recast.{layer}"):
        parts = name.split(".")
        if parts[0] in LAYERS:
            yield f"line {line}: {name} is not the name of an installed package"
        other = parts[1] if parts[0] == "recast" and len(parts) > 1 else ""
        if other in LAYERS and other != layer and other not in SEES[layer]:
            yield f"line {line}: {layer} may not import {name}"
        if layer in FORBIDDEN and (name + ".").startswith(FORBIDDEN[layer] + "."):
            yield f"line {line}: {layer} may not import {name}"


@pytest.mark.parametrize("layer", LAYERS)
def test_one_direction(layer: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}: {each}"
        for path in files(layer)
        if not any(path.relative_to(ROOT).match(pattern) for pattern in ENTRY)
        for each in violations(layer, path.read_text())
    }
    assert not found
    assert len(files(layer)) > 2


def test_the_door_holds_names_only() -> None:
    """``recast/`` re-exports; what it says of its own are errors and the version."""
    own = {p.name for p in (ROOT / "recast").glob("*.py")}
    assert own <= {
        "__init__.py",
        "__main__.py",
        "auc.py",
        "checkpoint.py",
        "dynamic.py",
        "errors.py",
        "optim.py",
        "planner.py",
    }
    assert not list(violations("runtime", (ROOT / "recast" / "errors.py").read_text()))


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("runtime", "from recast.passes import mlp"),
        ("runtime", "from recast import rewriter"),
        ("runtime", "def f():\n    import recast.rewriter.ir"),
        ("runtime", "from torch import fx"),
        ("runtime", "import torch.fx.passes"),
        ("runtime", "from ..rewriter import ir"),
        ("runtime", "import importlib\nimportlib.import_module('recast.passes')"),
        ("rewriter", "from recast.runtime import ops"),
        ("rewriter", "from .. import passes"),
        ("passes", "from runtime import ops"),
    ],
)
def test_this_test_can_fail(layer: str, source: str) -> None:
    assert list(violations(layer, source))


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        (
            "passes",
            "from recast.rewriter import ir\nfrom recast.runtime import ops\nfrom . import mlp",
        ),
        (
            "rewriter",
            "from .ir import Graph\nfrom recast.errors import UsageError\nfrom torch import fx",
        ),
        ("runtime", "from .op import OPS\nimport torch.fx_something"),
    ],
)
def test_the_allowed_passes(layer: str, source: str) -> None:
    assert not list(violations(layer, source))
