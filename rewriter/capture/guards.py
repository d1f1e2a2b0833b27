"""Guards for Python control flow on values: each question is asked again before a call.

``if mask.any()`` took one branch for both example batches, but a later batch may take the other.
What such questions need is copied into a graph of its own, which runs first. If an answer differs
from that in the examples, the plain forward runs, before anything was drawn or written.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from recast.rewriter.compiled.trees import flatten, rebuild
from recast.rewriter.ir import Graph, Node, note
from recast.rewriter.order import draws, keeps_statistics, renormalised, writes

from .dynamic_sizes import Sizes
from .layer_shapes import SAME_SHAPE, Layer, stand_in_for, zeros
from .opaque_calls import OpaqueCall
from .refused import refusal

if TYPE_CHECKING:
    from .step_loops import Steps
    from .tracer import Question, Tracer

_TABLES = (nn.Embedding, nn.EmbeddingBag)
_COSTLY = {
    torch.matmul, torch.bmm, torch.mm, torch.einsum, torch.addmm, torch.baddbmm, operator.matmul,
    nn.functional.linear, nn.functional.bilinear, nn.functional.scaled_dot_product_attention,
    "matmul", "bmm", "mm",
}  # fmt: skip
# the shape of the result depends on the shape of the first argument, and on all of the others
_BY_SHAPE = {
    operator.getitem, "unsqueeze", "squeeze", "transpose", "view", "reshape", "permute", "flatten",
    "to", torch.unsqueeze, torch.squeeze, torch.transpose, torch.reshape, torch.permute,
    torch.flatten,
}  # fmt: skip
# the shape of the result depends on the shapes of all tensors among the arguments
_BY_SHAPES = {torch.stack, torch.cat, torch.concat}
# that to which those broadcast
_BY_BROADCAST = {
    operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg,
    operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne, operator.and_,
    operator.or_, operator.xor, operator.invert, operator.floordiv, operator.mod, operator.abs,
    torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.exp, torch.tanh,
    torch.sigmoid, torch.relu, torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like,
    torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, torch.poisson,
    torch.normal, torch.dropout,
    nn.functional.silu, nn.functional.relu, nn.functional.dropout, nn.functional.alpha_dropout,
    nn.functional.feature_alpha_dropout, nn.functional.gumbel_softmax, "add", "sub", "mul", "div",
    "pow", "exp", "tanh", "detach", "float", "long", "clone", "contiguous", "sigmoid", "relu",
    "bernoulli", "bernoulli_", "normal_", "uniform_", "exponential_", "random_",
}  # fmt: skip
# the shapes of the results depend on them in other ways: asked on the meta device
_ON_META = (
    "matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "tensordot", "linear", "bilinear", "sum",
    "mean", "var", "std", "norm", "normalize", "max", "min", "amax", "amin", "prod", "logsumexp",
    "softmax", "log_softmax", "layer_norm", "rms_norm", "gelu", "elu", "selu", "leaky_relu",
    "relu6", "softplus", "logsigmoid", "hardtanh", "clamp", "clamp_min", "clamp_max", "clip", "abs",
    "sqrt", "rsqrt", "square", "log", "log1p", "expm1", "sin", "cos", "erf", "round", "floor",
    "ceil", "nan_to_num", "cumsum", "cumprod", "sort", "argsort", "topk", "argmax", "argmin",
    "gather", "index_select", "masked_fill", "maximum", "minimum", "logical_and", "logical_or",
    "logical_not", "eq", "ne", "lt", "le", "gt", "ge", "tril", "triu", "flip", "roll", "repeat",
    "expand", "expand_as", "tile", "movedim", "swapaxes", "t", "unbind", "split", "chunk",
    "tensor_split", "narrow", "select", "cosine_similarity", "cdist", "outer", "pad", "type_as",
    "half", "double", "int", "bool", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention",
    "view_as_complex", "view_as_real", "bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor",
    "sign", "reciprocal", "lerp", "addcmul", "addcdiv", "prelu", "mish", "hardswish", "hardsigmoid",
    "glu", "tan", "isnan", "isinf", "isfinite", "hstack", "vstack", "unfold", "view_as",
    "reshape_as", "broadcast_to", "unflatten", "diagonal", "diag_embed", "scatter", "scatter_add",
    "pairwise_distance", "floor_divide", "remainder", "fmod", "multinomial",
)  # fmt: skip
_FOURIER = (
    "fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fft2", "ifft2", "rfft2", "irfft2", "fftn",
    "ifftn", "rfftn", "irfftn",
)  # fmt: skip
_BY_META: set[Any] = {operator.matmul, *(n for n in _ON_META if hasattr(torch.Tensor, n))}
_BY_META |= {getattr(torch.fft, n) for n in _FOURIER}
_BY_META |= {
    getattr(home, n) for home in (torch, nn.functional) for n in _ON_META if hasattr(home, n)
}
# of these, those whose numbers are sizes: a tensor in the place of one has to be computed
_BY_NUMBERS = frozenset({
    "narrow", "repeat", "expand", "tile", "split", "chunk", "topk", "pad", "select",
    *(f"fft_{n}" for n in _FOURIER),
})  # fmt: skip
_TURNED = ("T", "mT", "H", "mH")  # attributes that are tensors of another shape
# what draws, of sizes that are given as numbers
_DRAWN = frozenset({torch.rand, torch.randn, torch.randint, torch.randperm})


@dataclass
class Guard:
    """A question that Python asked a value, and the answer in both examples."""

    convert: Callable[[Any], Any]
    expected: Any
    where: str | None
    # the loops over steps that alone asked, each with the lines of what it made
    loops: tuple[tuple[str, frozenset[str]], ...] = ()


@dataclass
class _Slice:
    """What a question depends on: nodes whose values matter, and nodes whose shape alone does."""

    content: set[Node]
    shape: set[Node]


def ask(tracer: Tracer) -> tuple[Graph | None, tuple[Guard, ...], bool]:
    """The graph that computes the answers to the guards, and whether sizes alone decide them.
    Refuses if asking has effects or costs much.
    """
    if not tracer.guards:
        return None, (), True
    needed = _Slice(set(), set())
    for question in tracer.guards:
        mine, why = _slice(tracer, question)
        if why:
            refused = refusal(
                f"control flow depends on a value that {why}: it cannot be asked ahead of a call",
                question.where, question.path,
            )  # fmt: skip
            refused.apart = bool(question.path) and _little(tracer, question)
            asked = mine.content | mine.shape
            outside = (n.target for n in asked if isinstance(n.target, OpaqueCall))
            refused.size = "shape" if any(t.custom is None and not t.keeps for t in outside) else ""
            raise refused
        needed.content |= mine.content
        needed.shape |= mine.shape
    needed.shape -= needed.content
    graph = _copy(tracer, needed, [q.node for q in tracer.guards])
    guards = tuple(
        Guard(q.convert, q.expected, q.where, _loops(tracer, askers))
        for q, askers in zip(tracer.guards, tracer.askers, strict=True)
    )
    return graph, guards, not any(_has_data(tracer, n) for n in needed.content)


def _has_data(tracer: Tracer, node: Node) -> bool:
    """Whether the value of ``node`` may depend on other data than that of its inputs."""
    if node.op in ("placeholder", "get_attr"):
        return type(tracer.pairs[node][0]) not in (int, float, bool, str, NoneType)
    return node.op == "call_module" or isinstance(node.target, OpaqueCall)


def _loops(tracer: Tracer, askers: set[Steps | None]) -> tuple[tuple[str, frozenset[str]], ...]:
    """Those that asked, if they are loops whose number of steps may be forgotten."""
    known = tracer.step_loops
    if not askers <= known.keys():
        return ()
    return tuple((loop.node.name, known[loop]) for loop in askers if loop is not None)


def without(
    guards: tuple[Guard, ...], asks: Graph | None, whole: set[str]
) -> tuple[tuple[Guard, ...], Graph | None]:
    """The guards but those asked by loops alone that have all become ``whole`` calls."""
    kept = [
        k for k, g in enumerate(guards) if not g.loops or not {name for name, _ in g.loops} <= whole
    ]
    if asks is None or len(kept) == len(guards):
        return guards, asks
    graph = copy.deepcopy(asks)
    end = next(n for n in graph.nodes if n.op == "output")
    values: Any = end.args[0]
    end.args = (tuple(values[k] for k in kept),)
    graph.eliminate_dead_code()
    return tuple(guards[k] for k in kept), graph if kept else None


def _slice(tracer: Tracer, question: Question) -> tuple[_Slice, str | None]:
    """What ``question`` depends on, and why it may not be computed in advance (None: it may)."""
    order = {node: k for k, node in enumerate(tracer.graph.nodes)}
    found = _Slice(set(), set())
    stack = [(question.node, isinstance(question.convert, Sizes))]
    while stack:
        node, shape = stack.pop()
        if node in found.content or (shape and node in found.shape):
            continue
        (found.shape if shape else found.content).add(node)
        why = _forbidden(tracer, node, question.path, shape)
        if why:
            return found, why
        turned = node.target is getattr and node.args[1] in _TURNED
        by_shape = shape and (
            node.target in _BY_SHAPE or turned or _layer(tracer, node) is not None
            or _like(tracer, node) is not None
        )  # fmt: skip
        by_shapes = shape and (node.target in _BY_SHAPES or _is_stood_for(tracer, node))
        asks_shape = node.target in ("size", "dim", "numel", "nelement") or (
            node.target is getattr and node.args[1] in ("shape", "device")
        )
        given = node.all_input_nodes
        if shape and (layer := _layer(tracer, node)) is not None:
            given = [layer[1][0]]  # not the state or the mask that it may take
        elif shape and (like := _like(tracer, node)) is not None:
            given = [like]
        for k, value in enumerate(given):
            number = type(tracer.pairs[value][0]) in (int, float)  # it has no shape
            stack.append((value, not number and (asks_shape or by_shapes or (by_shape and k == 0))))
        if not shape and node.op not in ("placeholder", "get_attr"):
            before = [w for w in _writers(tracer, node) if order[w] < order[question.node]]
            stack.extend((w, False) for w in before)
    return found, None


_SHARE = 0.25  # of the work of a module, that a question may repeat


def _little(tracer: Tracer, question: Question) -> bool:
    """Whether ``question`` depends on little of the work of the module that asks it."""
    full = ".".join(p for p in (tracer.prefix, question.path) if p)
    own = {
        n
        for n in tracer.graph.nodes
        if any(o == full or o.startswith(f"{full}.") for o in note(n).origin)
    }
    asked: set[Node] = set()
    stack = [question.node]
    while stack:
        node = stack.pop()
        if node in own and node not in asked:
            asked.add(node)
            stack.extend(node.all_input_nodes)
    works = {n: _work(tracer, n) for n in own}
    if any(works[n] is None for n in asked):
        return False
    return sum(works[n] or 0 for n in asked) <= _SHARE * sum(w or 0 for w in works.values())


def _work(tracer: Tracer, node: Node) -> int | None:
    """The products of numbers that ``node`` takes, if it is a matrix product; None: not known."""
    module = tracer.root.get_submodule(str(node.target)) if node.op == "call_module" else None
    if module is None and node.target not in _COSTLY:
        return 0
    if module is not None and not isinstance(module, nn.Linear):
        return 0 if isinstance(module, SAME_SHAPE) else None
    if module is None and node.target not in _PLAIN_PRODUCTS:
        return None
    first = node.args[0] if node.args else None
    given = tracer.pairs[first][0] if isinstance(first, Node) else None
    made = tracer.pairs[node][0]
    if not isinstance(given, torch.Tensor) or not isinstance(made, torch.Tensor):
        return None
    return made.numel() * given.shape[-1]


_PLAIN_PRODUCTS = {
    torch.matmul, torch.bmm, torch.mm, operator.matmul, nn.functional.linear, "matmul", "bmm", "mm",
}  # fmt: skip


def _writers(tracer: Tracer, node: Node) -> list[Node]:
    """The in-place writes to the memory of ``node``."""
    storage = tracer.storages.get(node)
    if storage is None or storage not in tracer.written:
        return []
    found = []
    for n in tracer.graph.nodes:
        first = target(n, tracer)
        if first is not None and tracer.storages.get(first) == storage:
            found.append(n)
    return found


def target(node: Node, tracer: Tracer) -> Node | None:
    """The tensor that ``node`` writes to in place; None if it writes to nothing in the graph."""
    if node.op == "call_module":
        module = tracer.root.get_submodule(str(node.target))
        write = getattr(module, "inplace", False) is True
    else:
        known = node.op in ("call_function", "call_method") and not isinstance(
            node.target, OpaqueCall
        )
        write = known and writes(node, tracer.root) and renormalised(node, tracer.root) is None
    first = node.args[0] if write and node.args else None
    return first if isinstance(first, Node) else None


def _layer(tracer: Tracer, node: Node) -> Layer | None:
    """What stands for a layer of which the shape alone is asked, and what it takes, first the input
    of the layer; None: nothing but a call.
    """
    given = node.args[0] if node.args else node.kwargs.get("input")
    if node.op != "call_module" or not isinstance(given, Node):
        return None
    if not isinstance(tracer.pairs[given][0], torch.Tensor):  # packed sequences, say
        return None
    known = stand_in_for(tracer.root.get_submodule(str(node.target)))
    return None if known is None else (known[0], (given, *known[1]))


def _like(tracer: Tracer, node: Node) -> Node | None:
    """The input whose shape a function of the user's is held to, but for the number of rows; None
    if it is held to none.
    """
    target = node.target
    if not isinstance(target, OpaqueCall) or target.custom is None or not target.keeps:
        return None
    given = (n for n in node.args if isinstance(n, Node))
    return next((n for n in given if isinstance(tracer.pairs[n][0], torch.Tensor)), None)


def _is_asked_on_meta(tracer: Tracer, node: Node) -> bool:
    if node.target in (torch.where, "where"):
        return len(node.args) == 3  # else it gives what is nonzero
    if node.target is nn.functional.one_hot:  # without a number, values decide how many classes
        return len(node.args) == 2 and type(node.args[1]) is int and node.args[1] > 0
    if node.target not in _BY_META:
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    examples = [tracer.pairs[n][0] for n in node.all_input_nodes[1:]]
    scalar = any(isinstance(v, torch.Tensor) and not v.dim() for v in examples)
    return not (name in _BY_NUMBERS and scalar)


def _is_stood_for(tracer: Tracer, node: Node) -> bool:
    """Whether a shape is found without calling ``node``."""
    return _is_broadcast(tracer, node) or _is_asked_on_meta(tracer, node)


def _is_broadcast(tracer: Tracer, node: Node) -> bool:
    if node.target not in _BY_BROADCAST:
        return False
    # torch.normal may be given numbers and a size instead
    return any(isinstance(tracer.pairs[n][0], torch.Tensor) for n in node.all_input_nodes)


def _is_drawn(node: Node) -> bool:
    """Whether ``node`` draws a new tensor, whose shape is told by numbers among its arguments."""
    return node.target in _DRAWN and "out" not in node.kwargs


def _forbidden(tracer: Tracer, node: Node, path: str, shape: bool) -> str | None:
    """Why ``node`` must not run before the call, or None.

    Inside a submodule an expensive question is refused too: to leave that module as it is costs
    less than to compute the answer twice.
    """
    if node.op in ("placeholder", "get_attr"):
        lasting = not shape and tracer.storages.get(node) in tracer.written
        return "is written in place" if lasting else None
    stood_for = _is_stood_for(tracer, node) or _is_drawn(node)
    known = _layer(tracer, node) is not None or _like(tracer, node) is not None
    if shape and (stood_for or known):
        return None  # not called
    module = tracer.root.get_submodule(str(node.target)) if node.op == "call_module" else None
    recurrent = isinstance(module, nn.RNNBase) and module.dropout == 0
    if not recurrent and draws(node, tracer.root):
        return "may draw random numbers"
    if module is not None and not recurrent and writes(node, tracer.root):
        return "may be written in place"
    if keeps_statistics(node, tracer.root):
        return f"takes {node.name} to compute, which updates its statistics"
    costly = node.target in _COSTLY or (module is not None and not isinstance(module, _TABLES))
    return f"takes {node.name} to compute" if path and costly and not shape else None


def _copy(tracer: Tracer, needed: _Slice, asked: list[Node]) -> Graph:
    graph = fx.Graph()
    made: dict[Node, Node] = {}
    for node in tracer.graph.nodes:
        shape = node in needed.shape
        like = _like(tracer, node) if shape else None
        call = _by_shape(tracer, node) if shape else None
        if like is not None:
            made[node] = made[like]
            node.target = replace(node.target, rows=True)
        elif call is not None:
            function, args = call
            made[node] = graph.call_function(function, fx.node.map_arg(args, made.__getitem__))
        elif shape or node in needed.content or node.op == "placeholder":
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[node] for node in asked))
    return graph


def _by_shape(tracer: Tracer, node: Node) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """The call, with its arguments, that finds the shape of ``node`` without its values; None if
    only ``node`` itself does.
    """
    layer = _layer(tracer, node)
    if layer is not None:
        return layer
    if _is_drawn(node):
        return by_sizes, (node.target, node.args, node.kwargs)
    if _is_asked_on_meta(tracer, node):
        return by_meta, (node.target, node.args, node.kwargs)
    if _is_broadcast(tracer, node):
        return by_broadcast, (node.args, node.kwargs, tracer.pairs[node][0].dtype)
    return None


def by_sizes(target: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """A tensor with the shape of ``target(*args, **kwargs)``, for which nothing is drawn."""
    words = {k: v for k, v in kwargs.items() if k != "generator"}
    made = target(*args, **{**words, "device": "meta"})
    return zeros(made.shape, kwargs.get("device"), made.dtype)


def by_broadcast(args: Any, kwargs: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor with the shape to which all tensors among the arguments broadcast.

    ``dtype``: that of the result in the example; the model may have been cast since.
    """
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    first = tensors[0]
    shape = first.shape if len(tensors) == 1 else torch.broadcast_tensors(*tensors)[0].shape
    floats = [t.dtype for t in tensors if t.is_floating_point()]
    if dtype.is_floating_point and floats:
        dtype = floats[0]
    return zeros(shape, first.device, dtype)


