"""Find the first node whose value differs: two graphs, or two module trees, run side by side.

The captured graph runs over the plain model, the rewritten one over the optimised model. Nodes
correspond by name, or by their position in the arguments of corresponding nodes; a node that a rule
wrote inside a fused region has no counterpart, and is compared with every captured node of the same
origin. Forward values come first; if they agree, gradients, from the outputs backwards; if these
agree too, the same again after one and two optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from recast.rewriter.capture.capture_model import Captured, capture
from recast.rewriter.compiled.module import Compiled
from recast.rewriter.compiled.signature import Signature
from recast.rewriter.ir import Graph, note

from . import model_runs, watch
from .judge import Row
from .model_runs import Loss, MakeOptimizer
from .side_by_side import Divergence, Graphs, Modules


def first(
    plain: nn.Module,
    fast: nn.Module,
    batches: list[tuple[Any, ...]],
    rows: list[Row],
    *,
    seed: int,
    loss: Loss | None,
    make: Callable[[nn.Module], MakeOptimizer],
    rtol: float,
    shorter: tuple[Any, ...] | None = None,
) -> Divergence | None:
    """The first node that differs, in the mode and for the batch of the failing rows. ``shorter``:
    a batch after the others, which no step is taken with and whose loss is not ``loss``.
    """
    again = None
    if isinstance(fast, Compiled) and fast._graphs and fast._captured is None:
        again = capture(plain, _example(batches))
    search = _Search(plain, fast, batches, seed, loss, make, rtol, again, shorter)
    with model_runs.undisturbed(plain, fast) as restore:
        for training, batch, steps in _attempts(rows, batches):
            found = search.at(training, batch, steps, restore)
            if found:
                return found
    bad = [r for r in rows if not r.ok]
    held = next((r for r in bad if r.group == "buffers"), bad[0])
    if held.group in ("outputs", "gradients") or held.when.startswith("eval mode"):
        return None
    name = held.tensor.partition(" [")[0]
    if held.group == "buffers":
        return _reader(fast, name, "forward", f"it leaves another value in {name}")
    what = f"the gradients agree and {name} after an optimizer step does not"
    return _reader(fast, name, "update", what)


def _example(batches: list[tuple[Any, ...]]) -> Any:
    """The example for a capture: the first of ``batches``, and one of another form if any."""

    def shapes(batch: tuple[Any, ...]) -> dict[str, Any]:
        return {
            path: getattr(leaf, "shape", None) for path, leaf in model_runs.leaves(batch).items()
        }

    first, *others = batches
    other = next((batch for batch in others if shapes(batch) != shapes(first)), None)
    return first if other is None else [first, other]


def _reader(fast: nn.Module, name: str, side: str, what: str) -> Divergence:
    """The node, or the module, that reads the parameter or buffer ``name``."""
    owner = name.rpartition(".")[0] or name
    graphs = graphs_of(fast, True)
    for n in graphs[1].nodes if graphs else ():
        if (n.op == "get_attr" and n.target == name) or (n.op, n.target) == ("call_module", owner):
            node = next(iter(n.users), n) if n.op == "get_attr" else n
            held = note(node)
            origin = (owner,) if owner in held.origin else held.origin
            return Divergence(node.name, origin, held.where, held.rule, side, "train mode", what)
    return Divergence(owner, (owner,), None, None, side, "train mode", what)


def _attempts(rows: list[Row], batches: list[tuple[Any, ...]]) -> Iterator[tuple[bool, int, int]]:
    """(training, batch, steps taken before) worth looking at, most telling first."""
    tried = set()
    for group in ("outputs", "gradients", "buffers"):
        for r in rows:
            if r.ok or r.group != group or r.when.startswith("after"):
                continue
            batch = int(r.when.rpartition(" ")[2]) - 1 if "batch" in r.when else 0
            key = (r.when.startswith("train"), batch, 0)
            if key not in tried:
                tried.add(key)
                yield key
    for steps in (1, 2):
        yield True, steps % len(batches), steps


@dataclass
class _Search:
    plain: nn.Module
    fast: nn.Module
    batches: list[tuple[Any, ...]]
    seed: int
    loss: Loss | None
    make: Callable[[nn.Module], MakeOptimizer]
    rtol: float
    again: Captured | None = None
    shorter: tuple[Any, ...] | None = None

    def at(
        self, training: bool, batch: int, steps: int, restore: Callable[[], None]
    ) -> Divergence | None:
        """Run both sides in one state and compare them, graph by graph or module by module."""
        mode = "train mode" if training else "eval mode"
        mode = f"{mode}, step {steps + 1}" if steps else mode
        given = batch < len(self.batches)
        args = self.batches[batch] if given or self.shorter is None else self.shorter
        loss, seed = self.loss if given else None, self.seed + batch + steps

        def prepared(model: nn.Module) -> nn.Module:
            restore()
            if steps:
                model_runs.train(
                    model, self.batches, steps=steps, seed=self.seed, loss=self.loss,
                    make=self.make(model),
                )  # fmt: skip
            return model

        how: Any = {"training": training, "seed": seed}

        def graphs_part(fast: nn.Module, path: str, args: tuple[Any, ...]) -> Divergence | None:
            """Where the graphs of ``fast``, the submodule at ``path`` or the whole, part."""
            graphs = graphs_of(fast, training, None if path else again)
            if graphs is None:
                return None
            before, after, lender, signature = graphs
            root = fast._root if isinstance(fast, Compiled) else fast
            plain = prepared(self.plain).get_submodule(path)
            with watch.constants_of(lender, plain) as model:
                want = watch.graph(before, model, _inputs(args, signature), **how)
            prepared(self.fast).train(training)
            got = watch.graph(after, root, _inputs(args, signature), **how)
            restore()
            return Graphs(before, after, want, got, self.rtol, mode).search()

        ran = self.fast._running_form(args, {}) if isinstance(self.fast, Compiled) else self.fast
        again = self.again
        if again is not None and ran is not self.fast:
            again = capture(self.plain, args)  # of a further form
        if graphs_of(ran, training, again) is not None:
            return graphs_part(ran, "", args)
        parts: dict[str, nn.Module] = getattr(self.fast, "parts", {})
        how_modules = how | {"loss": loss, "skip": tuple(f"{path}." for path in parts)}
        want = watch.modules(prepared(self.plain), args, **how_modules)
        got = watch.modules(prepared(self.fast), args, **how_modules)
        restore()
        found = Modules(want, got, self.rtol, mode).search()
        path = next((p for p in parts if found and f"{found.node}.".startswith(f"{p}.")), None)
        if path is None or path not in want.inputs:
            return found
        return graphs_part(parts[path], path, want.inputs[path]) or found


def graphs_of(
    fast: nn.Module, training: bool, again: Captured | None = None
) -> tuple[Graph, Graph, nn.Module, Any] | None:
    """The captured and the rewritten graph of this mode, the captured root and signature. None for
    a module that was not captured whole. ``again``: a fresh capture, for a copy of such a result,
    which no longer has its own.
    """
    captured = getattr(fast, "_captured", None) or again
    if not isinstance(fast, Compiled) or captured is None:
        return None
    mode = "train" if training else "eval"
    before, after = (g.get(mode, g.get("both")) for g in (captured.graphs, fast._graphs))
    if before is None or after is None:
        return None
    return before, after, captured.root, captured.signature


def _inputs(args: tuple[Any, ...], signature: Signature) -> list[Any]:
    """One entry per placeholder: copies of the tensors of the flattened arguments."""
    leaves, _ = signature.leaves(signature.bind(args, {}))
    return [
        t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t
        for t in leaves
    ]
