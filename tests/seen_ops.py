"""A mode that notes which ops reach the dispatcher below autograd."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class SeenOps(TorchDispatchMode):
    """``names``: of all ops that ran inside, in their order, as ``"aten.mm.default"``."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def of_torch(self, word: str) -> list[str]:
        """Those of torch's own that have ``word`` in their name."""
        return [name for name in self.names if name.startswith("aten.") and word in name]