def by_meta(target: Any, args: Any, kwargs: Any) -> Any:
    """Tensors with the shapes of ``target(*args, **kwargs)``, or of that method, but no values."""
    tensors, form = list[torch.Tensor](), list[Any]()
    flatten((args, kwargs), tensors, form)
    facts = tuple([(t.shape, t.dtype) for t in tensors])
    floats = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
    known, key = None, None
    if not torch.compiler.is_compiling():
        with suppress(TypeError):  # an argument has no hash
            key = target, facts, tuple(form)
            known = _OF_META.get(key)
    if known is None:
        known = _shapes_on_meta(target, args, kwargs)
        if key is not None:
            if len(_OF_META) >= _MOST_KNOWN:
                _OF_META.clear()
            _OF_META[key] = known
    one, found = known
    made = [
        zeros(shape, tensors[0].device, floats if dtype.is_floating_point else dtype)
        for shape, dtype in found
    ]
    return made[0] if one else tuple(made)


# What torch answers on the meta device takes up to some 100 us, much of it in Python.
_OF_META: dict[Any, tuple[bool, list[tuple[torch.Size, torch.dtype]]]] = {}
_MOST_KNOWN = 4096


def _shapes_on_meta(
    target: Any, args: Any, kwargs: Any
) -> tuple[bool, list[tuple[torch.Size, torch.dtype]]]:
    """Whether ``target`` gives one tensor, and the shape and dtype of each."""
    first, *more = rebuild(args, _empty)
    words = rebuild(kwargs, _empty)
    call = getattr(first, target) if isinstance(target, str) else partial(target, first)
    made = call(*more, **words)
    one = isinstance(made, torch.Tensor)
    return one, [(t.shape, t.dtype) for t in ((made,) if one else made)]


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """On the meta device, floats as float32: the model may have been cast, and what stands for its
    values not.
    """
    dtype = torch.complex64 if tensor.is_complex() else tensor.dtype
    dtype = torch.float32 if tensor.is_floating_point() else dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")
