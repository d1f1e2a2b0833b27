"""Many spellings, one form, so that later passes have one to look for.

Every entry keeps the value exactly, and what aliases what. Forms that write in place stay
untouched, as do modules with parameters or with flags that are read at run time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Graph, Node, annotate, note
from recast.rewriter.journal import Fired

from .leaf import argument, differs, extra, module_of, plural, rank, spec_of

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context


@dataclass(frozen=True, slots=True)
class Form:
    """A call: ``function(*args, **kwargs)``, or a method when ``function`` is a name."""

    function: Callable[..., Any] | str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


Reader = Callable[[Node], "Form | None"]


def _call(function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Form:
    return Form(function, args, kwargs)


# ---------------------------------------------------------------- one argument


def _unary(function: Callable[..., Any]) -> Reader:
    """``f(x)``, whatever the spelling; nothing when it works in place or has more arguments."""

    def read(node: Node) -> Form | None:
        source = argument(node, 0, "input")
        inplace = argument(node, 1, "inplace", False)
        if extra(node, 2, "input", "inplace") or inplace is not False:
            return None
        return _call(function, source)

    return read


def _binary(function: Callable[..., Any]) -> Reader:
    """``f(a, b)`` without alpha, out or rounding."""

    def read(node: Node) -> Form | None:
        if extra(node, 2, "input", "other", "mat2", "tensor2"):
            return None
        names = [k for k in ("other", "mat2", "tensor2") if k in node.kwargs]
        first = argument(node, 0, "input")
        second = argument(node, 1, names[0] if names else "other")
        return None if first is None or second is None else _call(function, first, second)

    return read


def _matmul(node: Node) -> Form | None:
    """``a @ b``; bmm where both are known to be batches of matrices of one size."""
    form = _binary(torch.matmul)(node)
    if form is None:
        return None
    a, b = (spec_of(x) for x in form.args)
    if a is None or b is None or len(a.shape) != 3 or len(b.shape) != 3:
        return form
    same = a.shape[0] == b.shape[0] and a.shape[0] != "n"
    return _call(torch.bmm, *form.args) if same else form


# ---------------------------------------------------------------- lists of tensors


def _listed(function: Callable[..., Any]) -> Reader:
    """``cat`` and ``stack``: a list of tensors and a dimension, both by position."""

    def read(node: Node) -> Form | None:
        tensors = argument(node, 0, "tensors")
        if not isinstance(tensors, (list, tuple)) or extra(node, 2, "tensors", "dim", "axis"):
            return None
        dim = argument(node, 1, "dim", node.kwargs.get("axis", 0))
        return _call(function, tensors, dim) if isinstance(dim, int) else None

    return read


def _hstack(node: Node) -> Form | None:
    """``hstack`` of matrices or more joins along dimension 1, of vectors along 0."""
    tensors = argument(node, 0, "tensors")
    if not isinstance(tensors, (list, tuple)) or extra(node, 1, "tensors"):
        return None
    ranks = {rank(t) for t in tensors}
    if len(ranks) != 1 or None in ranks:
        return None
    only = ranks.pop()
    return _call(torch.cat, list(tensors), 0 if only == 1 else 1) if only else None


# ---------------------------------------------------------------- shapes


def _transpose(node: Node) -> Form | None:
    """Exchange of two dimensions, counted from the front where the rank is known."""
    if extra(node, 3, "input", "dim0", "dim1", "axis0", "axis1"):
        return None
    source = argument(node, 0, "input")
    first = argument(node, 1, "dim0", node.kwargs.get("axis0"))
    second = argument(node, 2, "dim1", node.kwargs.get("axis1"))
    return _exchanged(source, first, second)


def _exchanged(source: Any, first: Any, second: Any) -> Form | None:
    if not isinstance(first, int) or not isinstance(second, int):
        return None
    known = rank(source)
    if known:
        first, second = sorted((first % known, second % known))
    return _call(torch.transpose, source, first, second)


def _permute(node: Node) -> Form | None:
    """A permutation of three dimensions that only exchanges the last two."""
    dims = _sizes(node, "dims")
    if dims is None or rank(node.args[0]) not in (3, None) or len(dims) != 3:
        return None
    order = tuple(d % 3 for d in dims if isinstance(d, int))
    return _exchanged(node.args[0], 1, 2) if order == (0, 2, 1) else None


def _t(node: Node) -> Form | None:
    """``x.t()`` of a matrix."""
    source = node.args[0]
    return _exchanged(source, 0, 1) if rank(source) == 2 and not extra(node, 1) else None


def _attribute(node: Node) -> Form | None:
    """``x.mT``, and ``x.T`` of a matrix; else see :func:`_asked`."""
    source, name = node.args[:2]
    if name == "mT" or (name == "T" and rank(source) == 2):
        return _exchanged(source, -2, -1)
    return _asked(node)


def _sizes(node: Node, name: str) -> tuple[Any, ...] | None:
    """Sizes given one by one or as one tuple."""
    given = node.args[1:] or (node.kwargs.get(name),)
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = tuple(given[0])
    plain = all(isinstance(s, (int, Node)) and not isinstance(s, bool) for s in given)
    return tuple(given) if given and plain else None


def _reshape(node: Node) -> Form | None:
    """``view``, ``reshape``: one name, for where ``view`` works the two do the same."""
    if set(node.kwargs) - {"shape", "size", "input"}:
        return None
    sizes = _sizes(node, "shape" if "shape" in node.kwargs else "size")
    source = argument(node, 0, "input")
    if sizes is None or not isinstance(source, Node):
        return None
    before, after = spec_of(source), spec_of(node)
    if len(sizes) == 1 and isinstance(sizes[0], Node):
        return None  # it may be a whole shape computed elsewhere
    widened = (
        before is not None
        and after is not None
        and len(before.shape) == 2
        and after.shape[1:] == (1, before.shape[1])
    )
    return _call(torch.unsqueeze, source, 1) if widened else _call(torch.reshape, source, sizes)


def _flatten(node: Node) -> Form | None:
    """``flatten(1, -1)`` is ``flatten(1)``. It is no reshape to sizes as in the example: of rows
    that are longer or shorter that would make more or fewer rows, where the model raises.
    """
    if extra(node, 3, "input", "start_dim", "end_dim"):
        return None
    source = argument(node, 0, "input")
    return _flattened(source, argument(node, 1, "start_dim", 0), argument(node, 2, "end_dim", -1))


def _flattened(source: Any, start: Any, end: Any) -> Form | None:
    if not isinstance(start, int) or not isinstance(end, int):
        return None
    last = end == -1 or end + 1 == rank(source)
    return _call(torch.flatten, source, start, *(() if last else (end,)))


def _unsqueeze(node: Node) -> Form | None:
    dim = argument(node, 1, "dim")
    plain = isinstance(dim, int) and not extra(node, 2, "input", "dim")
    return _call(torch.unsqueeze, argument(node, 0, "input"), dim) if plain else None


def _squeeze(node: Node) -> Form | None:
    dim = argument(node, 1, "dim")
    plain = isinstance(dim, int) and not extra(node, 2, "input", "dim")
    return _call(torch.squeeze, argument(node, 0, "input"), dim) if plain else None


def _item(node: Node) -> Form | None:
    """``x[:, None]`` and ``x[:, None, :]``: an unsqueeze."""
    source, key = node.args
    if not isinstance(key, tuple) or sum(k is None for k in key) != 1:
        return None
    if any(k is not None and k != slice(None) for k in key):
        return None
    known = rank(source)
    enough = known is not None and known >= len(key) - 1
    return _call(torch.unsqueeze, source, key.index(None)) if enough else None


# ---------------------------------------------------------------- sizes and devices

_BATCHED = {torch.bmm, torch.stack, torch.cat, torch.unsqueeze, torch.transpose}


def _elder(source: Any) -> Node | None:
    """The earliest value with the same device and the same first size as ``source``."""
    elder = None
    while isinstance(source, Node) and source.op == "call_function" and source.target in _BATCHED:
        dims = [a for a in (*source.args[1:], *source.kwargs.values()) if isinstance(a, int)]
        if source.target in (torch.stack, torch.cat) and not dims:
            break
        if any(d == 0 or d < 1 - (rank(source) or 0) for d in dims):
            break
        first = source.args[0]
        source = first[0] if isinstance(first, (list, tuple)) and first else first
        elder = source if isinstance(source, Node) else elder
    return elder


def _asked(node: Node) -> Form | None:
    """``x.device``, ``x.shape[0]``, ``x.size(0)``: of the value that x got them from.

    A product then has no users but those of its numbers.
    """
    source, name = node.args[:2]
    elder = _elder(source)
    if elder is None or not (name == "device" or (name == "shape" and _first_only(node))):
        return None
    return _call(getattr, elder, name)


def _first_only(node: Node) -> bool:
    """Whether of a shape only the first size is used."""
    return all(u.target is operator.getitem and u.args == (node, 0) for u in node.users)


def _size(node: Node) -> Form | None:
    elder = _elder(node.args[0])
    return _call("size", elder, 0) if elder is not None and argument(node, 1, "dim") == 0 else None


# ---------------------------------------------------------------- dtypes


_CASTS = {torch.int64: "long", torch.int32: "int", torch.float32: "float"}


def _cast(node: Node) -> Form | None:
    """``x.to(torch.int64)``, ``x.type(torch.int64)``: ``x.long()``."""
    dtype = argument(node, 1, "dtype")
    named = _CASTS.get(dtype) if isinstance(dtype, torch.dtype) else None
    return None if named is None or extra(node, 2, "dtype") else _call(named, node.args[0])


# ---------------------------------------------------------------- dropout, activations, embedding


def _dropout(node: Node) -> Form | None:
    names = ("input", "p", "train" if node.target is torch.dropout else "training", "inplace")
    defaults = (None, 0.5, True, False)
    if extra(node, 4, *names):
        return None
    values = [argument(node, k, n, d) for k, (n, d) in enumerate(zip(names, defaults, strict=True))]
    if values[3] is not False:
        return None
    return _call(F.dropout, values[0], p=values[1], training=values[2])


def _embedding(node: Node) -> Form | None:
    """``torch.embedding(weight, ids)``: the same call in the order of ``F.embedding``."""
    names = ("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse")
    defaults = (None, None, -1, False, False)
    if extra(node, 5, *names):
        return None
    weight, ids, padding, scale, sparse = (
        argument(node, k, n, d) for k, (n, d) in enumerate(zip(names, defaults, strict=True))
    )
    if not isinstance(padding, int):
        return None
    padding_idx = None if padding < 0 else padding
    return _call(F.embedding, ids, weight, padding_idx, None, 2.0, scale, sparse)


# ---------------------------------------------------------------- the tables

FUNCTIONS: Mapping[Callable[..., Any], Reader] = {
    F.relu: _unary(torch.relu),
    F.sigmoid: _unary(torch.sigmoid),
    torch.special.expit: _unary(torch.sigmoid),
    F.tanh: _unary(torch.tanh),
    torch.add: _binary(operator.add),
    torch.sub: _binary(operator.sub),
    torch.subtract: _binary(operator.sub),
    torch.mul: _binary(operator.mul),
    torch.multiply: _binary(operator.mul),
    torch.div: _binary(operator.truediv),
    torch.true_divide: _binary(operator.truediv),
    torch.matmul: _matmul,
    operator.matmul: _matmul,
    torch.cat: _listed(torch.cat),
    torch.concat: _listed(torch.cat),
    torch.concatenate: _listed(torch.cat),
    torch.stack: _listed(torch.stack),
    torch.hstack: _hstack,
    torch.transpose: _transpose,
    torch.swapaxes: _transpose,
    torch.swapdims: _transpose,
    torch.permute: _permute,
    torch.t: _t,
    torch.reshape: _reshape,
    torch.flatten: _flatten,
    torch.unsqueeze: _unsqueeze,
    torch.squeeze: _squeeze,
    operator.getitem: _item,
    getattr: _attribute,
    F.dropout: _dropout,
    torch.dropout: _dropout,
    torch.embedding: _embedding,
}
METHODS: Mapping[str, Reader] = {
    "relu": _unary(torch.relu),
    "sigmoid": _unary(torch.sigmoid),
    "tanh": _unary(torch.tanh),
    "add": _binary(operator.add),
    "sub": _binary(operator.sub),
    "mul": _binary(operator.mul),
    "multiply": _binary(operator.mul),
    "div": _binary(operator.truediv),
    "matmul": _matmul,
    "__matmul__": _matmul,
    "bmm": _binary(torch.bmm),
    "transpose": _transpose,
    "swapaxes": _transpose,
    "swapdims": _transpose,
    "permute": _permute,
    "t": _t,
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _flatten,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "size": _size,
    "to": _cast,
    "type": _cast,
}
MODULES: Mapping[type[nn.Module], Callable[[Any, Any], Form | None]] = {
    nn.ReLU: lambda x, m: _call(torch.relu, x) if not m.inplace else None,
    nn.Sigmoid: lambda x, m: _call(torch.sigmoid, x),
    nn.Tanh: lambda x, m: _call(torch.tanh, x),
    nn.Flatten: lambda x, m: _flattened(x, m.start_dim, m.end_dim),
}


def canonical(node: Node, root: nn.Module) -> Form | None:
    """The one form of ``node``; None when it has no other, or is in it already."""
    if node.op == "call_function":
        reader = FUNCTIONS.get(node.target)  # type: ignore[arg-type]
        form = reader(node) if reader else None
    elif node.op == "call_method":
        reader = METHODS.get(str(node.target))
        form = reader(node) if reader else None
    elif node.op == "call_module":
        form = _module(node, root)
    else:
        return None
    return None if form is None or _is(node, form) else form


def _module(node: Node, root: nn.Module) -> Form | None:
    module = module_of(node, root)
    if module is None or type(module) not in MODULES:
        return None
    kind = type(module)
    if differs(node, module, kind) is not None:
        return None
    source = argument(node, 0, "input")
    return MODULES[kind](source, module) if isinstance(source, Node) else None


def _identity(node: Node, root: nn.Module) -> bool:
    module = module_of(node, root)
    if type(module) is not nn.Identity or differs(node, module, nn.Identity) is not None:
        return False
    return isinstance(argument(node, 0, "input"), Node)


def _is(node: Node, form: Form) -> bool:
    """Whether ``node`` is in this form already, be an argument given by position or by keyword."""
    return node.target is form.function and _values(node) == _values(form)


def _values(call: Node | Form) -> list[Any]:
    return [*call.args, *(value for name, value in call.kwargs.items() if name != "axis")]


def _spelling(node: Node, root: nn.Module) -> str:
    if node.op == "call_module":
        return f"nn.{type(root.get_submodule(str(node.target))).__name__}"
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    return str(getattr(node.target, "__name__", node.target))


@dataclass(frozen=True)
class Normalize:
    """x.relu(), F.relu(x), nn.ReLU()(x) ... => relu(x)

    Also cat, stack, matrix products, transposes, reshapes, casts, arithmetic and dropout. Values
    and aliases stay exactly as they are. One entry of the journal stands for all nodes of one
    spelling.
    """

    name: ClassVar[str] = "normalize"

    def run(self, graph: Graph, context: Context) -> int:
        """Rewrite the spellings of ``graph``; returns how many of them it met."""
        met: dict[str, list[Node]] = {}
        for node in list(graph.nodes):
            form = canonical(node, context.root)
            if form is None:
                continue
            name = getattr(form.function, "__name__", str(form.function))
            spelling = f"{_spelling(node, context.root)} => {name}"
            if spelling not in met and context.fuel_left() == 0:
                continue
            if spelling not in met:
                context.burn()
            met.setdefault(spelling, []).append(node)
            _become(node, form)
        for spelling, nodes in met.items():
            first = note(nodes[0])
            what = f"{spelling}, {plural(len(nodes), 'node')}"
            context.journal.fired.append(
                Fired(self.name, nodes[0].name, first.origin, first.where, what)
            )
        return len(met) + self._identities(graph, context)

    def _identities(self, graph: Graph, context: Context) -> int:
        """Take out nn.Identity, which hands on the very object it is given."""
        gone = [n for n in graph.nodes if _identity(n, context.root)]
        if not gone or context.fuel_left() == 0:
            return 0
        context.burn()
        first = note(gone[0])
        what = f"nn.Identity => nothing, {plural(len(gone), 'node')}"
        for node in gone:
            node.replace_all_uses_with(argument(node, 0, "input"))
            graph.erase_node(node)
        context.journal.fired.append(
            Fired(self.name, gone[0].name, first.origin, first.where, what)
        )
        return 1


def _become(node: Node, form: Form) -> None:
    """Turn ``node`` into ``form`` where it stands, keeping its name, origin and line."""
    node.op = "call_method" if isinstance(form.function, str) else "call_function"
    node.target = form.function
    node.args = form.args
    node.kwargs = dict(form.kwargs)
    annotate(node, rule=Normalize.name)
