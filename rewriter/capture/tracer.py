"""One trace: ``forward`` runs on :class:`Value` inputs, and its torch calls become graph nodes.

Nothing global is patched. A ``TorchFunctionMode`` (for this thread only) sees every torch call,
factory functions included (:mod:`.intercept`). Calls of layers are seen because the trace runs on a
scratch copy of the module tree with ``forward`` attributes of our own (:mod:`.scratch`). A failed
trace leaves nothing behind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FrameType, MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import fx, nn

from recast.errors import CaptureError
from recast.rewriter.autocast import enabled, nesting
from recast.rewriter.compiled.copies import shallow_copy
from recast.rewriter.compiled.external_state import slot
from recast.rewriter.ir import KEY, Note, spec_of

from . import frames, recording, scratch
from .code_watcher import CodeWatcher
from .constants import Constants
from .counted_sizes import counted
from .dynamic_sizes import AtMost, DynamicSizes, Held, Lengths, dynamic_sizes
from .opaque_calls import OpaqueCall, candidates, transformed
from .python_reads import PythonReads
from .refused import refusal
from .replaced_builtins import ReplacedBuiltins
from .step_loops import Steps
from .values import Value

_LOOP = (  # over the samples of a batch
    "operations on the whole batch, which torch.where, gather or a mask make of most such loops",
    "the loop in a function of tensors, beside the model or a method of it that uses no parameter"
    " and no layer: it is then kept whole, as one call",
)


class Question(NamedTuple):
    """Python asked for a value that depends on the batch; both examples gave the same answer."""

    node: fx.Node
    convert: Callable[[Any], Any]
    expected: Any
    where: str | None
    path: str  # the module that asked


class Tracer:
    """The state of one trace of one mode, which its Values use. Call :func:`.trace.trace` instead.
    Storages are addresses of memory; ``alive`` keeps tensors alive so that no address is reused.
    """

    def __init__(
        self, root: nn.Module, live: nn.Module, *, training: bool, sizes: tuple[int, int],
        opaque: frozenset[str], prefix: str, plain_flags: bool,
        sizes_kept: frozenset[str] = frozenset(), outside: frozenset[CodeType] = frozenset(),
        numbers: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.root = root  # where lifted constants go
        self.live = live  # runs layers on the examples
        self.training = training
        self.sizes = sizes
        self.prefix = prefix
        self.numbers = numbers  # that forward keeps, by path: those of the two examples
        self.running = False  # while positive, calls are not recorded
        self.stack: list[str] = [""]  # paths of the modules whose forward runs
        self.innermost: str | None = None  # the module that raised
        self.failed: CaptureError | None = None
        self.raised: tuple[str | None, str] | None = None  # line and module of a torch call
        self.autocast = nesting(), enabled()  # outside forward
        self.saving = recording.saving()
        self.default_dtype = torch.get_default_dtype()

        self.graph = fx.Graph()
        self.pairs: dict[fx.Node, tuple[Any, Any]] = {}
        self.storages: dict[fx.Node, int] = {}
        self.shapes: dict[fx.Node, torch.Size] = {}
        self.static: set[fx.Node] = set()
        self.counted: set[fx.Node] = set()  # of which values decide the first size
        self.overwritten: set[fx.Node] = set()  # whose values in the examples are of a later node
        self.devices: dict[int, tuple[torch.device, fx.Node]] = {}
        self.guards: list[Question] = []
        self.askers: list[set[Steps | None]] = []  # of each guard: loops over steps, None: others
        self.iterated: Steps | None = None  # what a loop over steps is about to begin with
        self.step_loops: dict[Steps, frozenset[str]] = {}  # with the lines of what they made
        self.opaque_calls: dict[OpaqueCall, str] = {}  # with the line of the first call
        self.writers: set[OpaqueCall] = set()  # of them, those that wrote to an argument
        self.layers: set[str] = set()  # paths of modules that run as they are
        self.settings: dict[str, dict[str, Any]] = {}  # of each of them, what it held before
        self.forks: set[str] = set()  # modules whose training flag Python asked for
        self.baked: set[fx.Node] = set()  # inputs whose fixed sizes the graph relies on
        self.ranks: set[fx.Node] = set()  # of which Python asked how many dimensions they have
        self.bakes_dtypes = False
        self.bakes_computed_dtypes = False  # of more than inputs and parameters
        self._sources: dict[fx.Node, frozenset[fx.Node]] = {}
        self.dynamic_sizes: dict[fx.Node, DynamicSizes] = {}  # data-dependent sizes
        self.held_sizes: dict[fx.Node, dict[int, int]] = {}  # by dimension, of opaque layers

        self.held: dict[int, Value] = {}  # Values of the model's tensors, by the tensor's id
        self.alive: list[Any] = []
        self.parameters: set[int] = set()  # storages of the user's parameters
        self.written: set[int] = set()  # storages written in place
        self.outs: set[int] = set()  # those written through out=
        self.mixed: set[int] = set()  # those written to with something of the inputs

        self.reading = PythonReads()
        self.owners: dict[int, str] = {}  # whose methods are called from outside torch, by identity
        self.scratch = shallow_copy(root)
        self.holds_shapes = "shape" in sizes_kept  # functions that leave torch, to theirs
        named = frozenset(n for n in sizes_kept if " " not in n) - {"shape"}
        self.int_lines = {n.removeprefix("int ") for n in sizes_kept - named}  # see asked_again()
        own = ReplacedBuiltins(self, named, outside) if named or outside or numbers else None
        self.copies = own
        scratch.prepare(self, opaque, plain_flags, own)

    def quiet(self) -> AbstractContextManager[None]:
        """Work on example values without recording it."""
        profile = None if self.running else self.reading.profile
        if profile is not None:
            profile.pause()  # here, so that between it and the user's code are our frames alone
        return self._quiet(profile)

    @contextmanager
    def _quiet(self, profile: CodeWatcher | None) -> Iterator[None]:
        before, self.running = self.running, True
        if profile is not None:
            sys.setprofile(None)
        try:
            yield
        finally:
            self.running = before
            if profile is not None:
                profile.resume()
                sys.setprofile(profile)

    # ------------------------------------------------------------ the graph

    def record(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call on both examples and add its node."""
        with self.quiet():
            try:
                return recording.record(self, kind, target, args, kwargs)
            except CaptureError:
                raise
            except Exception:
                self.raised = self.raised or (self.where(), self.stack[-1])
                raise

    def node(
        self, kind: str, target: Any, args: Any, kwargs: Any, pair: tuple[Any, Any],
        origin: str | None = None, name: str | None = None,
    ) -> fx.Node:  # fmt: skip
        """A new node with the values ``pair`` in the two examples."""
        node = self.graph.create_node(kind, target, tuple(args), dict(kwargs), name=name)
        if origin is None:
            origin = str(target) if kind == "call_module" else self.stack[-1]
        full = ".".join(p for p in (self.prefix, origin) if p)
        self.pairs[node] = pair
        spec = counted(node, spec_of(pair[0], pair[1], self.sizes), self.pairs, self.counted)
        if isinstance(pair[0], torch.Tensor):
            self.shapes[node] = pair[0].shape  # a later unsqueeze_ changes that of the value
        if isinstance(pair[0], torch.Tensor) and pair[0].layout is torch.strided:
            self.storages[node] = pair[0].untyped_storage().data_ptr()
        node.meta[KEY] = Note(origin=(full,) if full else (), where=self.where(), spec=spec)
        return node

    def held_node(self, value: Value) -> fx.Node:
        """The node that reads ``value`` from the model."""
        assert value.path is not None
        owner = value.path.rpartition(".")[0]
        if owner == Constants.ATTRIBUTE:
            owner = self.stack[-1]
        with self.quiet():
            return self.node("get_attr", value.path, (), {}, value.pair, origin=owner)

    def owner_of(self, value: Any) -> str | None:
        """The path of a module of the model, or of what it holds, that is ``self`` of a method."""
        return None if isinstance(value, torch.Tensor) else self.owners.get(id(value))

    def bake(self, node: fx.Node, sizes: Sequence[int], most: int | None = None) -> None:
        """Note that the graph relies on ``sizes`` of ``node``, or on its number of values; only on
        that they are not greater than ``most``, if given.
        """
        self.baked |= self.sources(node)
        known = dynamic_sizes(self, node)
        longest = [one for one in known.roots if one[1] == Lengths(longest=True)]
        if most is not None and longest:
            for root, question in longest:
                self.ask(root, AtMost(question, most), True)
            return
        if not any((n, n) in known.sizes for n in sizes) and not known.counted(sizes):
            return
        asked = []
        for root, question in known.roots:
            if isinstance(question, Held):
                told = {d: self.shapes[root][d] for d in question.dims}
                if {*told.values()} & {*sizes}:
                    self.held_sizes.setdefault(root, {}).update(told)
                continue
            with self.quiet():
                first, second = (question(v) for v in self.pairs[root])
            if first == second:
                asked.append((root, question, first))
        own = [one for one in asked if one[2] in sizes or one[2] in {(n,) for n in sizes}]
        for root, question, answer in own or asked:  # else of a size made of others
            self.ask(root, question, answer)

    def bake_dtypes(self, nodes: Iterable[fx.Node]) -> None:
        """Note that Python asked for the dtypes of ``nodes``."""
        self.bakes_dtypes = True
        if any(node.op not in ("placeholder", "get_attr") for node in nodes):
            self.bakes_computed_dtypes = True

    def asks_of_own(self, values: Sequence[Any], fact: str) -> None:
        """Note that Python asked the first of ``values`` for ``fact``, "shape" or "dtype", if it is
        a tensor of the model, or made of such alone.
        """
        value = values[0] if values else None
        if not isinstance(value, Value) or (value.path is None and self.sources(value.node)):
            return
        paths = set() if value.path is None else {value.path}
        left = [] if value.made is None else [value.made]
        while left:
            node = left.pop()
            if node.op == "get_attr":
                paths.add(str(node.target))
            left += node.all_input_nodes
        for path in paths:
            held = self.held_by(path)
            if held is not None:
                self.reading.facts[path, fact] = getattr(held, fact)

    def held_by(self, path: str) -> torch.Tensor | None:
        """The parameter or buffer at ``path`` of the model; None for what is no such thing."""
        owner, _, name = path.rpartition(".")
        try:
            module = self.root.get_submodule(owner)
        except AttributeError:
            return None
        held = slot(module, name)
        return held if isinstance(held, torch.Tensor) else None

    def sources(self, node: fx.Node) -> frozenset[fx.Node]:
        """The inputs on whose sizes the sizes of ``node`` may depend."""
        known = self._sources.get(node)
        if known is None:
            if node.op == "placeholder":
                known = frozenset({node})
            else:
                known = frozenset().union(*(self.sources(n) for n in self._shapes_from(node)))
            self._sources[node] = known
        return known

    def _shapes_from(self, node: fx.Node) -> Sequence[fx.Node]:
        """The inputs that shape ``node``: for pooled lookups the offsets, not the flat ids."""
        bag = node.target is nn.functional.embedding_bag or (
            node.op == "call_module"
            and isinstance(self.root.get_submodule(str(node.target)), nn.EmbeddingBag)
        )
        if bag:
            place = 1 if node.op == "call_module" else 2
            offsets = node.kwargs.get(
                "offsets", node.args[place] if len(node.args) > place else None
            )
            if isinstance(offsets, fx.Node):
                return (offsets,)
        return node.all_input_nodes

    # ------------------------------------------------------------ what python asks

    def guard(self, value: Value, convert: Callable[[Any], Any], expected: Any) -> None:
        """Have ``convert(value)`` evaluated again at each call, since the graph relies on the
        answer.
        """
        self.ask(value.node, convert, expected)

    def ask(self, node: fx.Node, convert: Callable[[Any], Any], expected: Any) -> None:
        """:meth:`guard` for what is not a Value."""
        for g, askers in zip(self.guards, self.askers, strict=True):
            if g.node is node and g.convert == convert:
                askers.add(self.iterated)
                return
        self.guards.append(Question(node, convert, expected, self.where(), self.stack[-1]))
        self.askers.append({self.iterated})

    def refuse_value(self, value: Value, what: str, first: Any, second: Any) -> NoReturn:
        """Stop: ``what`` Python asks ``value`` has a different answer in each example."""
        name = what.removeprefix("an index or ").partition("(")[0]
        number = name in ("int", "float", "range") and value.number
        number = number or (name == "int" and value.count)
        bounds = name == "bool" and value.number and frames.names_bounds()
        loop = name != "int" and (first, second) == self.sizes
        of = "the batch size" if loop else "a value that depends on the batch"
        self.refuse(
            f"{what} of {of}: {first} for one example, {second} for the other",
            size="min" if bounds else name if name == "len" or number else "",
            tries=_LOOP if loop else (),
        )

    def refuse(
        self, why: str, size: str = "", tries: tuple[str, ...] = (), outside: Any = None
    ) -> NoReturn:
        """Stop the trace, with ``why`` and the line that forward is at. ``outside``: the function
        that leaves torch and cannot run as one call.
        """
        frame = sys._getframe(1)
        error = transformed(frames.transform(frame), self.stack[-1])
        if error is None:
            error = refusal(why, self.where(), self.stack[-1])
            error.size, error.tries = size, tries or error.tries
            error.inside = tuple(candidates(frame))
            error.outside = getattr(outside, "__code__", None)
        self.failed = self.failed or error  # also when forward swallows it
        raise error

    def where(self) -> str | None:
        """The user's line that is running: ``model.py:41``."""
        frame: FrameType | None = sys._getframe(1)
        found = None
        while frame is not None:
            if frames.ours(frame) and frame.f_code.co_name == "trace":
                break  # the caller of ``trace`` is not the model
            if frames.users(frame):
                if found is None:
                    self._custom_function(frame)
                    found = frames.line(frame.f_code, frame.f_lineno)
                self.reading.ran(frame)
            frame = frame.f_back
        return found

    def _custom_function(self, frame: FrameType) -> None:
        if frame.f_code.co_name != "forward" or not frame.f_code.co_varnames:
            return
        first = frame.f_locals.get(frame.f_code.co_varnames[0])
        if isinstance(first, torch._C._FunctionBase) and self.failed is None:
            self.failed = refusal(
                "a torch.autograd.Function that is no global name where it is applied",
                frames.line(frame.f_code, frame.f_lineno), self.stack[-1],
            )  # fmt: skip
            self.failed.inside = tuple(candidates(frame))
            raise self.failed
