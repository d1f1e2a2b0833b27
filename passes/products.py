"""Products that are summed right away: written out, they are far larger than their factors.

inner products of pairs     sum(x[:, li] * x[:, lj], -1)          x: (B, F, D); also by einsum
contractions                sum(a.unsqueeze(i) * b, -1)           broadcast, also from sizes of 1
stacks of matrices          matmul(x, W)                          see matmuls.py
outer products              (x0 xᵀ) W, sum(x0 xᵀ, 0)              see outer_matmuls.py
copies of rows              matmul(w, x.repeat(..))               see repeats.py
inputs of an attention      linear(cat([q, k, q - k, q * k]))     see attention_inputs.py

An ``unsqueeze_`` of a tensor that nobody else sees counts as ``unsqueeze``.
"""

from __future__ import annotations

import operator
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, Spec, is_call, is_method
from recast.rewriter.order import only_reshapes
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply
from recast.runtime.layers.as_product import as_product

from .attention_inputs import ATTENTION
from .leaf import argument, bytes_of, einsum_of, extra, human, plural, spec_of, unpaid
from .matmuls import STACKED
from .outer_matmuls import OUTER, SUMMED
from .pairs import Index, read_index
from .repeated_rows import SHARED
from .repeats import REPEATED, SIZE

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

Sizes = tuple[int, ...]
_ROWS = 1024  # the batch size for which sizes are compared


def _rows_of(node: Node) -> tuple[Node, Node] | None:
    """``(a, b)`` of ``einsum("bpd,bpd->bp", a, b)``, in any letters."""
    found = einsum_of(node)
    if found is None or len(found.operands) != 2 or found.terms[0] != found.terms[1]:
        return None
    term, (a, b) = found.terms[0], found.operands
    plain = len(term) == len({*term}) == 3 and term.isalpha() and found.output == term[:2]
    return (a, b) if plain and isinstance(a, Node) and isinstance(b, Node) else None


def summed_product(node: Node) -> tuple[Node, Node, Node] | None:
    """``(product, a, b)`` when ``node`` is the sum over the last dimension of a * b."""
    if not (is_call(node, torch.sum) or is_method(node, "sum")):
        return None
    if extra(node, 2, "input", "dim", "axis"):
        return None
    product, dim = argument(node, 0, "input"), argument(node, 1, "dim", node.kwargs.get("axis"))
    spec = spec_of(product)
    if not is_call(product, operator.mul) or spec is None or not isinstance(dim, int):
        return None
    a, b = product.args
    last = dim in (-1, len(spec.shape) - 1)
    return (product, a, b) if last and isinstance(a, Node) and isinstance(b, Node) else None


# ---------------------------------------------------------------- inner products of pairs


@dataclass(frozen=True, slots=True)
class Chosen:
    """``x[:, index]`` of x (B, F, D)."""

    node: Node
    source: Node
    index: Index


def chosen(node: Node, root: nn.Module) -> Chosen | Miss | None:
    """What ``node`` selects from a stack of feature vectors; None when it selects nothing."""
    if is_call(node, torch.index_select) and argument(node, 1, "dim") == 1:
        source, key = argument(node, 0, "input"), argument(node, 2, "index")
    elif is_call(node, operator.getitem):
        source, keys = node.args
        if not isinstance(keys, tuple) or len(keys) not in (2, 3) or keys[0] != slice(None):
            return None
        if keys[2:] not in ((), (slice(None),)) or isinstance(keys[1], (int, slice)):
            return None
        key = keys[1]
    else:
        return None
    spec = spec_of(source)
    if spec is None or len(spec.shape) != 3 or not isinstance(source, Node):
        return None
    index = read_index(key, node, root)
    return index if index is None or isinstance(index, Miss) else Chosen(node, source, index)


def _match_inner(node: Node, root: nn.Module) -> Answer:
    contracted = _rows_of(node)
    found = summed_product(node) if contracted is None else (node, *contracted)
    if found is None:
        return None
    product, a, b = found
    left, right = chosen(a, root), chosen(b, root)
    for one in (left, right):
        if isinstance(one, Miss):
            return one
    if not isinstance(left, Chosen) or not isinstance(right, Chosen):
        return None
    if left.source is not right.source:
        return Miss(
            product,
            f"the pairs are of two tensors, {left.source.name} and {right.source.name}",
            ("stack them to one (batch, features, dim) first",),
        )
    nodes = [*dict.fromkeys((a, b, product, node))]
    return unpaid("inner_products", node, root) or Match(
        nodes, [node], (left, right, contracted is not None)
    )


def _rewrite_inner(match: Match, build: Build) -> list[Node]:
    left, right, contracted = match.found
    rows, columns = (
        chosen.index if isinstance(chosen.index, Node) else build.constant(chosen.index, hint)
        for chosen, hint in ((left, "rows"), (right, "columns"))
    )
    out = build.call(
        torch.ops.recast.inner_products.default, left.source, rows, columns,
        name="inner_products",
    )  # fmt: skip
    return [build.call(as_product, out) if contracted else out]


def _worth_inner(match: Match) -> str:
    launches = plural(len(match.nodes) - 1, "launch")
    size = bytes_of(match.nodes[-2])
    if size is None:
        return launches
    saved = 6 * size  # both choices and their product
    return f"{launches}, {human(saved)} of traffic a sample"


