"""Averages the gradients of replicated parameters, with torch's own ``DistributedDataParallel``.

A hidden DDP wraps the call. It has the dense parameters (and tables that are on every rank) but not
the sharded ones, and starts its bucketed all-reduces during the backward pass. Parameters that
cannot reach an output of the graph are left out: they get no gradient on any rank, as in one
process.

DDP would wait for its all-reduces in C++, where a failure cannot say which rank is missing. So they
are issued by a communication hook (``dense_buckets``), which waits for them at the end of the
backward pass, before DDP does; then the rank that died or hangs can be named.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from recast.errors import RankError, RecastWarning, UsageError
from recast.runtime.ranks import (
    call_mode,
    collectives,
    failed_calls,
    faults_agree,
    shards,
    step_record,
)
from recast.runtime.ranks.dense_buckets import Telling, reduced, sort_buckets

_TRIES = (
    "the result of optimize(...) itself, which averages dense gradients",
    "optimize(..., world_size=1), and that wrapper around its result",
)


_HERE = threading.local()  # ranks that are threads have their own


def check_step(optimizer: Optimizer) -> None:
    """Raise UsageError if ``optimizer`` would use gradients that are not averaged yet."""
    inside = torch._C._current_graph_task_id() != -1  # of a backward pass, at whose end they are
    waiting = [one for one in _live() if one.unreached or inside]
    if waiting:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for one in waiting:
            if inside:
                one.check_outside(stepped)
            one.check_reduced(stepped)


def _live() -> WeakSet[DenseReduce]:
    if not hasattr(_HERE, "live"):
        _HERE.live = WeakSet()
    live: WeakSet[DenseReduce] = _HERE.live
    return live


class _Call(nn.Module):
    """A call as a module that DistributedDataParallel can wrap."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        for k, parameter in enumerate(parameters):
            self.register_parameter(f"p{k}", parameter)

    def forward(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return call(args, kwargs)


class DenseReduce:
    """Averages the gradients of the parameters ``names`` of ``root`` over ranks; its parameters
    ``tables`` are this rank's parts of tables. ``flagged``: the modules whose ``training`` flags
    make train and eval mode differ. ``stored``: the attributes that a call writes. ``several``:
    there are calls of several forms.
    """

    def __init__(
        self, root: nn.Module, names: Iterable[str], tables: Iterable[str], flagged: Iterable[str],
        *, stored: Iterable[str] = (), several: bool = False,
    ) -> None:  # fmt: skip
        self.root, self.names, self.tables = root, tuple(names), tuple(tables)
        self.flagged, self.stored, self.several = tuple(flagged), tuple(stored), several
        known = {*self.names, *self.tables}
        self.others = tuple(name for name, _ in root.named_parameters() if name not in known)
        self.table_places: list[tuple[Any, str, nn.Parameter]] | None = None
        self.made: tuple[Any, DistributedDataParallel | None] | None = None
        self.reduced_pass: list[int] = []  # which reduced everything, until another one begins
        self.accumulators: dict[str, Any] = {}  # the accumulation nodes of the reduced parameters
        self.apart: dict[str, Any] = {}  # and of the others
        self.warned = False  # about torch.autograd.grad: once
        self.checked_pass = -1  # the last pass that was checked
        self.unreached: set[str] = set()  # parameters that the averaging still waits for
        self.steps = step_record.StepRecord()
        self.agreed_frozen: str | None = None  # what all ranks have frozen, if no table is sharded
        self.telling: list[Telling] = []  # what goes with the next reduced gradients
        _live().add(self)

    @partial(_disable_dynamo, recursive=False)  # its callees may be compiled; hooks, waits not
    def __call__(self, call: Callable[..., Any], args: Any, kwargs: Any, form: int = 0) -> Any:
        """``call(args, kwargs)``; its backward pass averages gradients. ``form``: 0, or the number
        of a further form, the same on all ranks.
        """
        self._check_alone()
        if self.flagged:
            flags = map(self.root.get_submodule, self.flagged)
            call_mode.set_from(flags, self.root.training, form)
        else:
            call_mode.clear(form)
        if not self.tables and not self.flagged:
            return self._run(call, args, kwargs, None)
        if not self.tables:
            with call_mode.deferred_exchange() as modes:
                return self._run(call, args, kwargs, modes)
        failed_calls.begin()
        try:
            if self.several:  # the messages of another form are of another size
                call_mode.ModeExchange().run()
            return self._run(call, args, kwargs, None)
        except RankError:
            raise  # it names the rank that left
        except Exception as error:
            failed_calls.record(error)
            raise

    def _run(
        self, call: Callable[..., Any], args: Any, kwargs: Any, modes: call_mode.ModeExchange | None
    ) -> Any:
        wrapped = self._wrapped()
        self._agree_on_frozen(wrapped)
        self._tell_steps(wrapped)
        if wrapped is None:
            result = call(args, kwargs)
            for tensor in _computed(result) if self.apart else ():
                tensor.grad_fn.register_prehook(lambda _: self._check_pass())  # type: ignore[union-attr]
            return result
        if not torch.is_grad_enabled():
            return wrapped(call, args, kwargs)
        self._begin(wrapped)
        given = {id(t) for t in _computed((args, kwargs))}
        result = wrapped(call, args, kwargs)
        if wrapped.require_backward_grad_sync:
            # A forward may store results in a dict that it was passed, or in the model.
            put = [t for t in _computed((args, kwargs)) if id(t) not in given]
            put += _computed([self._held(path) for path in self.stored])
            self._average_backward_passes(wrapped, [*_computed(result), *put], modes)
        return result

    def _held(self, path: str) -> object:
        """What the attribute at ``path`` is."""
        owner, _, name = path.rpartition(".")
        return getattr(self.root.get_submodule(owner), name, None)

    @_disable_dynamo
    def _agree_on_frozen(self, wrapped: DistributedDataParallel | None) -> None:
        """Raise UsageError, on every rank, unless all train the same dense parameters: of a rank
        with other buckets of gradients, gloo ends the process. With tables it travels with the ids.
        """
        if self.tables or wrapped is None or not torch.is_grad_enabled():
            return
        if self.agreed_frozen != self.steps.frozen:
            facts = {"frozen parameters": self.steps.frozen}
            faults_agree.agree_for_good(facts, tries="requires_grad_() alike on every rank")
            self.agreed_frozen = self.steps.frozen

    @_disable_dynamo
    def _tell_steps(self, wrapped: DistributedDataParallel | None) -> None:
        """What this rank has stepped goes with the ids of this call, or with its gradients."""
        averaged = wrapped is None or wrapped.require_backward_grad_sync
        if torch.is_grad_enabled():
            self.steps.averaged = averaged
        if self.tables:
            told = self.steps.begin(averaged)
            step_record.set_from(told)
            self.steps.sent(told)
        elif wrapped is not None and averaged and torch.is_grad_enabled():
            self.telling[:] = [(self.steps, self.steps.begin(averaged))]

    @_disable_dynamo
    def _begin(self, wrapped: DistributedDataParallel) -> None:
        """Begin a forward pass. Raises UsageError if the backward pass before it is unfinished."""
        sort_buckets(wrapped, self._unfinished)
        self.unreached = set()

    def _average_backward_passes(
        self, wrapped: DistributedDataParallel, outputs: list[Tensor],
        modes: call_mode.ModeExchange | None,
    ) -> None:  # fmt: skip
        """Let every backward pass through ``outputs`` average: also a second one
        (``retain_graph=True``), one through another output, and one through an earlier call's.

        DistributedDataParallel reduces only once after each forward pass: the gradients of a second
        backward pass would be this rank's own.
        """
        reduced_pass = self.reduced_pass
        reduced_pass.clear()

        def before(_: Any) -> None:
            if modes is not None:
                modes.run()
            self._check_pass()
            if reduced_pass and reduced_pass[0] != torch._C._current_graph_task_id():
                reduced_pass.clear()
                sort_buckets(
                    wrapped, self._unfinished
                )  # those of the pass before, while its order is known
                wrapped.reducer.prepare_for_backward([])

        for tensor in outputs:
            assert tensor.grad_fn is not None
            tensor.grad_fn.register_prehook(before)

    def _check_pass(self) -> None:
        """Check a backward pass as it begins. Warn if it returns gradients of parameters instead of
        accumulating them (``torch.autograd.grad``), as nothing averages those. Remember parameters
        that no pass has reached yet; meanwhile, raise UsageError if another is reached again.
        """
        task = torch._C._current_graph_task_id()
        if task == self.checked_pass:
            return  # the same pass, through another output
        self.checked_pass = task
        reached, astray = [], []
        for name, leaf in (*self.accumulators.items(), *self.apart.items()):
            try:
                comes = torch._C._will_engine_execute_node(leaf)
                if name in self.accumulators:
                    reached.append(comes)
                elif comes:
                    astray.append(name)
            except RuntimeError:  # torch raises it for a leaf passed to torch.autograd.grad
                if not self.warned:
                    warnings.warn(
                        "torch.autograd.grad of parameters, in a model that is spread over ranks,"
                        " gives the gradients of this rank's own batch; backward() gives those of"
                        " all ranks. Average them with torch.distributed.all_reduce before they are"
                        " used",
                        RecastWarning,
                        stacklevel=2,
                    )
                self.warned = True
                return
        if astray:
            raise _apart(astray)
        if any(reached):
            missing = {n for n, ran in zip(self.accumulators, reached, strict=True) if not ran}
            if self.unreached and len(missing | self.unreached) < len(self.accumulators):
                raise self._unfinished()  # some are reached a second time
            self.unreached = missing & self.unreached if self.unreached else missing

    def check_reduced(self, stepped: set[int]) -> None:
        """Raise UsageError if backward passes since the last forward missed some parameters, and
        any of ours is to be ``stepped`` (``id()``s of parameters).
        """
        names = self.accumulators if self.unreached else ()
        if any(id(self.root.get_parameter(name)) in stepped for name in names):
            raise self._unfinished()

    def finish(self) -> None:
        """Average gradients where backward passes missed some parameters, which get zeros."""
        missed = [self.root.get_parameter(name) for name in sorted(self.unreached)]
        if missed:
            views = [p.view_as(p) for p in missed]
            torch.autograd.backward(views, [torch.zeros_like(p) for p in missed])
            self.unreached = set()

    def check_outside(self, stepped: set[int]) -> None:
        """Raise UsageError, inside of a backward pass, if any dense parameter is to be ``stepped``
        (``id()``s of parameters).
        """
        for name in self.accumulators:
            if id(self.root.get_parameter(name)) in stepped:
                raise UsageError(
                    f"{name} would be stepped inside of the backward pass",
                    why="the model is spread over ranks, and the gradients of its dense parameters"
                    " are averaged at the end of that pass",
                    tries=("optimizer.step() after backward(); tables may be stepped inside",),
                )

    def _unfinished(self) -> UsageError:
        if not self.unreached:
            return UsageError(
                "the backward pass before this call did not come to its end",
                why="an error stopped it before the gradients of dense parameters were averaged",
                tries=("let that error end the process: it ends the others, by its name",),
            )
        some = sorted(self.unreached)
        more = f" and {len(some) - 3} more" if len(some) > 3 else ""
        return UsageError(
            f"no backward pass came to {', '.join(some[:3])}{more}",
            why="the model is spread over ranks, and the gradients of its dense parameters are"
            " averaged together: the others' are still this rank's own",
            tries=(
                "a loss of all outputs, those that count for nothing times 0",
                "requires_grad_(False) of what a step does not train, on every rank",
            ),
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside it, gradients accumulate on each rank and nothing is sent."""
        wrapped = self._wrapped()
        return nullcontext() if wrapped is None else wrapped.no_sync()

    @_disable_dynamo
    def _wrapped(self) -> DistributedDataParallel | None:
        """The DDP wrapper; made again if parameters were replaced, cast, frozen or unfrozen, which
        must happen on all ranks alike.
        """
        held = [self.root.get_parameter(name) for name in self.names]
        others = [self.root.get_parameter(name) for name in self.others]
        # Its buckets have the dtype and device that parameters have when it is made.
        key = tuple((id(p), p.requires_grad, p.dtype, p.device) for p in (*held, *others))
        if self.made is None or self.made[0] != key:
            trained = [p for p in held if p.requires_grad]
            wrapped = None
            if trained:
                # It sees no buffers, so it never broadcasts any. Its memory must allow training,
                # even if the first call is in inference mode.
                with torch.inference_mode(False):
                    wrapped = DistributedDataParallel(_Call(trained), init_sync=False)
                share = 1.0 / dist.get_world_size()
                reduced_pass, telling = self.reduced_pass, self.telling
                # A lambda, as torch checks the hook's annotations, and ours are strings.
                wrapped.register_comm_hook(
                    share, lambda share, bucket: reduced(share, reduced_pass, telling, bucket)
                )
            self.made = key, wrapped
            tables = [self.root.get_parameter(name) for name in self.tables]
            self.steps.set_parameters(dict(zip(self.names, held, strict=True)), tables)
            self.accumulators = _accumulators(zip(self.names, held, strict=True))
            self.apart = _accumulators(zip(self.others, others, strict=True))
        return self.made[1]

    @staticmethod
    def refused() -> UsageError:
        """The error for a model that is wrapped in DistributedDataParallel."""
        return UsageError(
            "DistributedDataParallel around a model that is spread over ranks already",
            why="it gives all ranks the parts of tables of the first, and averages twice",
            tries=_TRIES,
        )

    def _check_alone(self) -> None:
        """Raise UsageError inside a torch wrapper that handles parameters itself (DDP, FSDP)."""
        around = DistributedDataParallel._active_ddp_module
        if around is not None and not isinstance(around.module, _Call):
            raise self.refused()
        places = self.table_places
        if places is None or any(held.get(key) is not p for held, key, p in places):
            self.table_places = self._found()

    def _found(self) -> list[tuple[Any, str, nn.Parameter]]:
        """Where the module keeps each table. Raises UsageError if one has been replaced by
        something that is not this rank's part: ids would still be sent to their owners.
        """
        found = []
        for name in self.tables:
            owner, _, key = name.rpartition(".")
            held = self.root.get_submodule(owner)._parameters
            now = held.get(key)
            if now is None or shards.of(now) is None:
                raise UsageError(
                    f"{name} has been exchanged for what is not this rank's part of the table",
                    why="the model is spread over ranks already; fully_shard and"
                    " FullyShardedDataParallel take it for a copy that all ranks have, and a"
                    " conversion that makes new Parameters forgets which part it is",
                    tries=_TRIES,
                )
            found.append((held, key, now))
        return found

    def __getstate__(self) -> dict[str, Any]:
        kept = {
            "root": self.root,
            "names": self.names,
            "tables": self.tables,
            "flagged": self.flagged,
            "stored": self.stored,
            "several": self.several,
            "others": self.others,
        }
        made: dict[str, Any] = {
            "made": None, "accumulators": {}, "apart": {}, "table_places": None
        }  # fmt: skip
        passes = {"reduced_pass": [], "checked_pass": -1, "unreached": set(), "warned": False}
        return {**kept, **made, **passes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.steps = step_record.StepRecord()
        self.agreed_frozen = None
        self.telling = []
        _live().add(self)


def _computed(values: Any) -> list[Tensor]:
    """The tensors in ``values`` that a backward pass can start from."""
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.grad_fn is not None]


def _accumulators(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    """The nodes that accumulate the gradients of those that are trained."""
    with torch.inference_mode(False), torch.enable_grad():
        return {
            name: p.view_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            for name, p in named
            if p.requires_grad
        }


def _apart(names: Sequence[str]) -> UsageError:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return UsageError(
        f"the gradient of {names[0]}{more} would be this rank's own",
        why="the model is spread over ranks, which average the gradients of what the outputs for"
        " the example depend on: not of this one",
        tries=(
            "a call that reaches it as example=, others in forms=[...]",
            "a layer that is used beside the model in its forward instead",
            "requires_grad_(False), or torch.no_grad() to evaluate",
        ),
    )


def broadcast(root: nn.Module) -> None:
    """Copy parameters and buffers of ``root`` from rank 0 to all ranks, except parts of tables."""
    all_of_them = (*root.parameters(), *root.buffers())
    held = {id(t): t for t in all_of_them if shards.of(t) is None}
    collectives.broadcast(list(held.values()))
