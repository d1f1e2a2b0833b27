"""Imports of packages that a library wants and its models never call.

A library imports its trainers, converters and text tools with its models. Packages of theirs that
are not installed are replaced by empty modules here, during an import only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar


class _Empty(ModuleType):
    """A module in which every name is a class that does nothing."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


class _Finder:
    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = set(packages)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        wanted = name.partition(".")[0] in self.packages
        return ModuleSpec(name, self, is_package=True) if wanted else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is empty."""


@contextlib.contextmanager
def without(*packages: str) -> Iterator[None]:
    """Import as if ``packages`` were installed; those that are installed are used."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    finder = _Finder(missing)
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in [n for n in sys.modules if n.partition(".")[0] in missing]:
            del sys.modules[name]
