"""One trace: model, two batches and a mode in; a tidy graph with its guards out."""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from . import named
from .copies import modules_by_path, shallow_copy
from .guards import Guard, ask, target
from .ir import KEY, Graph, Node, note
from .kept import CONTAINERS, Absent, Beyond, Contents, Fields, Kept, Same, copied, untouched
from .order import writes
from .rule import constants
from .signature import Signature
from .surroundings import Taken
from .tracer import _PLAIN, Recorder, Refused, Tracer, lift, literal, refusal
from .trees import Hole, atoms, flatten, rebuild
from .values import Flag, Value, make

FOLD = 1 << 20  # constants of at most so many entries are kept rather than computed at each call


@dataclass
class Traced:
    """A graph and what it takes for granted."""

    graph: Graph
    forks: frozenset[str]  # modules whose training flag decided the control flow
    guards: tuple[Guard, ...] = ()
    asks: Graph | None = None  # computes the guarded values from the inputs
    stores: tuple[str, ...] = ()  # attributes that forward leaves behind, as second output
    template: Any = None  # the user's output when it is more than tuples, lists and dicts
    baked: frozenset[str] = frozenset()  # inputs whose fixed sizes the graph relies on
    strict_dtypes: bool = False
    reads: tuple[tuple[str, str, Any], ...] = ()  # (module, attribute, value) that the graph bakes
    leaves: tuple[tuple[str, str, Any], ...] = ()  # plain attributes that every call leaves behind
    taken: tuple[Taken, ...] = ()  # what else it took from Python
    outside: tuple[str, ...] = ()  # functions that leave torch and run as they are, with their line


def live_copy(root: nn.Module, training: bool = False) -> nn.Module:
    """A copy in one mode with buffers of its own, to run layers on examples."""
    live = shallow_copy(root)
    for module in live.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            vars(module)["training"] = training
            _give_back(module)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.detach().clone()
        if getattr(module, "max_norm", None) is not None:  # renormalises its table as it reads it
            table: Any = module._parameters["weight"]
            module._parameters["weight"] = nn.Parameter(table.detach().clone())
    return live


def _give_back(module: nn.Module) -> None:
    """The forward of the user's own, where graphs run in its place: they read the first tensors."""
    forward = vars(module).get("forward")
    runner = getattr(getattr(forward, "__self__", None), "_runner", None)
    if runner is not None and runner.built:
        del vars(module)["forward"]
        if runner.original is not None:
            vars(module)["forward"] = runner.original


def trace(
    root: nn.Module,
    signature: Signature,
    first: tuple[Any, ...],
    pairs: list[tuple[Any, Any]],
    *,
    training: bool,
    sizes: tuple[int, int],
    opaque: frozenset[str] = frozenset(),
    prefix: str = "",
    plain_flags: bool = False,
    sizes_kept: frozenset[str] = frozenset(),
    outside: frozenset[CodeType] = frozenset(),
) -> Traced:
    """Trace ``root.forward``. Raises :class:`Refused`."""
    tracer = Tracer(
        root, live_copy(root), training=training, sizes=sizes, opaque=opaque, prefix=prefix,
        plain_flags=plain_flags, sizes_kept=sizes_kept, outside=outside,
    )  # fmt: skip
    before = _state(tracer.scratch)
    shared = _shared(root)
    try:
        with torch.enable_grad(), Recorder(tracer):
            with tracer.quiet():
                inputs = _inputs(tracer, signature, first, pairs)
            args, kwargs = signature.unbind(inputs)
            with tracer.watching():
                result = tracer.scratch.forward(*args, **kwargs)
    except Refused:
        raise
    except Exception as error:
        raise _refused(tracer, error) from error
    if tracer.failed is not None:
        raise tracer.failed
    for (module, name), held in shared.items():
        if not held.same(vars(sys.modules[module]).get(name, Absent)):
            raise refusal(f"forward changes {name}, a global of {module}", None, "")
    try:
        return _finish(tracer, result, before)
    except Beyond as error:
        raise beyond(error) from None


