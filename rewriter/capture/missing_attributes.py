"""Attributes that forward looked for but did not find, found empty, counted, or read from torch's
layers.

``hasattr(self, "mask")``, ``if self.bias is None``, ``for p in self.parameters()``: the answers are
baked into a graph, so the questions are asked again at each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recast.rewriter.compiled.external_state import BakedValue, members, slot
from recast.rewriter.compiled.object_contents import Absent
from recast.rewriter.compiled.value_checks import Contents, Same

from .layers import is_leaf

if TYPE_CHECKING:
    from recast.rewriter.compiled.visible_names import VisibleNames

_OWN = frozenset(vars(nn.Module()))  # what nn.Module keeps of its own
_COUNTED = frozenset({
    "children", "named_children", "modules", "named_modules", "parameters", "named_parameters",
    "buffers", "named_buffers", "state_dict", "_modules", "_parameters", "_buffers",
})  # fmt: skip


def missing(
    asked: Iterable[tuple[str, str]], modules: Mapping[str, nn.Module]
) -> Iterator[tuple[str, str, BakedValue]]:
    """The attributes of modules that were asked for, by (path, name), and are missing, or are None
    where a parameter, a buffer or a module could be.
    """
    for path, name in asked:
        module = modules.get(path)
        if module is None or hasattr(type(module), name):
            continue
        held = slot(module, name)
        if held is None or held is Absent:
            yield path, name, BakedValue("slot", path, name, Same(held))


def counted(names: frozenset[str], modules: Mapping[str, nn.Module]) -> Iterator[BakedValue]:
    """Which parts the modules have, if code with these ``names`` iterates over them."""
    if not names & _COUNTED:
        return
    for path, module in modules.items():
        if not isinstance(module, torch.jit.ScriptModule):
            yield BakedValue("members", path, "parts", Contents(tuple, members(module)))


def of_layers(
    seen: VisibleNames, modules: Mapping[str, nn.Module]
) -> Iterator[tuple[str, str, BakedValue]]:
    """The attributes of torch's layers that code can name, as ``self.emb.padding_idx``. The trace
    does not see these reads, since it watches only the user's own modules. Also those that may be
    missing, as in ``getattr(self.emb, "scale", 1.0)``.
    """
    for path, module in modules.items():
        watched = not is_leaf(module) and not type(module).__module__.startswith("torch.nn")
        if watched or not path or isinstance(module, torch.jit.ScriptModule):
            continue
        for name in seen.names & vars(module).keys() - _OWN:
            value: Any = vars(module)[name]
            if name != "forward" and not isinstance(value, (torch.Tensor, nn.Module)):
                kept = seen.check_of(value, f"{path}.{name}")
                yield path, name, BakedValue("attribute", path, name, kept)
        for name in seen.looked_for - vars(module).keys():
            if slot(module, name) is Absent and not hasattr(type(module), name):
                yield path, name, BakedValue("slot", path, name, Same(Absent))
