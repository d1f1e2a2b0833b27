"""What ``optimize`` returns: the user's module, run by graphs."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from reprlib import recursive_repr
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

from recast.errors import UsageError
from recast.rewriter import memory
from recast.rewriter.capture import distributions
from recast.rewriter.capture.constants import Constants, constants
from recast.rewriter.capture.opaque_calls import why_not_recorded
from recast.rewriter.capture.proof import elsewhere, prove
from recast.rewriter.capture.result_class import INHERITED, result_class
from recast.rewriter.ir import Graph
from recast.rewriter.rule import resolve

from . import forms
from .copies import modules_by_path
from .gives_way import gives_way
from .runner import Runner

if TYPE_CHECKING:
    from recast.rewriter.capture.capture_model import Captured
    from recast.rewriter.report.report import Report

_OWN = {
    "report",
    "plan",
    "_root",
    "_runner",
    "_parts",
    "_forms",
    "_captured",
    "_name",
    "_refusal",
    "_ragged",
    "_looked_up",
    "_replays",
    "_places",
    "_dense",
}
_SLOTS = tuple(k for k in vars(nn.Module()) if k != "training")  # what nn.Module keeps of its own


class Compiled(nn.Module):
    """The same model, rewritten: same parameters, names, flags and methods; a different forward.

    It shares the parameter, buffer, submodule and hook dicts of a shallow copy of the user's module
    tree, so ``state_dict``, ``to``, ``train``, ``load_state_dict`` and ``apply`` work as they do
    there. Anything else, such as the user's own attributes and methods, is looked up on that copy.

    Attributes:
        report: what was rewritten, and what was not and why.
        plan: where every table lives.
        forms: the results for further forms of call (``optimize(forms=)``), over the same modules.
            A call of this one runs them as needed.
        graph: the ``fx.Graph`` for the current mode. This and ``graphs``, ``code``, ``parts``
            and ``forms`` are the user's where the model has an attribute of that name.
    """

    report: Report

    def __init__(
        self, captured: Captured, graphs: dict[str, Graph] | None = None, report: Any = None,
        plan: Any = None,
    ) -> None:  # fmt: skip
        training = captured.root.training
        vars(self)["_root"] = captured.root
        super().__init__()
        captured.root.training = training
        self._share()
        own = vars(self)
        own["_name"], own["report"], own["plan"] = captured.name, report, plan
        own["_parts"], own["_forms"] = self._adopt(captured), ()
        graphs = captured.graphs if graphs is None else graphs
        own["_runner"] = Runner(
            captured.name, captured.root, captured.signature, graphs, captured.traced
        )
        own["_captured"], own["_refusal"] = captured, None
        own["_ragged"] = own["_looked_up"] = None
        own["_replays"] = own["_places"] = own["_dense"] = None
        devices = {p.device for p in captured.root.parameters()}
        made = vars(captured.root).get(Constants.ATTRIBUTE)
        if made is not None and len(devices) == 1 and next(iter(devices)).type == "cuda":
            made.place(*devices)
        self._runner.build()
        object.__setattr__(self, "__class__", result_class(Compiled, captured.root))

    def _share(self) -> None:
        """Use the same dicts as the root, so that the two cannot diverge."""
        for slot in _SLOTS:
            if slot in vars(self._root):
                vars(self)[slot] = vars(self._root)[slot]
        # A method that was replaced on the object hides that of its class here too.
        vars(self).update({k: v for k, v in vars(self._root).items() if k in INHERITED})

    def _adopt(self, captured: Captured) -> dict[str, Compiled]:
        """Run captured parts from inside their modules, which stay in the tree.

        Such a module keeps its class, its place, its hooks and its sharing; only its ``forward`` is
        ours.
        """
        parts: dict[str, Compiled] = {}
        for path, part in captured.parts.items():
            here = captured.root.get_submodule(path)
            child = here if isinstance(here, Compiled) else Compiled(part)
            if isinstance(here, Compiled):
                captured.root.set_submodule(path, child._root)
            child.take_over()
            parts[path] = child
        return parts

    # ------------------------------------------------------------ running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._refusal is not None:
            raise self._refusal
        if type(args) is not tuple:
            raise _not_for(
                "torch.fx.symbolic_trace",
                "its forward takes *args, for all of which a trace has one proxy",
                "result.graph, which is an fx graph already",
            )
        compiling = self._dense is not None and torch.compiler.is_compiling()
        if compiling:  # told with fullgraph=True
            torch._dynamo.graph_break(msg="ranks talk to each other outside of compiled parts")
        form = self._form_of(args, kwargs) if self._forms else 0
        runner = self._forms[form - 1]._runner if form else self._runner
        if self._replays is not None:
            return self._replays(runner, args, kwargs)
        if self._dense is not None:
            run = runner.compiled if compiling else runner.__call__
            return self._dense(run, args, kwargs, form)
        return runner(args, kwargs)

    def _form_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """0 if the graphs of the example run this call, else the number of a further form."""
        index_of = forms.index_of if self._dense is None else forms.index_apart
        return index_of([one._runner for one in (self, *self._forms)], args, kwargs)

    def _running_form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
        """The result whose graphs run this call: this one, or that of a further form."""
        return (self, *self._forms)[self._form_of(args, kwargs)] if self._forms else self

    def _add_forms(self, further: Sequence[Compiled]) -> None:
        """Let ``further``, results over the same root, run the calls that they take."""
        vars(self)["_forms"] = tuple(further)

    def _with_graphs(self) -> list[Compiled]:
        """This, its further forms, and the captured parts of each: all that have graphs."""
        parts = [part for one in (self, *self._forms) for part in one._parts.values()]
        return [self, *self._forms, *parts]

    def __prepare_scriptable__(self) -> NoReturn:
        """Torch's own name: ``torch.jit.script`` asks for it."""
        raise _not_for(
            "torch.jit.script",
            "TorchScript compiles the source of forward, which is not what runs here",
            "torch.export.export(result, batch)",
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients of replicated parameters add up and are not reduced: use it for all but
        the last ``backward()`` of an accumulation. Like the method of ``DistributedDataParallel``;
        on one rank it does nothing.
        """
        return nullcontext() if self._dense is None else self._dense.no_sync()

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Torch's own name: a DistributedDataParallel around this model asks for it, and is refused
        on several ranks. Other code, such as one that lists all attributes, gets an answer.
        """
        if self._dense is None:
            raise AttributeError("not of this: of the user's module, if at all")
        asks = sys._getframe(1).f_globals.get("__name__")
        if asks == DistributedDataParallel.__module__:
            raise self._dense.refused()
        return [*dict(self.named_parameters()), *dict(self.named_buffers())]

    def spread(self) -> None:
        """From now on the graphs are for several ranks: either they run, or nothing does."""
        vars(self)["_captured"] = None  # its graphs are for whole tables
        self._runner.spread = True
        self._runner.build()

    def take_over(self) -> None:
        """Make calls of the root itself run this; it keeps its class, its place and its hooks."""
        vars(self._root)["forward"] = self.forward

    def refuse(self, error: Exception) -> None:
        """Make every call raise ``error``; the model can still be read and saved."""
        vars(self)["_refusal"] = error

    def ragged_inputs(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """The tensors of this batch to which ids may be appended without effect, since they are cut
        by offsets with an end. There are none if the plain forward would run.
        """
        one = self._running_form(args, kwargs)
        signature = one._runner.signature
        # What decides which graph runs must not change with the number of ids.
        fixed = [] if signature is None else [k for k, _ in signature.fixed]
        return one._read_so(one._ragged, fixed, args, kwargs)

    def looked_up_inputs(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """The tensors of this batch that are used only as ids and offsets of lookups, which may be
        int32 or int64. There are none if the plain forward would run, or forward reads dtypes.
        """
        one = self._running_form(args, kwargs)
        signature = one._runner.signature
        if signature is None or signature.strict_dtypes:
            return []
        return one._read_so(one._looked_up, [], args, kwargs)

    def _read_so(
        self, ask: Any, fixed: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        """What ``ask`` returns for the graph of this call, without what guards read or what is
        ``fixed``.
        """
        covered = None if ask is None else self._runner.covered(args, kwargs)
        if covered is None:
            return []
        mode, leaves = covered
        told = {id(leaves[k]) for k in (*fixed, *self._runner.asked(mode))}
        found = ask(self._runner.graphs[mode], self._root, leaves)
        return [t for t in found if id(t) not in told]

    def why_stale(self) -> str | None:
        """Why a graph no longer matches the modules, or None."""
        if not self._runner.built:
            self._runner.build()
        why = self._runner.why_stale()
        if why is not None or not (self._parts or self._forms):
            return why
        others = (*self._forms, *self._parts.values())
        return next(filter(None, (one.why_stale() for one in others)), None)

    def uncaptured_modules(self) -> list[nn.Module]:
        """The modules whose own forward runs, as no graph covers it: nobody knows what it reads."""
        if not self._runner.built:
            self._runner.build()
        if self._runner.cases:
            return []
        modules = modules_by_path(self._root)
        own = [m for p, m in modules.items() if not any(_is_in(p, part) for part in self._parts)]
        return [*own, *(m for part in self._parts.values() for m in part.uncaptured_modules())]

    def why_not_recordable(self) -> str | None:
        """Why calls may not be recorded and replayed, or None."""
        others = (*self._forms, *self._parts.values())
        of_others = filter(None, (one.why_not_recordable() for one in others))
        if any(traced.argument_writes for traced in self._runner.traced.values()):
            return "forward writes into a dict that it is given, and a replay would not"
        if any(traced.entries for traced in self._runner.traced.values()):
            return "forward writes into a dict that the model holds, and a replay would not"
        if any(traced.stores_numbers for traced in self._runner.traced.values()):
            return "forward counts in Python, and a replay would not"
        if any(traced.numbers for traced in self._runner.traced.values()):
            return "forward reads numbers that vary, and a replay would not"
        graphs = self._runner.graphs.values()
        own = why_not_recorded(graphs) or distributions.why_not_recorded(graphs)
        return own or next(of_others, None)

    @property
    def training(self) -> bool:
        return self._root.training

    @training.setter
    def training(self, mode: bool) -> None:
        self._root.training = mode

    @gives_way
    def graph(self) -> Graph:
        """The graph for the current mode; an empty one when the model is not captured whole."""
        graphs = self._runner.graphs
        chosen = graphs.get("both") or graphs.get("train" if self.training else "eval")
        return chosen if chosen is not None else fx.Graph()

    @gives_way
    def graphs(self) -> dict[str, Graph]:
        """All graphs, by mode."""
        return self._graphs

    @gives_way
    def code(self) -> str:
        """The generated Python source."""
        return self._runner.source()

    @gives_way
    def parts(self) -> dict[str, Compiled]:
        """Compiled submodules, by path, of a model that is not captured whole."""
        return dict(self._parts)

    @gives_way
    def forms(self) -> tuple[Compiled, ...]:
        """The results for further forms of call, as they were asked for."""
        return self._forms

    @property
    def _graphs(self) -> dict[str, Graph]:
        """The same as :attr:`graphs`, whatever the user's model has under that name."""
        return dict(self._runner.graphs)

    def prove(self) -> str | None:
        """Why the rewritten graphs differ from the model on the example batches, or None. Strides
        that a rewrite changed are restored.
        """
        captured: Captured | None = self._captured
        if captured is None or captured.batches is None or captured.signature is None:
            return None
        try:
            why, changed = prove(
                captured.root, captured.traced, self._runner.graphs, captured.signature,
                *captured.batches,
            )  # fmt: skip
            why = why or elsewhere(
                captured.root, captured.traced, captured.signature, captured.batches[0],
                captured.terms.varying_in(captured.prefix), self._runner.graphs,
            )  # fmt: skip
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the plain forward took the same batches when it was captured
            return f"it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if changed:
            self._runner.build()
        return why

    def full_state_dict(
        self, *, ranks: Literal[0, "all"] = 0, device: torch.device | str | None = None
    ) -> dict[str, Any]:
        """``state_dict()`` with whole tables, for the plain model. Every rank calls it.

        Args:
            ranks: which ranks get the tables: 0 (the others get only the other entries) or "all".
            device: that of the whole tables; None is where the shards are.
        """
        state: dict[str, Any] = self.state_dict()
        if self._places is None:
            return state
        found: dict[str, Any] = self._places.full(state, ranks=ranks, device=device)
        return found

    # ------------------------------------------------------------ being the user's module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            root = vars(self).get("_root")
            if root is None:
                raise
            found = getattr(root, name)
            method = isinstance(found, MethodType) and found.__self__ is root
            if method and "forward" not in vars(root) and self._runner.graphs:
                self.take_over()  # one of the user's methods calls the model as self(...)
            return found

    def get_submodule(self, target: str) -> nn.Module:
        """The user's module at ``target``, even if it is named as an attribute of ours."""
        return self._root.get_submodule(target) if target else self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":  # wrapped by a trainer: calls go through its wrapper
            vars(self)["forward"] = value
        elif name in _OWN:  # even if a module of the user has this name
            vars(self)[name] = value
        elif name in _SLOTS or name in ("training", "__class__", "__dict__"):
            # fully_shard sets a new class, and torch.export, where modules are shared, a dict
            super().__setattr__(name, value)
        elif name in INHERITED:  # the root keeps it for copies
            vars(self)[name] = vars(self._root)[name] = value
        else:
            setattr(self._root, name, value)

    def __delattr__(self, name: str) -> None:
        if name in INHERITED:
            vars(self._root).pop(name, None)
        try:
            super().__delattr__(name)
        except AttributeError:
            delattr(self._root, name)

    def _apply(self, fn: Any, recurse: bool = True) -> Compiled:
        try:
            type(self._root)._apply(self._root, fn, recurse)  # the user's own, if there is one
        except torch.OutOfMemoryError as error:
            memory.explain(error, self._root)
            raise
        for one in (self, *self._parts.values()):
            constants(one._root).apply(lambda held: _moved(held, fn))
        for one in self._with_graphs():
            one._apply_rest(fn)
        return self

    def _apply_rest(self, fn: Any) -> None:
        """Move the plain tensors that the graphs read: ``nn.Module`` does not know them."""
        graphs = list(self._runner.graphs.values())
        paths = {str(n.target) for g in graphs for n in g.nodes if n.op == "get_attr"}
        for path in sorted(paths):
            owner, _, name = path.rpartition(".")
            if owner.startswith(Constants.ATTRIBUTE):
                continue
            module = resolve(self._root, owner) if owner else self._root
            value = vars(module).get(name) if isinstance(module, nn.Module) else None
            if isinstance(value, torch.Tensor):
                vars(module)[name] = _moved(value, fn)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._root._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._root._load_from_state_dict(*args, **kwargs)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._root)})

    def _get_name(self) -> str:
        return f"Compiled({vars(self).get('_name', '')})"

    @recursive_repr()  # torch's EmbeddingBag shows all that it holds, our forward too
    def __repr__(self) -> str:
        return super().__repr__()

    def __str__(self) -> str:
        from recast.rewriter.report import dump

        if not self._runner.graphs:
            return super().__repr__()
        return dump.text(type(self).graph.ours(self), self._root, self._name)

    # ------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        return {
            "root": self._root, "runner": self._runner, "parts": self._parts, "name": self._name,
            "forms": self._forms,
            "report": self.report, "plan": self.plan, "refusal": self._refusal,
            "ragged": self._ragged, "looked_up": self._looked_up, "replays": self._replays,
            "places": self._places, "dense": self._dense, "forward": vars(self).get("forward"),
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = vars(self)
        own["_root"], own["_runner"], own["_parts"] = state["root"], state["runner"], state["parts"]
        own["_forms"] = state["forms"]
        own["_name"], own["report"], own["plan"] = state["name"], state["report"], state["plan"]
        own["_captured"], own["_refusal"] = None, state["refusal"]
        own["_ragged"], own["_looked_up"] = state["ragged"], state["looked_up"]
        own["_replays"], own["_places"] = state["replays"], state["places"]
        own["_dense"] = state["dense"]
        if state["forward"] is not None:
            own["forward"] = state["forward"]
        if "_modules" in vars(self._root):  # else a part, inside its own root: the whole does it
            for one in self._with_graphs():
                one._share()
        if self._places is not None:
            self._places.renew(self._root)
        object.__setattr__(self, "__class__", result_class(Compiled, self._root))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (), self.__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        new = Compiled.__new__(Compiled)
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return new


def _not_for(function: str, why: str, instead: str) -> UsageError:
    return UsageError(
        f"{function} cannot take what optimize returned",
        why=why,
        tries=(f"{function}(model), the plain model: it has the same parameters", instead),
    )


def _is_in(path: str, part: str) -> bool:
    return path == part or path.startswith(f"{part}.")


def _blank() -> Compiled:
    """An empty object for ``__setstate__``, which sets its class."""
    return Compiled.__new__(Compiled)


def _moved(value: Any, fn: Any) -> Any:
    if isinstance(value, nn.Parameter):
        value.data = fn(value.data)  # the same object, wherever else it is kept
        return value
    return fn(value) if isinstance(value, torch.Tensor) else value
