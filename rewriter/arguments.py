"""The checks that ``optimize`` makes of its arguments before it does anything."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from recast.errors import NotBuiltError, UsageError
from recast.rewriter.capture.kept_numbers import NUMBERS
from recast.rewriter.capture.layers import shares_gradients, torch_layer
from recast.rewriter.compiled.copies import modules_by_path


def check_model(model: object) -> None:
    if isinstance(model, type):
        raise UsageError(
            f"optimize: the model is the class {model.__name__}, not a module of it",
            why="a graph is captured from a model with parameters",
            tries=(f"recast.optimize({model.__name__}(...), optimizer, example=batch)",),
        )
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"optimize: the model is of type {type(model).__name__}, not an nn.Module",
            why="a graph is captured from the forward of a module",
            tries=("recast.optimize(model, optimizer, example=batch)",),
        )
    if type(model).__module__ == "torch._dynamo.eval_frame":
        raise UsageError(
            "optimize: the model is wrapped by torch.compile already",
            why="a graph is captured from the model's own forward",
            tries=("torch.compile(recast.optimize(model._orig_mod, ...))",),
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "optimize: the model is a TorchScript module",
            why="a graph is captured from a forward in Python",
            tries=("the module that it was made of", "use it as it is"),
        )
    if shares_gradients(model):
        wrapper = type(model).__name__
        raise UsageError(
            f"optimize: the model is wrapped by {wrapper} already",
            why="its forward prepares the gradients of all ranks, which no graph does",
            tries=(
                "recast.optimize of the model inside: the result averages the gradients itself",
                "DistributedDataParallel(recast.optimize(..., world_size=1))",
            ),
        )
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise UsageError(
                f"optimize: {name} has no size yet",
                why="a lazy module makes its parameters when it is called the first time",
                tries=("model(*batch) once, before optimize and before the optimizer is made",),
            )
        if parameter.is_inference():
            raise UsageError(
                f"optimize: {name} was made under torch.inference_mode()",
                why="autograd refuses such tensors, and gradients are part of the proof",
                tries=("make the model outside of it", "torch.no_grad()"),
            )


def check_stored(tables: Mapping[str, Any]) -> None:
    """Refuse a model with ``tables`` that are stored in another precision already."""
    for name, table in tables.items():
        raise UsageError(
            f"optimize: {name} is stored in {table.precision} already",
            why="optimize(..., precision=) made this model, or a part of it, for serving",
            tries=("the model that it was made of", "use it as it is"),
        )


def check_switches(**given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, bool):
            raise UsageError(f"optimize: {name}={value!r} is neither True nor False")


def check_forms(forms: object, example: object) -> None:
    if isinstance(forms, (list, tuple)) and not forms:
        return
    if not isinstance(forms, list):
        raise UsageError(
            f"optimize: forms is a {type(forms).__name__}, not a list",
            why="it has one example for each further form of call",
            tries=("forms=[batch]",),
        )
    if example is None:
        raise UsageError(
            "optimize: forms are given, and no example",
            why="they are further forms, beside that of the example",
            tries=("example=batch, forms=[batch_of_another_form]",),
        )


def check_varying(varying: object, model: nn.Module, example: object) -> tuple[str, ...]:
    """The paths ``varying``, each by the first name of its module. Raises UsageError unless they
    are those of numbers of modules of the user's own.
    """
    if isinstance(varying, str) or not isinstance(varying, Collection):
        raise UsageError(
            f"optimize: varying is a {type(varying).__name__}, not a list",
            why="it has the path of each number that is set between calls; tensors need none",
            tries=(f"varying=[{varying!r}]" if isinstance(varying, str) else "varying=['tau']",),
        )
    if varying and example is None:
        raise UsageError(
            "optimize: varying numbers are given, and no example",
            why="a trace without one takes numbers of the model for constants",
            tries=("example=batch",),
        )
    modules = modules_by_path(model)
    numbers = [p for at, m in modules.items() if not torch_layer(type(m)) for p in _numbers(at, m)]
    paths = [_by_first_name(model, str(path)) for path in varying]
    for path in paths:
        if path in numbers:
            continue
        owner, _, name = path.rpartition(".")
        held = vars(modules[owner]).get(name) if owner in modules else None
        why = f"{type(model).__name__} has no attribute of that path"
        if type(held) in NUMBERS:
            why = f"{type(modules[owner]).__name__} is a layer of torch, which reads it itself"
        elif held is not None:
            why = f"it is a {type(held).__name__}"
        near = get_close_matches(path, numbers, n=2, cutoff=0.4) or numbers[:2]
        raise UsageError(
            f"optimize: varying: {path!r} is no number that a module of the model holds",
            why=why,
            tries=tuple(f"varying=[{other!r}]" for other in near),
        )
    return tuple(paths)


def _by_first_name(model: nn.Module, path: str) -> str:
    """``path``; where its module has several names, by the first."""
    owner, _, name = path.rpartition(".")
    with suppress(AttributeError):
        held = model.get_submodule(owner)
        first = next(at for at, module in modules_by_path(model).items() if module is held)
        return f"{first}.{name}" if first else name
    return path


def _numbers(path: str, module: nn.Module) -> list[str]:
    """The paths of the numbers that ``module`` holds."""
    names = [name for name, value in vars(module).items() if type(value) in NUMBERS]
    return [f"{path}.{name}" if path else name for name in names]


def check_mode(mode: object) -> None:
    if mode not in ("default", "graph"):
        raise UsageError(
            f"optimize: there is no mode {mode!r}",
            why="there are two: 'default', and 'graph' for CUDA graphs",
            tries=("mode='graph'", "leave mode out"),
        )


def check_optimizer(model: nn.Module, optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimize: the optimizer is a {type(optimizer).__name__}",
            why="the second argument is a torch.optim.Optimizer; batches go to example=",
            tries=(
                "optimize(model, optimizer, example=batch)",
                "of several optimizers give none: optimize(model, example=batch), and each of them"
                " over the parameters as before",
            ),
        )
    if not all(hasattr(optimizer, made) for made in ("defaults", "_optimizer_step_pre_hooks")):
        name = type(optimizer).__name__
        raise UsageError(
            f"optimize: {name} was made without torch.optim.Optimizer.__init__",
            why="tables are updated by step hooks, which that constructor sets up",
            tries=(
                f"the optimizer that it wraps in its place; {name} goes on stepping it",
                "super().__init__(parameters, defaults) in its __init__",
            ),
        )
    own = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if own and not any(id(p) in own for p in held):
        raise UsageError(
            f"optimize: none of the optimizer's {len(held)} parameters belong to the model",
            why="it was built over another model, or over a copy of this one",
            tries=(f"{type(optimizer).__name__}(model.parameters(), ...)",),
        )


def check_precision(
    asked: object, known: Sequence[str], model: nn.Module, optimizer: object
) -> None:
    """Raise UsageError unless ``precision`` is known and the model is for inference."""
    if asked is None:
        return
    if asked not in known:
        raise UsageError(
            f"optimize: there is no precision {asked!r}",
            why="tables are stored in one of a few forms",
            tries=[f"precision={name!r}" for name in known],
        )
    if optimizer is None and not model.training:
        return
    raise UsageError(
        f"optimize: precision={asked!r} for a model that trains",
        why=f"tables in {asked} are stored for inference and have no gradient",
        tries=(
            "optimize(model.eval(), precision=...) for serving, without an optimizer",
            "leave precision out, to train",
            "embedding.to(torch.bfloat16): tables of that dtype train",
        ),
    )


def check_semantics(asked: object, optimizer: object) -> None:
    if asked not in ("exact", "lazy"):
        raise UsageError(
            f"optimize: sparse_semantics={asked!r} is neither 'exact' nor 'lazy'",
            why="it says how Adam and AdamW step the tables",
            tries=("sparse_semantics='exact', the plain numbers", "sparse_semantics='lazy'"),
        )
    if asked == "lazy" and optimizer is None:
        raise UsageError(
            "optimize: sparse_semantics='lazy' without an optimizer",
            why="it says how Adam and AdamW step the tables",
            tries=("optimize(model, optimizer, sparse_semantics='lazy')",),
        )


def world_size(asked: int | None) -> int:
    """The number of ranks asked for; by default that of the process group, else 1."""
    group = torch.distributed.is_available() and torch.distributed.is_initialized()
    present = torch.distributed.get_world_size() if group else 1
    ranks = present if asked is None else asked
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise UsageError(
            f"optimize: world_size={asked!r} is not a number of ranks",
            why="it is an int of at least 1, or None for that of the process group",
            tries=("leave world_size out",),
        )
    if 1 < ranks < present:
        raise UsageError(
            f"optimize: world_size={ranks}, but the process group has {present} ranks",
            why="every rank of the group takes part, or each alone",
            tries=(f"world_size={present}", "world_size=1 for one whole model on each rank"),
        )
    return ranks


def check_dynamic(tables: Mapping[str, Any], mode: str) -> None:
    """Refuse what is not implemented for dynamic tables."""
    if tables and mode != "default":
        raise NotBuiltError(
            f"optimize: mode={mode!r} with dynamic tables is not built yet",
            why=f"{', '.join(sorted(tables))}: the host notes which rows are new, and the optimizer"
            " asks it; a replay of a forward runs no code of the host",
            tries=("recast.TrainingStep, which records optimizer and all, on a GPU",
                   "leave mode out"),
        )  # fmt: skip


def check_alone(mode: str, passes: Iterable[str]) -> None:
    """Refuse what works on one rank but not yet on many. ``passes``: the names of the passes."""
    if "quantise-tables" in passes:
        raise UsageError(
            "optimize: passes with quantise-tables on many ranks",
            why="each rank would store whole tables, before they are spread",
            tries=("precision='int8', which stores each rank's parts",),
        )
    if mode != "default":
        raise NotBuiltError(
            f"optimize: mode={mode!r} on many ranks is not built yet",
            why="tables are spread over ranks, and their rows travel at each call",
            tries=("leave mode out", "world_size=1 for one whole model on each rank"),
        )


def launch(ranks: int) -> UsageError:
    return UsageError(
        f"forward: this model is made for {ranks} ranks, and no process group of that size runs",
        why="world_size is larger than the process group; the model can be read, dumped and saved",
        tries=(f"torchrun --nproc-per-node {ranks} train.py", "optimize(..., world_size=1)"),
    )
