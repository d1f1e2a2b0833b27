"""Capture without an example: plain symbolic tracing, which knows names but no values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from recast.errors import CaptureError
from recast.rewriter.autocast import enabled, nesting
from recast.rewriter.compiled.baked_values import taken_by_name
from recast.rewriter.compiled.copies import modules_by_path, shallow_copy
from recast.rewriter.compiled.signature import Signature
from recast.rewriter.compiled.value_checks import NotComparable
from recast.rewriter.ir import KEY, Note

from .constants import constants
from .frames import is_users, raised_at
from .layers import is_leaf
from .python_reads import caches_of
from .refused import not_comparable
from .tidy import holds_negated, resolve_negated
from .trace import Traced
from .values import Flag

_ABSENT = object()
TRIES = (
    "example=batch, one batch as forward takes it",
    "example=[batch, batch_of_another_size] when one does not tell which dimension is the batch",
)


class _Symbolic(fx.Tracer):
    """Keeps torch's layers whole, training flags symbolic, and tensors that forward makes in the
    graph.
    """

    def __init__(self, root: nn.Module, training: bool) -> None:
        super().__init__()
        self.home = root
        self.paths = dict(_tensors(root))
        self.training = training
        self.forks: set[str] = set()
        self.proxy_buffer_attributes = True
        self.record_stack_traces = True
        self.autocast = nesting(), enabled()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if (nesting(), enabled()) != self.autocast:
            raise NotImplementedError("forward switches autocast")
        return super().create_node(*args, **kwargs)

    def is_leaf_module(self, m: nn.Module, qualified_name: str) -> bool:
        return is_leaf(m)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Flag):
            path = f"{a.path}.training" if a.path else "training"
            return self.create_node("get_attr", path, (), {})
        if isinstance(a, torch.Tensor):
            path = self.paths.get(id(a)) or constants(self.home).hold(a, "constant")
            return self.create_node("get_attr", path, (), {})
        return super().create_arg(a)


class _Calls(TorchFunctionMode):
    """Records torch calls that no proxy takes part in: tensors made in forward, parameters
    alone.
    """

    def __init__(self, tracer: _Symbolic) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if type(result) is not torch.Tensor or name == "__get__":
            return result
        method = getattr(torch.Tensor, name, None) is func
        kind = "call_method" if method else "call_function"
        return self.tracer.create_proxy(kind, name if method else func, args, kwargs)


def _tensors(root: nn.Module) -> Iterator[tuple[int, str]]:
    """Every tensor that a module holds as an attribute, by identity."""
    for path, module in modules_by_path(root).items():
        dot = f"{path}." if path else ""
        for held in (vars(module), module._buffers, module._parameters):
            for name, value in held.items():
                if isinstance(value, torch.Tensor):
                    yield id(value), f"{dot}{name}"


def _attributes(root: nn.Module) -> dict[tuple[str, str], Any]:
    """What the modules have, and have cached, by path and name."""
    found: dict[tuple[str, str], Any] = {}
    for path, module in modules_by_path(root).items():
        found |= {(path, k): v for held in (vars(module), module._buffers) for k, v in held.items()}
        found |= {(path, k): v.cache_info().misses for k, v in caches_of(type(module)).items()}
    return found


def trace_without_example(
    root: nn.Module, signature: Signature
) -> tuple[dict[str, Traced], Signature]:
    """Graphs by mode. Raises CaptureError that asks for an example."""
    evaluated = _trace(root, False)
    traced = {"both": evaluated}
    if evaluated.forks:
        traced = {"train": _trace(root, True), "eval": evaluated}
    inputs = [n for n in evaluated.graph.nodes if n.op == "placeholder"]
    names = tuple(str(n.name) for n in inputs)
    done = Signature(
        signature.names, signature.defaults, signature.variadic, [torch.Tensor] * len(names), (),
        labels=names, keywords=signature.keywords,
    )  # fmt: skip
    return traced, done


def _trace(root: nn.Module, training: bool) -> Traced:
    tracer = _Symbolic(root, training)
    scratch = shallow_copy(root)
    for path, module in modules_by_path(scratch).items():
        if not is_leaf(module):
            vars(module)["training"] = Flag(tracer, path)  # type: ignore[arg-type]
    before = _attributes(scratch)
    try:
        with _Calls(tracer):
            graph = tracer.trace(scratch)
    except Exception as error:
        text = str(error).strip().splitlines()
        raise CaptureError(
            "capture: this model cannot be traced without an example",
            where=raised_at(error), tries=TRIES,
            why=f"{type(error).__name__}: {text[0] if text else ''}",
        ) from error  # fmt: skip
    after = _attributes(scratch)
    changed = [k for k, v in after.items() if not _same(v, before.get(k, _ABSENT))]
    if changed:
        path, name = changed[0]
        raise CaptureError(
            "capture: this model cannot be traced without an example",
            why=f"forward keeps something in {'.'.join(filter(None, (path, name)))}", tries=TRIES,
        )  # fmt: skip
    _annotate(graph)
    resolve_negated(graph, [n for n in graph.nodes if _may_negate(root, n)])
    try:
        taken = taken_by_name(root)
    except NotComparable as error:
        raise not_comparable(error) from None
    return Traced(graph, frozenset(tracer.forks), taken=taken)


def _same(value: Any, before: Any) -> bool:
    return value is before or (type(value) is type(before) is int and value == before)


def _may_negate(root: nn.Module, node: fx.Node) -> bool:
    """Whether torch may have yet to negate what ``node`` gives."""
    imaginary = node.target is getattr and node.args[1] == "imag"
    return imaginary or node.target in (torch.imag, torch._neg_view) or holds_negated(root, node)


def _annotate(graph: fx.Graph) -> None:
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        owner = next(reversed([path for path, _ in stack.values()]), "") if stack else ""
        origin = str(node.target) if node.op == "call_module" else owner
        where = None
        for line in (node.stack_trace or "").splitlines():
            if 'File "' in line and is_users(file := line.split('"')[1]):
                where = f"{os.path.basename(file)}:{line.split('line ')[1].split(',')[0]}"
        node.meta = {KEY: Note(origin=(origin,) if origin else (), where=where)}
