"""Linear layers on the vectors of pair products, as in bilinear interactions: a few matrix products
instead of one per pair.

one layer for all vectors         linear(x, W)                         x: (B, F, D)
one layer a vector                bmm(x^t, stack(Ws)^t)^t
several layers a vector           linear(x_k, cat(W_k's)) for each vector k

A layer is an ``nn.Linear``, or a product with a matrix: one of a parameter (P, D, E), (F, G, D, E)
that holds them all, ``v @ W[k]``, ``v @ W[i, j]``, ``matmul(v, split(W, 1, 0)[k])``, or a parameter
of its own.

Also a cat of all the parts of a split, which is the tensor itself.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Node, is_call, is_method
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule

from .leaf import argument, differs, module_of, plural, spec_of, tensor_at
from .pair_vectors import Vector, closed, vector

_FEWEST = 3


@dataclass(frozen=True, slots=True)
class Layer:
    """``linear(v)`` of one vector."""

    node: Node
    path: str  # of the module, or of the parameter that holds the matrix
    given: Node  # v
    vector: Vector
    picks: tuple[Node, ...]
    place: tuple[int, ...] | None = None  # of the matrix in that parameter, () for all of it
    biased: bool = False

    @property
    def key(self) -> tuple[str, tuple[int, ...] | None]:
        """The identity of its weight."""
        return self.path, self.place


@dataclass(frozen=True, slots=True)
class Found:
    """The layers among the vectors of one side, from place ``start`` on."""

    call: Node
    side: int
    start: int
    layers: tuple[Layer, ...]
    bias: bool


def _matrix(node: Any, root: nn.Module) -> tuple[str, tuple[int, ...]] | None:
    """``(path, place)`` of a matrix (D, E) or (1, D, E): a parameter or an element of one."""
    place: tuple[int, ...] = ()
    while is_call(node, operator.getitem):
        source, key = node.args
        keys = key if isinstance(key, tuple) else (key,)
        if not isinstance(source, Node) or not all(type(k) is int for k in keys):
            return None
        place = (*keys, *place)
        node = source
        if is_call(source, torch.split) or is_method(source, "split"):
            sizes = argument(source, 1, "split_size_or_sections", source.kwargs.get("split_size"))
            if len(place) != 1 or sizes != 1 or argument(source, 2, "dim", 0) != 0:
                return None
            node = argument(source, 0, "tensor", source.kwargs.get("input"))
    held = tensor_at(node, root)
    if held is None or held.dim() != len(place) + 2:
        return None
    sizes = held.shape[: len(place)]
    if not all(-size <= k < size for k, size in zip(place, sizes, strict=True)):
        return None
    return str(node.target), tuple(k % size for k, size in zip(place, sizes, strict=True))


def _product(node: Node, call: Node, root: nn.Module) -> Layer | None:
    """A product of a vector with one matrix of a parameter that holds several."""
    if not is_call(node, torch.matmul, operator.matmul, torch.mm) or len(node.args) != 2:
        return None
    given, weight = node.args
    matrix = _matrix(weight, root) if set(node.users) == {call} and not node.kwargs else None
    found = vector(given) if matrix is not None and isinstance(given, Node) else None
    known, made = spec_of(given), spec_of(node)
    if matrix is None or found is None or known is None or made is None:
        return None
    if len(made.shape) > len(known.shape):
        return None  # (B, D) with (1, D, E) is (1, B, E)
    assert isinstance(given, Node)
    return Layer(node, matrix[0], given, *found, matrix[1])


def layer_of(node: Any, call: Node, root: nn.Module) -> Layer | Miss | None:
    """``node`` as a layer, if only ``call`` reads it; a Miss when it nearly is one."""
    product = _product(node, call, root) if isinstance(node, Node) else None
    if product is not None:
        return product
    module = module_of(node, root) if isinstance(node, Node) else None
    if not isinstance(module, nn.Linear) or set(node.users) != {call}:
        return None
    why = differs(node, module, nn.Linear)
    if why is not None:
        return why
    given = argument(node, 0, "input")
    found = vector(given) if isinstance(given, Node) else None
    if found is None:
        return None
    biased = module.bias is not None
    return Layer(node, str(node.target), given, found[0], found[1], biased=biased)


def _match(node: Node, root: nn.Module) -> Answer:
    if not is_call(node, torch.ops.recast.pair_products.default):
        return None
    for side in (0, 1):
        features: Any = node.args[side]
        read = [layer_of(f, node, root) for f in features]
        at = [k for k, layer in enumerate(read) if layer is not None]
        if len(at) < _FEWEST:
            continue
        layers = []
        for layer in read[at[0] : at[-1] + 1]:
            if isinstance(layer, Miss):
                return layer
            if layer is not None:
                layers.append(layer)
        kinds = {_kind(layer, root) for layer in layers}
        if len(layers) != at[-1] + 1 - at[0] or len(kinds) != 1 or not _in_runs(layers):
            return Miss(node, f"{len(at)} of its vectors come from layers that cannot be grouped",
                        ("give the layers one size, in the order of the vectors",))  # fmt: skip
        picks = [n for layer in layers for n in layer.picks]
        inside = closed([*(layer.node for layer in layers), node], picks)
        nodes = [n for n in node.graph.nodes if n in inside]
        bias = next(iter(kinds))[2]
        return Match(nodes, [node], Found(node, side, at[0], tuple(layers), bias))
    return None


def _kind(layer: Layer, root: nn.Module) -> tuple[int, int, bool, str | None]:
    """What layers of one group share: the sizes, a bias, the parameter that holds the matrices."""
    if layer.place is None:
        module = root.get_submodule(layer.path)
        assert isinstance(module, nn.Linear)
        return module.in_features, module.out_features, layer.biased, None
    spec = spec_of(layer.node)
    given = spec_of(layer.given)
    assert spec is not None and given is not None
    held = layer.path if layer.place else ""  # parameters of their own are stacked
    return int(given.shape[-1]), int(spec.shape[-1]), False, held


def _in_runs(layers: Sequence[Layer]) -> bool:
    """Whether the layers of each vector are neighbours."""
    return len(_runs(layers)) == len({layer.vector for layer in layers})


def _runs(layers: Sequence[Layer]) -> list[list[Layer]]:
    runs: list[list[Layer]] = []
    for layer in layers:
        if runs and runs[-1][0].vector == layer.vector:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    runs = _runs(found.layers)
    paths = [layer.path for layer in found.layers]
    if len({layer.key for layer in found.layers}) == 1 and len(runs) == len(paths):
        bias = build.get(f"{paths[0]}.bias") if found.bias else None
        weight = _one(found.layers[0], build)
        if found.layers[0].place is not None:
            weight = build.call(torch.transpose, weight, 0, 1)
        made = [build.call(F.linear, _stacked(found, build), weight, bias)]
    elif len(runs) == len(paths):
        made = [_batched(found, paths, build)]
    else:
        made = _by_vector(found, runs, match, build)
    lists = [list(found.call.args[0]), list(found.call.args[1])]  # type: ignore[arg-type]
    lists[found.side][found.start : found.start + len(paths)] = made
    call: Any = found.call
    return [build.call(call.target, *lists, *call.args[2:], name="pair_products")]


def _parameters(paths: Sequence[str], name: str, build: Build) -> list[Node]:
    return [build.get(f"{path}.{name}") for path in paths]


def _one(layer: Layer, build: Build) -> Node:
    """Its weight as it is stored: (E, D) in a module, else (D, E)."""
    if layer.place is None:
        return build.get(f"{layer.path}.weight")
    matrix = build.get(layer.path)
    for place in layer.place:
        matrix = build.call(torch.select, matrix, 0, place)
    return matrix


def weights_of(layers: Sequence[Layer], build: Build, *, turned: bool = False) -> Node:
    """The weights of all ``layers``, (n, E, D), or ``turned``, (n, D, E)."""
    places = [layer.place for layer in layers]
    first = places[0]
    if not first:
        held = build.call(torch.stack, [_one(layer, build) for layer in layers], 0)
    elif places == [(first[0] + k,) for k in range(len(places))]:
        key: Any = slice(first[0], first[0] + len(places))
        held = build.call(operator.getitem, build.get(layers[0].path), key)
    else:
        index = tuple(
            build.constant(torch.tensor(axis), "places")
            for axis in zip(*(place for place in places if place is not None), strict=True)
        )
        key = index if len(index) > 1 else index[0]
        held = build.call(operator.getitem, build.get(layers[0].path), key)
    return held if turned == (first is not None) else build.call(torch.transpose, held, 1, 2)


def _stacked(found: Found, build: Build) -> Node:
    """The vectors that go into the layers, (B, F, D)."""
    vectors = [layer.vector for layer in found.layers]
    source, first = vectors[0].source, vectors[0].index
    spec = spec_of(source)
    row = all(v == Vector(source, first + k) for k, v in enumerate(vectors))
    if row and spec is not None and len(spec.shape) == 3:
        if len(vectors) == spec.shape[1]:
            return source
        return build.call(
            operator.getitem, source, (slice(None), slice(first, first + len(vectors)))
        )
    given = [_flat(layer, build) for layer in found.layers]
    return build.call(torch.stack, given, 1)


def _flat(layer: Layer, build: Build) -> Node:
    """The vector of ``layer``, (B, D)."""
    spec = spec_of(layer.vector.source)
    assert spec is not None
    if len(spec.shape) == 2:
        return layer.vector.source
    if len(spec.shape) == 4:
        source = build.call(torch.flatten, layer.vector.source, 1, 2)
        return build.call(torch.select, source, 1, layer.vector.index)
    return build.call(torch.select, layer.vector.source, 1, layer.vector.index)


def _batched(found: Found, paths: Sequence[str], build: Build) -> Node:
    """A layer of its own for each vector."""
    x = build.call(torch.transpose, _stacked(found, build), 0, 1)
    weights = weights_of(found.layers, build)
    out = build.call(torch.bmm, x, build.call(torch.transpose, weights, 1, 2))
    out = build.call(torch.transpose, out, 0, 1)
    if not found.bias:
        return out
    return build.call(operator.add, out, build.call(torch.stack, _parameters(paths, "bias", build)))


def _by_vector(
    found: Found, runs: Sequence[Sequence[Layer]], match: Match, build: Build
) -> list[Node]:
    """All layers of a vector in one product."""
    parts: dict[Node, Node] = {}
    made = []
    for run in runs:
        v, paths = run[0].vector, [layer.path for layer in run]
        spec = spec_of(v.source)
        if spec is not None and len(spec.shape) == 3 and v.source not in parts:
            parts[v.source] = build.call(torch.unbind, v.source, 1)
        x = build.item(parts[v.source], v.index) if v.source in parts else _flat(run[0], build)
        if run[0].place is None:
            weight = build.call(torch.cat, _parameters(paths, "weight", build), 0)
        else:
            weight = build.call(torch.flatten, weights_of(run, build), 0, 1)
        bias = build.call(torch.cat, _parameters(paths, "bias", build), 0) if found.bias else None
        out = build.call(F.linear, x, weight, bias)
        made.append(build.call(torch.unflatten, out, 1, (len(run), -1)))
    return made


LINEARS = Rule(
    name="group-vector-linears",
    equation="linear_k(v_k) for each k => bmm(v, stack(w))",
    match=_match,
    rewrite=_rewrite,
    describe=lambda match: f"{plural(len(match.found.layers), 'layer')} of single vectors grouped",
    worth=lambda match: plural(len(match.found.layers) - 1, "launch"),
)


# ---------------------------------------------------------------- a split, joined again


def _match_joined(node: Node, root: nn.Module) -> Answer:
    parts = argument(node, 0, "tensors") if is_call(node, torch.cat) else None
    spec = spec_of(node)
    if not isinstance(parts, (list, tuple)) or len(parts) < _FEWEST or spec is None:
        return None
    if len(spec.shape) != 3 or spec.shape[1] != 1 or argument(node, 1, "dim", 0) not in (2, -1):
        return None
    found = [vector(p) if isinstance(p, Node) and len(set(p.users)) == 1 else None for p in parts]
    vectors = [f[0] for f in found if f is not None]
    source = vectors[0].source if vectors else node
    whole = spec_of(source)
    if whole is None or len(whole.shape) != 3 or whole.shape[1] != len(parts):
        return None
    if vectors != [Vector(source, k) for k in range(len(parts))]:
        return None
    inside = closed([node], [n for f in found if f is not None for n in f[1]])
    nodes = [n for n in node.graph.nodes if n in inside]
    return Match(nodes, [node], source)


def _rewrite_joined(match: Match, build: Build) -> list[Node]:
    spec = spec_of(match.outputs[0])
    assert spec is not None
    return [build.call(torch.reshape, match.found, (-1, 1, spec.shape[2]))]


JOINED = Rule(
    name="join-split",
    equation="cat(split(x, 1, 1), 2) => reshape(x)",
    match=_match_joined,
    rewrite=_rewrite_joined,
    describe=lambda match: "a split that is joined again is the tensor itself",
    worth=lambda match: plural(len(match.nodes), "launch"),
)