def _shared(root: nn.Module) -> dict[tuple[str, str], Kept]:
    """Plain globals that the methods of the model name: forward may write to them."""
    found = named.global_values(named.codes_of(root), strict=False)
    plain = (Same, Contents, Fields)
    return {key: held for key, held in found.items() if isinstance(held, plain)}


def _refused(tracer: Tracer, error: Exception) -> Refused:
    """The user's line and reason of an error raised under the trace."""
    if isinstance(tracer.failed, Refused):
        return tracer.failed
    where = None
    tb = error.__traceback__
    while tb is not None:
        file = tb.tb_frame.f_code.co_filename
        from .tracer import _LINK, _OURS, _TORCH

        if not file.startswith((_OURS, _LINK, _TORCH)):
            where = f"{file.rpartition('/')[2]}:{tb.tb_lineno}"
        tb = tb.tb_next
    text = str(error).strip().splitlines()
    why = f"{type(error).__name__}: {text[0] if text else ''}"
    refused = refusal(why, where, tracer.innermost or "")
    return refused


def _inputs(
    tracer: Tracer, signature: Signature, first: tuple[Any, ...], pairs: list[tuple[Any, Any]]
) -> tuple[Any, ...]:
    """The arguments of forward with a Value in the place of every tensor."""
    values = []
    for (a, b), label in zip(pairs, _names(signature, len(pairs)), strict=True):
        pair: Any = tuple(v.detach().clone() if isinstance(v, torch.Tensor) else v for v in (a, b))
        node = tracer._node("placeholder", label, (), {}, pair, name=label)
        node.meta[KEY] = type(note(node))(spec=note(node).spec)
        values.append(make(tracer, (pair[0], pair[1]), static=False, node=node))
    count = len(pairs) - len(signature.numbers)
    tensors, numbers = iter(values[:count]), iter(values[count:])
    if not signature.numbers:
        return rebuild(first, lambda t: next(tensors))
    places, order = set(signature.numbers), iter(atoms(signature.key))
    number = lambda v: next(numbers) if next(order) in places else v  # noqa: E731
    return rebuild(first, lambda t: next(tensors), number)


def _names(signature: Signature, count: int) -> list[str]:
    names = [*signature.labels, *(f"number_{k}" for k in range(count - len(signature.labels)))]
    return ["".join(c if c.isalnum() or c == "_" else "_" for c in name) for name in names]


# ---------------------------------------------------------------- after the trace


