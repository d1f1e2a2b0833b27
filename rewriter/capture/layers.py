"""Which modules become one node: torch's own layers, and modules that must run as they are."""

from __future__ import annotations

import torch
from torch import nn

# A subclass of these that overrides forward is read like any module of the user's: what it hands to
# the layer's own forward is one call. The others have more behind theirs ("same" padding apart).
_READ = (nn.Embedding, nn.EmbeddingBag, nn.Linear, nn.modules.conv._ConvNd)


def is_leaf(module: nn.Module) -> bool:
    """Whether a call of ``module`` becomes one node: a layer of torch, or a module that must run as
    it is.
    """
    return torch_layer(type(module)) or why_opaque(module) is not None


def torch_layer(kind: type) -> bool:
    """Whether ``kind`` is a layer of torch (not a container), or a subclass that keeps its forward.
    A class may declare itself one (``recast_layer``): a layer of torch in another form.
    """
    if getattr(kind, "recast_layer", False):
        return True
    base = next((k for k in kind.__mro__ if "forward" in vars(k)), None)
    if base is None or not base.__module__.startswith("torch.nn"):
        return False
    return base not in (nn.Sequential, nn.Module)


def runs_users_code(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs code of the user's: its own forward, a hook, or that of a
    module that a layer of torch holds, as ``nn.TransformerEncoder`` does.
    """
    return any(not torch_layer(type(m)) or why_opaque(m) is not None for m in module.modules())


def shares_gradients(module: nn.Module) -> bool:
    """Whether ``module`` is a wrapper that averages or shards over ranks: its forward prepares that
    beside what it computes.
    """
    homes = ("torch.nn.parallel.distributed", "torch.distributed.fsdp")
    return any(kind.__module__.startswith(homes) for kind in type(module).__mro__)


def why_opaque(module: nn.Module) -> str | None:
    """Why ``module`` has to run as it is, or None."""
    if shares_gradients(module):
        return f"{type(module).__name__} prepares the gradients of all ranks in its forward"
    if isinstance(module, torch.jit.ScriptModule):
        return "a TorchScript module"
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has forward hooks, which must run"
    if module._backward_hooks or module._backward_pre_hooks:
        return "it has backward hooks, which must run"
    if hasattr(module, "parametrizations"):
        return "its parameters are parametrized"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    kind = type(module)
    if not torch_layer(kind) and not isinstance(module, _READ):
        layer = next((k for k in kind.__mro__ if torch_layer(k)), None)
        if layer is not None:
            return f"a subclass of {layer.__name__} that overrides forward"
    return None
