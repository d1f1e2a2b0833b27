"""What a call does besides computing numbers, and where two models differ in it.

Compared with the plain model: the containers of the output, whether gradients flow into each part
of it, its device, the tensors that forward wrote to or set as attributes of modules,
and how many random numbers it drew on the CPU, on which those of the next call depend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recast.rewriter.compiled import trees
from recast.rewriter.compiled.array_inputs import tensor_of
from recast.rewriter.compiled.module import Compiled
from recast.rewriter.compiled.object_contents import PLAIN

_OF_NN = frozenset(vars(nn.Module()))
_ABSENT = object()


@dataclass(frozen=True)
class Effects:
    """Of one call of one model."""

    form: Any  # the containers of the output, nested
    needs: Mapping[str, bool]  # of each tensor of the output: whether it has a gradient
    written: Mapping[str, Tensor]  # inputs that forward wrote to, attributes that it set
    random: Tensor  # state of the CPU generator after it
    cpu: bool  # whether the model is on the CPU: only there do both draw the same numbers


def form(value: Any) -> Any:
    """The containers in ``value``, without what is in them."""
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, Mapping):
        return (type(value), *((k, form(v)) for k, v in value.items()))
    if isinstance(value, (tuple, list)):
        return (type(value), *map(form, value))
    inside = trees.members(value)
    return type(value) if inside is None else (type(value), *((k, form(inside[k])) for k in inside))


def form_text(found: Any) -> str:
    """A form in words: ``dict(a: Tensor, b: tuple(Tensor, Tensor))``."""
    if isinstance(found, type):
        return found.__name__
    kind, *parts = found
    named = [
        form_text(p)
        if isinstance(p, type) or isinstance(p[0], type)
        else f"{p[0]}: {form_text(p[1])}"
        for p in parts
    ]
    return f"{kind.__name__}({', '.join(named)})"


def on_cpu(model: nn.Module) -> bool:
    """Whether all parameters and buffers of ``model`` are on the CPU."""
    return all(t.device.type == "cpu" for t in (*model.parameters(), *model.buffers()))


def attributes(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that are plain attributes of modules, by path."""
    paths = [path for path, _ in model.named_modules()]
    return {
        f"{path}.{name}" if path else name: value
        for path, held in zip(paths, held_by(model), strict=True)
        for name, value in held.items()
        if name not in _OF_NN and isinstance(value, Tensor)
    }


def held_by(model: nn.Module) -> list[dict[str, Any]]:
    """The attributes of every module of ``model``, in the order of ``named_modules()``."""
    outer = model._root if isinstance(model, Compiled) else model  # which has those of the user
    return [vars(m if path else outer) for path, m in model.named_modules()]


def take_back(held: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Give attributes that hold a tensor or a plain value, or did, what they held ``before``."""
    for name in {*held, *before} - _OF_NN:
        old, new = before.get(name, _ABSENT), held.get(name, _ABSENT)
        if old is new or not (_values(old) and _values(new)):
            continue
        if old is _ABSENT:
            del held[name]
        else:
            held[name] = old


def _values(held: Any) -> bool:
    return held is _ABSENT or isinstance(held, (Tensor, *PLAIN))


def set_since(before: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The attributes of ``model`` that are other objects than ``before``."""
    found = attributes(model).items()
    return {path: t.detach().clone() for path, t in found if before.get(path) is not t}


def written_to(given: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors and arrays of ``given`` that are no longer equal to those of ``before``, by
    path; both as tensors.
    """
    found: dict[str, Tensor] = {}
    for path, held in given.items():
        t = tensor_of(held)
        if not isinstance(t, Tensor) or (t is held and not t._version):
            continue
        if not torch.equal(t, tensor_of(before[path])):
            found[f"input{path}"] = t.detach().clone()
    return found


def differences(
    ours: Effects,
    plain: Effects,
    outputs: tuple[Mapping[str, Any], Mapping[str, Any]],
) -> Iterator[tuple[str, str]]:
    """``(what of the call, how it differs)``; ``outputs``: ours and those of the plain model."""
    if ours.form != plain.form:
        yield "", f"the output is {form_text(ours.form)} instead of {form_text(plain.form)}"
        return
    for path, needs in plain.needs.items():
        a, b = (held.get(path) for held in outputs)
        if ours.needs.get(path, needs) != needs:
            yield path, f"requires_grad is {not needs} instead of {needs}"
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.device != b.device:
            yield path, f"on {a.device} instead of {b.device}"
    for name in plain.written:
        if name not in ours.written:
            yield f", {name}", "forward does not write it as the plain model does"
    for name in ours.written:
        if name.startswith("input") and name not in plain.written:
            yield f", {name}", "forward writes to it, the plain model does not"
    if ours.cpu and plain.cpu and not torch.equal(ours.random, plain.random):
        yield "", "another number of random numbers is drawn, so the next call draws others"


def scattered(ours: Mapping[str, Any], plain: Mapping[str, Any]) -> Iterator[str]:
    """The outputs that ``view`` may refuse: contiguous in the plain model, and not in ours."""
    for path, b in plain.items():
        a = ours.get(path)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
            strided = a.layout == b.layout == torch.strided
            if strided and b.is_contiguous() and not a.is_contiguous():
                yield path