INNER = Rule(
    name="fuse-inner-products",
    equation="sum(x[:, i] * x[:, j], -1) => inner_products(x, i, j)",
    match=_match_inner,
    rewrite=_rewrite_inner,
    describe=lambda match: "inner products of pairs in one call",
    worth=_worth_inner,
)


# ---------------------------------------------------------------- contractions


@dataclass(frozen=True, slots=True)
class Subscripts:
    """A factor, and the dimensions of the product that it has."""

    source: Node
    letters: str
    stretched: tuple[int, ...]  # its own dimensions of size 1, which have no letter

    def put(self, build: Build) -> Node:
        """The factor without its stretched dimensions."""
        return (
            build.call(torch.squeeze, self.source, self.stretched)
            if self.stretched
            else self.source
        )


@dataclass(frozen=True, slots=True)
class Contraction:
    """``einsum(equation, a, b)``."""

    equation: str
    a: Subscripts
    b: Subscripts


def _match_contraction(node: Node, root: nn.Module) -> Answer:
    found = summed_product(node)
    if found is None:
        return None
    product, *factors = found
    whole = spec_of(product)
    read = [factor for factor in map(_factor, factors) if factor is not None]
    if whole is None or not whole.dtype.is_floating_point or len(read) != 2:
        return None
    sources = dict.fromkeys(source for source, _ in read)
    specs = [spec for source in sources if (spec := spec_of(source)) is not None]
    if any(spec.dtype != whole.dtype for spec in specs):
        return None
    letters = string.ascii_lowercase[: len(whole.shape)]
    one, two = (_subscripts(source, inserted, whole, letters) for source, inserted in read)
    if one is None or two is None or not letters[-1] == one.letters[-1:] == two.letters[-1:]:
        return None
    if {*letters} != {*one.letters, *two.letters}:
        return None  # a dimension that both have inserted
    if not _grows(whole.at(_ROWS), [spec.at(_ROWS) for spec in specs]):
        return None
    inner = [f for f, (source, _) in zip(factors, read, strict=True) if source is not f]
    if any(is_method(f, "unsqueeze_") and set(f.users) != {product} for f in inner):
        return None
    nodes = [*(f for f in dict.fromkeys(inner) if set(f.users) == {product}), product, node]
    equation = f"{one.letters},{two.letters}->{letters[:-1]}"
    return Match(nodes, [node], Contraction(equation, one, two))


def _factor(node: Node) -> tuple[Node, int | None] | None:
    """``(source, dim)``: the factor without the dimension that was inserted, and where that was."""
    if not (is_call(node, torch.unsqueeze) or only_reshapes(node)):
        return (node, None) if spec_of(node) is not None else None
    source, dim, spec = argument(node, 0, "input"), argument(node, 1, "dim"), spec_of(node)
    if spec is None or not isinstance(dim, int) or spec_of(source) is None:
        return None
    return source, dim % len(spec.shape)


def _subscripts(source: Node, inserted: int | None, whole: Spec, letters: str) -> Subscripts | None:
    """Which dimensions of the product a factor has; None where neither factor has one."""
    spec = spec_of(source)
    assert spec is not None
    dims = len(spec.shape) + (inserted is not None)
    own = list(range(len(letters) - dims, len(letters)))
    if inserted is not None:
        del own[inserted]
    stretched = [k for k, size in enumerate(spec.shape) if size == 1]
    if any(whole.shape[own[k]] == 1 for k in stretched):
        return None
    named = "".join(letters[at] for k, at in enumerate(own) if k not in stretched)
    return Subscripts(source, named, tuple(stretched))


def _grows(product: Sizes | None, factors: Sequence[Sizes | None]) -> bool:
    """Whether the product is at least four times as large as its factors."""
    if product is None or None in factors:
        return False
    made = sum(torch.Size(size).numel() for size in factors if size is not None)
    return torch.Size(product).numel() >= 4 * made


def _rewrite_contraction(match: Match, build: Build) -> list[Node]:
    found: Contraction = match.found
    return [
        build.call(
            torch.ops.recast.contraction.default,
            found.a.put(build), found.b.put(build), found.equation, name="contraction",
        )
    ]  # fmt: skip


def _worth_contraction(match: Match) -> str:
    size = bytes_of(match.nodes[-2])
    return plural(1, "launch") if size is None else f"{human(2 * size)} of traffic a sample"


CONTRACTION = Rule(
    name="contract-products",
    equation="sum(a.unsqueeze(i) * b, -1) => contraction(a, b)",
    match=_match_contraction,
    rewrite=_rewrite_contraction,
    describe=lambda match: f"a broadcast product, summed, as {match.found.equation}",
    worth=_worth_contraction,
)


@dataclass(frozen=True)
class ContractProducts:
    """sum(x[:, i] * x[:, j], -1) => inner_products(x, i, j), and other summed products

    A contraction becomes a matrix product only where the product that it replaces is at least four
    times larger than its factors. A product with a stack of matrices is no longer written out per
    sample, nor rows once per capsule. An attention over a history reads its target once per sample,
    not once per row, as does any layer what the rows of a sample share.
    """

    name: ClassVar[str] = "contract-products"

    def run(self, graph: Graph, context: Context) -> int:
        """Rewrite the summed products of ``graph``; returns their number."""
        return apply(
            graph,
            [OUTER, SUMMED, INNER, CONTRACTION, STACKED, REPEATED, SIZE, ATTENTION, SHARED],
            context,
        )