def _state(scratch: nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes of all modules, to see what forward changes."""
    kept = {}
    for path, module in modules_by_path(scratch).items():
        held = {k: v for k, v in vars(module).items() if not k.startswith("_") or k == "_buffers"}
        held.update(
            {k: v for k, v in vars(module).items() if k.startswith("_") and k not in _SLOTS}
        )
        held = {k: _Before(v, copied(_inside(v))) for k, v in held.items()}
        held["_buffers"] = dict(module._buffers)
        kept[path] = held
    return kept


@dataclass(frozen=True)
class _Before:
    """An attribute as it was, and what was in it."""

    value: Any
    inside: Any


def _inside(value: Any) -> Any:
    """The entries of a container or of an object with attributes; None of anything else."""
    if isinstance(value, CONTAINERS):
        return value
    held = getattr(value, "__dict__", None)
    opaque = isinstance(value, (torch.Tensor, nn.Module)) or callable(value)
    return None if opaque or not isinstance(held, dict) else held


_SLOTS = {
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks",
    "_backward_hooks", "_backward_pre_hooks",
}  # fmt: skip


def _stored(
    tracer: Tracer, before: dict[str, dict[str, Any]]
) -> tuple[dict[str, Any], list[tuple[str, str, Any]]]:
    """Attributes that hold a new traced value after forward, and those that hold a plain constant
    which forward wrote without a look at what was there. Refuses other lasting changes.
    """
    stores: dict[str, Any] = {}
    left: list[tuple[str, str, Any]] = []
    for path, module in modules_by_path(tracer.scratch).items():
        dot = f"{path}." if path else ""
        old = before.get(path)
        if old is None:
            raise refusal("forward adds a submodule", None, path)
        now = {k: v for k, v in vars(module).items() if k not in _SLOTS}
        now.update(module._buffers)
        for name, value in now.items():
            was = old.get(name, old["_buffers"].get(name, _ABSENT))
            inside = None
            if isinstance(was, _Before):
                was, inside = was.value, was.inside
            if value is was:
                if inside is not None and not _untouched(tracer, _inside(value), inside, value):
                    kind = type(value).__name__
                    raise refusal(f"forward changes what is in self.{name}, a {kind}", None, path)
                continue
            if isinstance(value, Value):
                stores[f"{dot}{name}"] = value
                continue
            leaves: list[Any] = []
            flatten(value, leaves, [])
            if leaves:
                stores[f"{dot}{name}"] = value
            elif _blind(tracer, path, name, value, was):
                tracer.reads.pop((path, name), None)
                left.append((path, name, value))
            elif not _equal(value, was):
                raise refusal(
                    f"forward changes self.{name}, which a graph would not do at each call",
                    None,
                    path,
                )
    return stores, left


def _untouched(tracer: Tracer, now: Any, before: Any, value: Any) -> bool:
    """Whether forward left a container, or what it can name of an object, as it was."""
    if now is value:
        return untouched(now, before)
    names = _nameable(tracer)
    now, before = ({k: v for k, v in held.items() if k in names} for held in (now, before))
    return untouched(now, before)


def _nameable(tracer: Tracer) -> frozenset[str]:
    """All that the code which ran can name."""
    return frozenset().union(*map(named.names_in, tracer.codes))


def beyond(error: Beyond) -> Refused:
    """The refusal of what cannot be compared at each call."""
    refused = refusal(f"forward reads {error}", None, "")
    refused.tries = ("a tensor in its place", "a tuple of numbers, which cannot change")
    return refused


_ABSENT = object()


def _blind(tracer: Tracer, path: str, name: str, value: Any, was: Any) -> bool:
    """Whether ``value`` is what every call writes to this attribute, whatever was there before."""
    if was is _ABSENT:
        return (path, name) not in tracer.asked and literal(value)
    read = tracer.reads.get((path, name), _ABSENT)
    known = type(value) in _PLAIN and type(was) in _PLAIN
    return known and not _equal(value, was) and (read is _ABSENT or not _equal(read, was))


def _equal(a: Any, b: Any) -> bool:
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:
        return False


def _finish(tracer: Tracer, result: Any, before: dict[str, dict[str, Any]]) -> Traced:
    stores, left = _stored(tracer, before)
    written = {(p, n) for p, n, _ in left}
    written |= {(p, n) for p, _, n in (s.rpartition(".") for s in stores)}
    template = None
    if _simple(result):
        out = tracer.argument(result)
    else:
        leaves: list[Any] = []
        flatten(result, leaves, [])
        out, template = tracer.argument(tuple(leaves)), rebuild(result, lambda t: Hole())
    graph = tracer.graph
    whole = (out, tracer.argument(tuple(stores.values()))) if stores else out
    end = tracer._node("output", "output", (whole,), {}, (None, None), origin="")
    end.meta[KEY] = type(note(end))()
    _functional(tracer)
    asks, guards = ask(tracer)
    _fold(tracer)
    _prune(graph)
    graph.lint()
    return Traced(
        graph, frozenset(tracer.forks), guards, asks, tuple(stores), template,
        frozenset(n.name for n in tracer.baked), tracer.bakes_dtypes,
        tuple((path, name, value) for (path, name), value in tracer.reads.items()), tuple(left),
        named.taken_by_trace(tracer, modules_by_path(tracer.root), written),
        tuple(f"{target.__name__}() {where}" for target, where in tracer.outsiders.items()),
    )  # fmt: skip


def _simple(value: Any) -> bool:
    """Whether an output is made of tuples, lists, dicts, tensors and plain constants alone."""
    if isinstance(value, (tuple, list)):
        known = type(value) in (tuple, list) or hasattr(value, "_fields")
        return known and all(_simple(v) for v in value)
    if type(value) is dict:
        return all(isinstance(k, str) and _simple(v) for k, v in value.items())
    return isinstance(value, (torch.Tensor, int, float, bool, str, type(None), Flag))


_OUT_OF_PLACE = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
    operator.itruediv: operator.truediv, operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod, operator.ipow: operator.pow, operator.imatmul: operator.matmul,
    operator.iand: operator.and_, operator.ior: operator.or_, operator.ixor: operator.xor,
    operator.ilshift: operator.lshift, operator.irshift: operator.rshift,
}  # fmt: skip


def _functional(tracer: Tracer) -> None:
    """``a += b`` becomes ``a = a + b`` where nobody else can see the difference."""
    place = {node: k for k, node in enumerate(tracer.graph.nodes)}
    owners: dict[int, list[Node]] = {}
    for node, held in tracer.storages.items():
        owners.setdefault(held, []).append(node)
    for node in tracer.graph.nodes:
        plain = _OUT_OF_PLACE.get(node.target) if callable(node.target) else None
        if node.op != "call_function" or plain is None:
            continue
        storage: Any = tracer.storages.get(node)
        old = node.args[0]
        if storage is None:  # a python number
            node.target = plain
        elif isinstance(old, Node) and _fresh(old) and _same_type(tracer, node):
            after = [n for n in owners[storage] if n is node or node in _ancestors(n)]
            alone = set(owners[storage]) == {old, *after}
            if alone and all(place[user] <= place[node] for user in old.users):
                node.target = plain
                node._rename(plain.__name__.rstrip("_"))
                for n in after:  # what follows lives in the new tensor
                    tracer.storages[n] = -place[node]
                owners[storage] = [old]
                owners[-place[node]] = after
    targets = (target(n, tracer) for n in tracer.graph.nodes)
    written = (tracer.storages.get(t) for t in targets if t is not None)
    tracer.written = {storage for storage in written if storage is not None} | tracer.outs


def _ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    stack = [node]
    while stack:
        n = stack.pop()
        if n not in found:
            found.add(n)
            stack.extend(n.all_input_nodes)
    return found


def _fresh(node: Node) -> bool:
    """Whether a call makes a tensor of its own, so that only its users can see it."""
    return node.op not in ("placeholder", "get_attr")


def _same_type(tracer: Tracer, node: Node) -> bool:
    """Whether the out-of-place result has the dtype and shape of what would be written."""
    made, (a, b) = tracer.pairs[node][0], node.args
    values: list[Any] = [tracer.pairs[v][0] if isinstance(v, Node) else v for v in (a, b)]
    if not all(isinstance(v, (torch.Tensor, int, float, bool)) for v in values):
        return False
    if torch.result_type(*values) != made.dtype and node.target is not operator.itruediv:
        return False
    shapes = [tracer.shapes.get(v, torch.Size()) if isinstance(v, Node) else () for v in (a, b)]
    return bool(torch.broadcast_shapes(*shapes) == tracer.shapes[node])


def _fold(tracer: Tracer) -> None:
    """Keep what depends on no input as a constant, where something else uses it."""
    graph = tracer.graph
    frozen = tracer.static
    for node in list(graph.nodes):
        if node not in frozen or node.op == "get_attr":
            continue
        value = tracer.pairs[node][0]
        users = [u for u in node.users if u not in frozen]
        if not users or any(u.op == "output" for u in users) or not isinstance(value, torch.Tensor):
            continue
        if tracer.storages.get(node) in tracer.written or value.numel() > FOLD:
            continue
        name = lift(constants(tracer.root), value.detach().clone(), node.name)
        with graph.inserting_before(node):
            kept = graph.create_node("get_attr", f"_recast_constants.{name}", (), {})
        kept.meta[KEY] = note(node)
        for user in users:
            user.replace_input_with(node, kept)
    for node in reversed(list(graph.nodes)):
        if node in frozen and not node.users and not writes(node, tracer.root):
            graph.erase_node(node)


def _prune(graph: Graph) -> None:
    """Drop unused reads that the tracer itself made: sizes, items, attributes."""
    quiet = (getattr, operator.getitem)
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output"):
            continue
        reads = node.op == "get_attr" or (node.op == "call_function" and node.target in quiet)
        if reads or (node.op == "call_method" and node.target in ("size", "dim")):
            graph.erase_node(node)
