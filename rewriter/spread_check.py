"""What cannot be one model over many ranks, and what must not be called any more once it is."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional as F

from recast.errors import UsageError
from recast.passes.leaf import argument
from recast.rewriter.ir import is_call, note
from recast.runtime.ranks import shards

from .compiled import Compiled

_TABLES = (nn.Embedding, nn.EmbeddingBag)
_MAX_NORM = (
    "max_norm",
    "each rank would rescale the rows of its own batch, and its copy of the table would part from"
    " the others'",
    "drop max_norm and clip the rows after the optimizer step",
)
_BY_FREQUENCY = (
    "scale_grad_by_freq",
    "each rank would count the ids of its own batch, and one process counts those of all",
    "drop scale_grad_by_freq",
)


def check_model(model: nn.Module) -> None:
    """Raise UsageError for a model whose tables are parts already."""
    for name, parameter in model.named_parameters():
        if shards.of(parameter) is not None:
            raise UsageError(
                f"optimize: {name} of this model is this rank's part of a table already",
                why="optimize spread the model over ranks before, and took its tables",
                tries=("the result of that optimize()", "a new model, and recast.checkpoint.load"),
            )


def check_lookups(compiled: Compiled) -> None:
    """Raise UsageError for lookups that do something to a table by the ids of one rank's batch."""
    for path, module in compiled._root.named_modules():
        if isinstance(module, _TABLES):
            if module.max_norm is not None:
                raise _by_batch(path, *_MAX_NORM)
            if module.scale_grad_by_freq:
                raise _by_batch(path, *_BY_FREQUENCY)
    for one in (compiled, *compiled.parts.values()):
        for graph in one.graphs.values():
            for node in graph.nodes:
                if is_call(node, F.embedding, F.embedding_bag):
                    place = note(node).where or node.name
                    if argument(node, 3, "max_norm", None) is not None:
                        raise _by_batch(place, *_MAX_NORM)
                    if argument(node, 5, "scale_grad_by_freq", False):
                        raise _by_batch(place, *_BY_FREQUENCY)


def _by_batch(path: str, what: str, why: str, other: str) -> UsageError:
    return UsageError(
        f"{path or 'the table'}: {what} on several ranks", why=why, tries=(other, "world_size=1")
    )


def close(model: nn.Module, compiled: Compiled) -> None:
    """Let the user's own modules say that their tables have gone, rather than read a part."""
    ours = {id(m) for m in compiled._root.modules()}
    for module in model.modules():
        own = [p for p in module._parameters.values() if p is not None]
        if id(module) not in ours and any(shards.of(p) is not None for p in own):
            module.register_forward_pre_hook(_gone)


def _gone(module: nn.Module, _: Any) -> None:
    raise UsageError(
        f"this {type(module).__name__} has only this rank's part of its table",
        why="recast.optimize spread the model over ranks; its result is what runs",
        tries=("call the result of optimize()", "optimize(..., inplace=True), to go on with model"),
    )
