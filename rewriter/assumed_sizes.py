"""Which sizes of the inputs a rewritten graph assumes, besides those that forward reads.

The example tells passes that a history has 6 items. What they write may say so too: a mean as a sum
divided by 6. So the passes run again, as if the histories had another length: a size on which what
they write depends is assumed, and a call with another one runs the plain forward. Sizes that the
captured graph does not take, such as another width of a layer's input, need no care.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from recast.errors import VerifyError

from . import pipeline
from .capture.batches import Batches
from .capture.constants import constants
from .capture.plain_model import live_copy
from .capture.proof import may_write
from .capture.restored_state import restored_tensors
from .compiled.copies import generators_of, same_random_numbers
from .compiled.signature import Signature
from .ir import Graph, Node, Spec, annotate, note, spec_of
from .pipeline import Context, Fuel, Pass

Place: TypeAlias = "tuple[int, int]"  # an input, and one of its dimensions
Specs: TypeAlias = "list[Any]"  # one for each node of a graph
_TIED = 6  # inputs of one size that are tried apart, and sizes in the place of one: more take long


@dataclass
class Assumed:
    """What a graph relies on: sizes of the example, and that others are not 1, which broadcasts."""

    fixed: set[Place] = field(default_factory=set)
    wide: set[Place] = field(default_factory=set)


def assumed(
    graph: Graph,
    rewritten: Graph,
    passes: Sequence[Pass],
    context: Context,
    signature: Signature,
    *,
    fewer: Batches | None = None,
    training: bool,
) -> Assumed:
    """The sizes of the example that ``rewritten`` relies on, where the captured ``graph`` takes
    others.

    ``context`` is as it was when ``passes`` made ``rewritten`` of ``graph``; it is not changed.
    ``fewer``: batches like those of ``context`` that take less time, unless the graph takes none so
    small.
    """
    found = Assumed()
    assert context.batches is not None and context.sizes is not None
    trial = None
    if fewer is not None:
        batches = fewer.first, fewer.second
        trial = _Trial(graph, context.root, batches, fewer.sizes, signature, training)
    if trial is None or not trial.runs():
        trial = _Trial(graph, context.root, context.batches, context.sizes, signature, training)

    def makes(specs: Specs) -> bool:
        return _makes(rewritten, graph, specs, passes, context)

    for size, places in trial.places.items():
        for those in _together(trial, size, places):
            if found.fixed.isdisjoint(those) and not all(map(makes, trial.others(those, size))):
                found.fixed |= set(those)
        for place in places if 1 < len(places) <= _TIED and size > 1 else ():
            specs = None if place in found.fixed else trial.specs([place], 1)
            if specs is not None and not makes(specs):
                found.wide.add(place)
    return found


def _by_size(
    first: Sequence[Any], second: Sequence[Any], signature: Signature
) -> dict[int, list[Place]]:
    """The dimensions that are alike in both examples and that forward does not read, by size."""
    read = {(k, d) for k, sizes in signature.fixed for d, _ in sizes}
    found: dict[int, list[Place]] = {}
    for k, (a, b) in enumerate(zip(first, second, strict=True)):
        if isinstance(a, torch.Tensor) and a.layout == torch.strided and not a.is_nested:
            for d, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)):
                if n == m > 0 and (k, d) not in read:
                    found.setdefault(n, []).append((k, d))
    return found


def _together(trial: _Trial, size: int, places: list[Place]) -> Iterator[list[Place]]:
    """Those of ``places`` that can have another size: the fewest at a time, as a history and its
    mask, apart from candidates, which are as many by chance; and all of them.
    """
    told: list[list[Place]] = []
    for place in places if len(places) <= _TIED else ():
        if any(place in those for those in told):
            continue
        those = places
        apart = [*told, *([other] for other in places if other != place)]
        for others in [[p for p in places if p != place], *apart]:
            fewer = [p for p in those if p not in others]
            if len(fewer) < len(those) and trial.takes_another(fewer, size):
                those = fewer
        if those not in told and trial.takes_another(those, size):
            told.append(those)
            yield those
    if places not in told and trial.takes_another(places, size):
        yield places


class _Trial:
    """Runs a captured graph on batches whose inputs have other sizes."""

    def __init__(
        self, graph: Graph, root: nn.Module, batches: tuple[Any, Any], sizes: tuple[int, int],
        signature: Signature, training: bool,
    ) -> None:  # fmt: skip
        self.graph, self.root, self.sizes = graph, root, sizes
        self.training, self.writes = training, may_write(graph, root)
        self.first, self.second = (signature.leaves(batch)[0] for batch in batches)
        self.places = _by_size(self.first, self.second, signature)
        tensors = [v for v in self.second if isinstance(v, torch.Tensor)]
        self.present = sorted({n for t in tensors for n in t.shape if n > 2})[:_TIED]
        self._runs: dict[tuple[tuple[Place, ...], int], Specs | None] = {}

    def runs(self) -> bool:
        """Whether the graph takes the smaller batch as it is."""
        try:
            self._values([_resized(v, [], 0) for v in self.second])  # forward may write to them
        except Exception:
            return False
        return True

    def others(self, places: list[Place], size: int) -> Iterator[Specs]:
        """The specs of all values where ``places`` have another size, as far as the graph takes it:
        more and less, by so much that it shows in what is computed of them; instead of one, as
        many as another input has.
        """
        more, less = (size + size // 2 + 1, 2 * size, size + 1), (size // 2, size - 1)
        told = {size}
        for some in (more, less, *(((n,) for n in self.present) if size == 1 else ())):
            for other in some:
                specs = None if other in told or other < 2 else self.specs(places, other)
                if specs is not None:
                    told.add(other)
                    yield specs
                    break

    def takes_another(self, places: list[Place], size: int) -> bool:
        """Whether there is any."""
        return next(self.others(places, size), None) is not None

    def specs(self, places: list[Place], size: int) -> Specs | None:
        """Those where ``places`` have ``size``; None: the graph does not take it."""
        key = tuple(places), size
        if key not in self._runs:
            self._runs[key] = self._run(places, size)
        return self._runs[key]

    def _run(self, places: list[Place], size: int) -> Specs | None:
        second, first = (
            [_resized(v, [d for k, d in places if k == at], size) for at, v in enumerate(batch)]
            for batch in (self.second, self.first)
        )
        try:
            less, more = self._values(second, first)  # the smaller one first
        except Exception:  # not a size that the model takes
            return None
        return [
            _with_shapes(note(node).spec, spec_of(a, b, self.sizes))
            for node, a, b in zip(self.graph.nodes, more, less, strict=True)
        ]

    def _values(self, *batches: list[Any]) -> list[list[Any]]:
        """For each batch the value of each node, its tensors without their memory.

        Warnings are not for the user: a loss warns of shapes that only this run has. Where they are
        errors, they would make sizes that the graph takes into ones that it does not.
        """
        live = live_copy(self.root, self.training)
        vars(live)["_recast_constants"] = constants(self.root)
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            if any(map(_on_gpu, batches)):
                # A position behind its table would end all work on a GPU: nothing is computed.
                with _quiet(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
                    given = [[_of(fake, v) for v in batch] for batch in batches]
                    return [self._shapes(live, batch) for batch in given]
            generators = generators_of(self.root)
            safe = restored_tensors(self.root) if self.writes else nullcontext()
            with safe, same_random_numbers(*generators):
                return [self._shapes(live, batch) for batch in batches]

    def _shapes(self, live: nn.Module, batch: list[Any]) -> list[Any]:
        shapes = _Shapes(live, self.graph)
        shapes.run(*batch)
        return shapes.seen


def _of(fake: FakeTensorMode, value: Any) -> Any:
    return fake.from_tensor(value) if isinstance(value, torch.Tensor) else value


def _on_gpu(inputs: list[Any]) -> bool:
    return any(isinstance(v, torch.Tensor) and not v.is_cpu for v in inputs)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch logs of shapes that do not fit."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


class _Shapes(fx.Interpreter):
    """Keeps the shape of every value of a run."""

    def __init__(self, root: nn.Module, graph: Graph) -> None:
        super().__init__(root, graph=graph)
        self.seen: list[Any] = []

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.seen.append(_empty(value))
        return value


def _empty(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return tuple(map(_empty, value)) if isinstance(value, (tuple, list)) else None


def _resized(value: Any, dims: list[int], size: int) -> Any:
    """``value`` with ``size`` entries along ``dims``: the first ones, or all again and again."""
    for d in dims:
        along = torch.arange(size, device=value.device) % value.shape[d]
        value = value.index_select(d, along)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _with_shapes(known: Any, seen: Any) -> Any:
    """``known`` with the shapes of ``seen``; its dtypes are those under autocast."""
    if isinstance(known, Spec) and isinstance(seen, Spec):
        return Spec(known.dtype, seen.shape)
    if isinstance(known, tuple) and isinstance(seen, tuple) and len(known) == len(seen):
        return tuple(map(_with_shapes, known, seen))
    return known if known is None else seen


# ---------------------------------------------------------------- the same rewrite


def _makes(
    rewritten: Graph, graph: Graph, specs: Specs, passes: Sequence[Pass], context: Context
) -> bool:
    """Whether ``passes`` make ``rewritten`` of ``graph`` also where its values are as ``specs``."""
    twin = copy.deepcopy(graph)
    for node, spec in zip(twin.nodes, specs, strict=True):
        annotate(node, spec=spec)
    own = Context(context.root, sizes=context.sizes, fuel=Fuel(context.fuel.left))
    own.loops = context.loops
    with constants(context.root).tried():
        try:
            pipeline.run_again(twin, passes, own)
        except VerifyError:
            return False
        return _alike(rewritten, twin)


def _alike(one: Graph, two: Graph) -> bool:
    """Whether two graphs compute the same: the same calls, in one order, with equal constants."""
    if len(one.nodes) != len(two.nodes):
        return False
    twins = dict(zip(one.nodes, two.nodes, strict=True))
    return all(
        a.op == b.op
        and _same_target(a.target, b.target)
        and _same((a.args, a.kwargs), (b.args, b.kwargs), twins)
        for a, b in twins.items()
    )


def _same_target(a: Any, b: Any) -> bool:
    """Equal constants have one name."""
    if isinstance(a, partial) and isinstance(b, partial):
        return bool((a.func, a.args, a.keywords) == (b.func, b.args, b.keywords))
    return bool(a == b)


def _same(a: Any, b: Any, twins: dict[Node, Node]) -> bool:
    if isinstance(a, Node):
        return twins.get(a) is b
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(_same(x, y, twins) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(v, b[k], twins) for k, v in a.items())
    if isinstance(a, slice):
        return _same((a.start, a.stop, a.step), (b.start, b.stop, b.step), twins)
    if isinstance(a, torch.Tensor):
        return a is b
    return bool(a == b) or repr(a) == repr(b)  # NaN
