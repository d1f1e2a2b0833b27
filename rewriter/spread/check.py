"""Refuses models that cannot be spread over ranks, and calls that a spread model cannot take."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from torch import nn
from torch.nn import functional as F

from recast.errors import UsageError
from recast.passes.leaf import argument
from recast.rewriter.compiled.module import Compiled
from recast.rewriter.ir import is_call, note
from recast.runtime.ranks import shards

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
    """Raise UsageError for a model whose tables are sharded already."""
    for name, parameter in model.named_parameters():
        if shards.of(parameter) is not None:
            raise UsageError(
                f"optimize: {name} of this model is this rank's part of a table already",
                why="optimize spread the model over ranks before, and took its tables",
                tries=("the result of that optimize()", "a new model, and recast.checkpoint.load"),
            )


def check_forms(compiled: Compiled) -> None:
    """Raise UsageError for a further form without a graph: its plain forward needs whole tables."""
    for form in compiled.report.forms if compiled._graphs else ():
        if form.captured != "whole":
            raise UsageError(
                f"optimize: {form.model} is not captured whole, on several ranks",
                where=form.where,
                why=form.why or "some of it runs as it is",
                tries=form.tries or ("leave this form out",),
            )


def check_lookups(compiled: Compiled) -> None:
    """Raise UsageError for lookups that modify a table, or its gradient, by one rank's ids."""
    for path, module in compiled._root.named_modules():
        if isinstance(module, _TABLES):
            if module.max_norm is not None:
                raise _by_batch(path, *_MAX_NORM)
            if module.scale_grad_by_freq:
                raise _by_batch(path, *_BY_FREQUENCY)
    for one in compiled._with_graphs():
        for graph in one._graphs.values():
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
    """Make modules say that their tables are sharded, instead of reading a part by the ids of the
    whole: the user's own modules, and those of the result, which its graphs do not call.
    """
    root = compiled._root
    ours = {id(m) for m in root.modules()}
    for module in model.modules():
        if id(module) not in ours and _has_part(module):
            module.register_forward_pre_hook(_gone)
    for path, module in root.named_modules():
        if path and "forward" not in vars(module) and _has_part(module):
            vars(module)["forward"] = partial(_only_by_graph, path)
            if hasattr(module, "reset_parameters"):
                vars(module)["reset_parameters"] = partial(_drawn_before, path)
    for one in (compiled, *compiled._forms):
        one._runner.built = False  # they are no change to what it was built for
        one._runner.outline = None


def open_again(twin: nn.Module) -> None:
    """Make a copy of the user's model with whole tables callable again."""
    for module in twin.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is _gone:
                del module._forward_pre_hooks[key]


def _has_part(module: nn.Module) -> bool:
    own = (p for p in module._parameters.values() if p is not None)
    return any(shards.of(p) is not None for p in own)


def _gone(module: nn.Module, _: Any) -> None:
    raise UsageError(
        f"this {type(module).__name__} has only this rank's part of its table",
        why="recast.optimize spread the model over ranks; its result is what runs",
        tries=("call the result of optimize()", "optimize(..., inplace=True), to go on with model"),
    )


def _only_by_graph(path: str, *_: Any, **__: Any) -> NoReturn:
    raise UsageError(
        f"{path} has only this rank's part of its table, and was called by itself",
        why="the model is spread over ranks: ids go to the owners of their rows where the result of"
        " optimize is called as a whole, and only there",
        tries=(
            "call the result of optimize() with a whole batch",
            "optimize a module whose forward is that part of the model",
            f"sharding={{{path!r}: 'data_parallel'}}, which keeps the table on every rank",
        ),
    )


def _drawn_before(path: str) -> NoReturn:
    raise UsageError(
        f"{path} has only this rank's part of its table, and cannot be reset",
        why="ranks would draw parts of several sizes, and what is drawn next would differ",
        tries=(
            "reset the model before optimize()",
            "load_state_dict() of a plain model that was reset",
        ),
    )
