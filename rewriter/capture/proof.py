"""The final check of a capture: the graph gives the model's own results on both example batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recast.errors import UsageError
from recast.rewriter import order
from recast.rewriter.compiled.codegen import Program, compile_graph
from recast.rewriter.compiled.copies import (
    generators_of,
    modules_by_path,
    same_random_numbers,
    seed_all,
)
from recast.rewriter.compiled.fallback import failing
from recast.rewriter.compiled.signature import Signature
from recast.rewriter.compiled.trees import flatten, rebuild
from recast.rewriter.diff.double import doubled, in_double, widen
from recast.rewriter.ir import Graph, Node, autocast_regions
from recast.rewriter.restored_strides import restore_outputs, restore_view
from recast.rewriter.written_views import lost_write

from .argument_writes import Place
from .constants import constants
from .kept_numbers import after_calls, others, put, set_between
from .layers import runs_users_code, torch_layer
from .opaque_calls import OpaqueCall
from .plain_model import live_copy
from .restored_state import restored_globals, restored_objects, restored_tensors
from .trace import Traced

RTOL = 1e-4  # of float32 products in float32: only a wrong graph is further away than this
ULPS = 16  # of narrower dtypes, which round after every operation
_FACTOR = 2  # of the model's own error before the judge, as the table of limits has it for bf16
_GRADIENT = 1e-2  # of the largest number of one: bf16 rounds to 4e-3
_SAME = 0.25  # of the largest number, at most: a model that is further from the judge is another
_SPARSE = (
    torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc,
)  # fmt: skip
_JUDGED = 2**28  # parameters, at most, of which a copy in float64 is made


def disagreement(
    root: nn.Module, traced: dict[str, Traced], signature: Signature, *batches: tuple[Any, ...]
) -> str | None:
    """Why a graph differs from the model in its mode, given the same random numbers; else None.

    The last of ``batches``, which has fewer rows, is enough for the second mode of one graph.
    """
    for training in (False, True):
        case = traced.get("both") or traced["train" if training else "eval"]
        runs = batches[-1:] if training and "both" in traced else batches
        why = compare(root, case, case.graph, signature, *runs, training=training)
        why = why or _other_gradient(root, case, signature, runs[-1], training)
        if why:
            return f"{why}, in {'train' if training else 'eval'} mode"
    return None


def _other_gradient(
    root: nn.Module, case: Traced, signature: Signature, batch: tuple[Any, ...], training: bool
) -> str | None:
    """Whose gradient by the graph is not that by the model, in words; None without a difference.

    Asked where code of the user's is kept whole: it may read what forward sets for a while, such
    as a setting of its class, and that may show in gradients alone.
    """
    learn = {name: p for name, p in root.named_parameters() if p.requires_grad}
    if not _runs_users_code(case.graph, root) or any(p._backward_hooks for p in learn.values()):
        return None
    plain, mine = (live_copy(root, training) for _ in range(2))
    numbers = _numbers(root, case, signature, batch, training)
    for copy in (plain, mine):
        put(copy, numbers)
    vars(mine)["_recast_constants"] = constants(root)
    program = compile_graph(case.graph, mine, "proof")

    def graph(given: tuple[Any, ...]) -> Any:
        inputs = signature.leaves(given)[0]
        return _users(case, program.run(*inputs, program.fetch()))

    try:
        wanted = _gradients(root, batch, [*learn.values()], partial(_plain, plain, signature))
    except Exception:  # it has none for all that it returns
        return None
    try:
        got = _gradients(root, batch, [*learn.values()], graph)
    except Exception as error:
        return f"backward raises {type(error).__name__} after the graph"
    scale = max((float(t.abs().max()) for t in wanted if t is not None and t.numel()), default=0.0)
    labels = [*(f"the gradient of {name}" for name in learn), *("that of an input" for _ in got)]
    for label, a, b in zip(labels, got, wanted, strict=False):
        if (a is None) != (b is None) or (a is not None and not _near(a, b, scale)):
            return f"{label} by the graph is not that by the model on the example"
    return None


def _runs_users_code(graph: Graph, root: nn.Module) -> bool:
    return any(
        isinstance(n.target, OpaqueCall)
        or (n.op == "call_module" and runs_users_code(root.get_submodule(str(n.target))))
        for n in graph.nodes
    )


def _gradients(
    root: nn.Module, batch: tuple[Any, ...], learn: list[nn.Parameter], call: Any
) -> list[Any]:
    """The gradients of ``learn``, and of the inputs, from random ones of what ``call`` returns."""
    inputs: list[torch.Tensor] = []

    def asks(t: torch.Tensor) -> torch.Tensor:
        t = t.detach().clone()
        if not t.is_floating_point() or t.layout != torch.strided:
            return t
        inputs.append(t.requires_grad_())
        return t.clone()  # which forward may write to

    def run() -> list[Any]:
        out = [t for t in _flat(call(tuple(rebuild(v, asks) for v in batch))) if t.grad_fn]
        upstream = [torch.randn_like(t) for t in out]
        found = torch.autograd.grad(out, [*learn, *inputs], upstream, allow_unused=True)
        return [g if g is None else g.to_dense() for g in found]

    with restored_tensors(root):
        return _run(generators_of(root), run) if learn or inputs else []


def _near(got: torch.Tensor, wanted: torch.Tensor, scale: float) -> bool:
    """Whether two gradients are one but for rounding, of sums that may all but cancel."""
    if not wanted.numel():
        return True
    off = float((got.double() - wanted.double()).abs().nan_to_num(0.0, 0.0, 0.0).max())
    return off <= _GRADIENT * float(wanted.double().abs().max()) + RTOL * scale


def elsewhere(
    root: nn.Module, traced: dict[str, Traced], signature: Signature, batch: tuple[Any, ...],
    varying: Collection[str], graphs: Mapping[str, Graph] | None = None,
) -> str | None:  # fmt: skip
    """Why a graph differs from the model once one of the numbers ``varying`` is another; else None.
    ``graphs``: the rewritten ones.

    A trace sees a number as a tensor, and code that was not copied may have asked it for its kind;
    and a length may have been that of the batch, which was shorter than the number.
    """
    runs = [(case.graph, case, mode) for mode, case in traced.items()]
    if graphs is not None:
        runs = [(graph, traced[mode], mode) for mode, graph in graphs.items() if mode != "train"]
    for path, (value, _) in set_between(root, varying).items():
        for other in others(value):
            for graph, case, mode in runs:
                changed = {path: other}
                why = _with(root, case, graph, signature, batch, mode == "train", changed)
                if why:
                    return f"{why} once {path} is {other!r}: forward asks more of it than is seen"
    return None


def _with(
    root: nn.Module, case: Traced, graph: Graph, signature: Signature, batch: tuple[Any, ...],
    training: bool, changed: dict[str, Any],
) -> str | None:  # fmt: skip
    """Why the graph differs from the model that holds the numbers ``changed``, or None."""
    try:
        both = _both(root, case, graph, signature, batch, training, changed)
    except Exception:  # the model takes no such number
        return None
    if not _is_asked_for(root, case, signature, batch, training, both.numbers):
        return None
    if both.error is not None:
        return f"the graph raises {type(both.error).__name__}"
    return _why(root, signature, batch, training, both)


def _is_asked_for(
    root: nn.Module, case: Traced, signature: Signature, batch: tuple[Any, ...], training: bool,
    numbers: dict[str, Any],
) -> bool:  # fmt: skip
    """Whether a call with these numbers runs the graph, rather than the plain forward."""
    if case.asks is None:
        return True
    _, found = _run_graph(root, case.asks, signature, batch, training, numbers)
    if isinstance(found, Exception):
        return False
    answers = zip(case.guards, found, strict=True)
    return all(bool(guard.convert(value) == guard.expected) for guard, value in answers)


def prove(
    root: nn.Module, traced: dict[str, Traced], graphs: dict[str, Graph], signature: Signature,
    *batches: tuple[Any, ...],
) -> tuple[str | None, bool]:  # fmt: skip
    """Why a rewritten graph differs from the model on the examples, or None; and whether one was
    changed, to restore strides. The numbers of a graph for train mode are not asked.
    """
    with restored_objects(root), restored_globals(root):
        return _prove(root, traced, graphs, signature, *batches)


def _prove(
    root: nn.Module, traced: dict[str, Traced], graphs: dict[str, Graph], signature: Signature,
    *batches: tuple[Any, ...],
) -> tuple[str | None, bool]:  # fmt: skip
    changed = False
    for mode, graph in graphs.items():
        training = mode == "train"
        case = traced[mode]
        refuses = False
        for batch in batches[:1] if training else batches:
            both = _both(root, case, graph, signature, batch, training)
            # As lookups in tables that are stored for inference do: there is nothing to compare.
            refuses = training and isinstance(both.error, UsageError)
            if refuses:
                break
            while both.error is not None and restore_view(graph, both.failed, root):
                changed = True
                both = _both(root, case, graph, signature, batch, training)
            ours = both.ours()
            why = None if training else _why(root, signature, batch, training, both)
            if why is not None:
                return why, changed
            (output,) = (n.args[0] for n in graph.nodes if n.op == "output")
            pairs = zip(_flat(ours), _flat(both.wanted), strict=False)
            changed |= restore_outputs(graph, _users(case, output), ours, pairs)
        if refuses:
            continue
        result = partial(_result, root, case, signature, batches[0], training)
        why = lost_write(case.graph, graph, root, result)
        if why is not None:
            return why, changed
    return None, changed


def compare(
    root: nn.Module, case: Traced, graph: Graph, signature: Signature, *batches: tuple[Any, ...],
    training: bool = False,
) -> str | None:  # fmt: skip
    """Run ``graph`` and the plain forward of ``root`` on each batch, on copies."""
    for batch in batches:
        both = _both(root, case, graph, signature, batch, training)
        why = _why(root, signature, batch, training, both)
        if why is not None:
            return why
    return None


@dataclass
class _Both:
    """What a graph and the plain forward return for one batch."""

    wanted: Any
    got: Any = None
    error: Exception | None = None  # that the graph raised
    failed: Node | None = None  # the node that did
    numbers: dict[str, Any] = field(default_factory=dict)  # those that forward keeps, before it
    rtol: float = RTOL

    def ours(self) -> Any:
        """What the graph returned to the user. Raises what it raised."""
        if self.error is not None:
            raise self.error
        return self.got


def _both(
    root: nn.Module, case: Traced, graph: Graph, signature: Signature, batch: tuple[Any, ...],
    training: bool, changed: Mapping[str, Any] = MappingProxyType({}),
) -> _Both:  # fmt: skip
    """Run ``graph`` and the plain forward of ``root``, on copies, with the same random numbers.
    ``changed``: numbers of both, by path.
    """
    plain, numbers = live_copy(root, training), _numbers(root, case, signature, batch, training)
    numbers |= changed
    put(plain, numbers)
    with restored_tensors(root):
        given = _clone(batch)
        wanted = _run(generators_of(root), lambda: _plain(plain, signature, given))
        both = _Both((wanted, [_at(given, place) for place, _ in case.argument_writes]))
        both.numbers = numbers
    regions = autocast_regions(graph.nodes)
    both.rtol = max(
        (ULPS * torch.finfo(d).eps for r in regions for _, d, on in r if on), default=RTOL
    )
    program, got = _run_graph(root, graph, signature, batch, training, numbers)
    if isinstance(got, Exception):
        both.error, both.failed = got, failing(got, program)
    else:
        both.got = _users(case, got)
    return both


def _numbers(
    root: nn.Module, case: Traced, signature: Signature, batch: tuple[Any, ...], training: bool
) -> dict[str, Any]:
    """The numbers that forward keeps, as a call before this one leaves them: a graph is not for
    the first.
    """
    if not case.numbers:
        return {}
    with restored_tensors(root):
        found = after_calls(root, signature, (batch,), training, case.numbers) or {}
    return {path: value for path, (value,) in found.items()}


def _result(
    root: nn.Module, case: Traced, signature: Signature, batch: tuple[Any, ...], training: bool,
    graph: Graph,
) -> Any:  # fmt: skip
    """What ``graph`` returns for ``batch`` on a copy."""
    numbers = _numbers(root, case, signature, batch, training)
    _, got = _run_graph(root, graph, signature, batch, training, numbers)
    if isinstance(got, Exception):
        raise got
    return got


def _run_graph(
    root: nn.Module, graph: Graph, signature: Signature, batch: tuple[Any, ...], training: bool,
    numbers: dict[str, Any],
) -> tuple[Program, Any]:  # fmt: skip
    """The code of ``graph``, and what it returns for ``batch`` on a copy; or what it raises."""
    mine = live_copy(root, training)
    put(mine, numbers)
    vars(mine)["_recast_constants"] = constants(root)
    program = compile_graph(graph, mine, "proof")
    inputs = signature.leaves(_clone(batch))[0]
    try:
        with restored_tensors(root) if may_write(graph, root) else nullcontext():
            return program, _run(generators_of(root), lambda: program.run(*inputs, program.fetch()))
    except Exception as error:
        return program, error


def may_write(graph: Graph, root: nn.Module) -> bool:
    """Whether ``graph`` may write to the parameters of ``root`` or to tensors that it keeps: by
    max_norm, a user's own code, or in place to an attribute that is no buffer. (Layers of torch
    write to buffers and to tables with max_norm alone, and :func:`live_copy` has its own.)
    """
    plain = {
        f"{path}.{name}" if path else name
        for path, module in modules_by_path(root).items()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }
    reads = any(n.op == "get_attr" and n.target in plain for n in graph.nodes)
    return any(
        n.target in (F.embedding, F.embedding_bag) or isinstance(n.target, OpaqueCall)
        or (n.op == "call_module" and not torch_layer(type(root.get_submodule(str(n.target)))))
        or (reads and order.writes(n, root))
        for n in graph.nodes
    )  # fmt: skip


def _users(case: Traced, result: Any) -> Any:
    """Without the attributes that forward leaves behind: what its caller sees."""
    if not case.stores and not case.entries and not case.argument_writes:
        return result
    return result[0], result[1][len(case.stores) + len(case.entries) :]


def _why(
    root: nn.Module, signature: Signature, batch: tuple[Any, ...], training: bool, both: _Both
) -> str | None:
    """Why the graph does not return what the plain forward does, or None."""
    got, wanted = _strided(_flat(both.ours())), _strided(_flat(both.wanted))
    why = _differ(got, wanted, both.rtol)
    near = why and _as_near(root, signature, batch, training, both.numbers, got, wanted)
    return None if near else why


def _at(given: Any, place: Place) -> Any:
    """The dict entry that forward wrote into one of its arguments."""
    for key in place:
        given = given[key]
    return given


def _as_near(
    root: nn.Module, signature: Signature, batch: tuple[Any, ...], training: bool,
    numbers: dict[str, Any], got: list[torch.Tensor], wanted: list[torch.Tensor],
) -> bool:  # fmt: skip
    """Whether ``got`` is as near to the model in float64 as ``wanted``, the model's own, is.

    Asked of models with parameters below float32 alone: what those round may come out in float32.
    """
    sizes = [p.numel() for p in root.parameters()]
    narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in root.parameters())
    if not narrow or sum(sizes) > _JUDGED or len(got) != len(wanted):
        return False
    with restored_tensors(root):
        twin = doubled(live_copy(root, training))
        put(twin, numbers)
    try:
        with in_double():
            call = lambda: _plain(twin, signature, widen(_clone(batch)))  # noqa: E731
            truth = _strided(_flat(_run(generators_of(root), call)))
    except Exception:  # it does not run in float64, so there is no judge
        return False
    return len(truth) == len(got) and all(map(_nearer, got, wanted, truth))


def _nearer(got: torch.Tensor, wanted: torch.Tensor, truth: torch.Tensor) -> bool:
    if got.shape != wanted.shape or got.dtype != wanted.dtype or got.shape != truth.shape:
        return False
    if not got.is_floating_point():
        return torch.equal(got, wanted)
    if not got.numel():
        return True
    truth = truth.detach()
    ours, usual = (float((t.detach().double() - truth).abs().max()) for t in (got, wanted))
    scale = float(truth.abs().max())
    if not usual <= _SAME * scale:  # other random numbers, or more than the narrow type can hold
        return False
    return ours <= _FACTOR * usual + RTOL * scale


@contextmanager
def _exact_products() -> Iterator[None]:
    """Products of float32 in float32, whatever the user's settings: no TF32, and no autocast.

    Two right graphs may differ by what those round, which is far more than what tells wrong ones.
    """
    backends: Any = torch.backends  # not all of it is typed
    new = backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv
    before = [one.fp32_precision for one in new]
    try:
        old = torch.get_float32_matmul_precision()
    except RuntimeError:  # the settings were made by the new names, which the old ones do not know
        old = None
    try:
        old_conv = backends.cudnn.allow_tf32
    except RuntimeError:
        old_conv = None
    try:
        if old is not None:
            torch.set_float32_matmul_precision("highest")  # sets the new ones too
        if old_conv is not None:
            backends.cudnn.allow_tf32 = False
        for one in new:
            if one is not backends.cudnn.conv or one.fp32_precision == "tf32":
                one.fp32_precision = "ieee"
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        if old is not None:
            torch.set_float32_matmul_precision(old)
        if old_conv is not None:
            backends.cudnn.allow_tf32 = old_conv
        for one, held in zip(new, before, strict=True):
            one.fp32_precision = "none"  # so it follows torch.backends.fp32_precision, as it may
            if one.fp32_precision != held:  # have done: what is set to it then still reaches it
                one.fp32_precision = held


def _run(generators: Sequence[Any], call: Any) -> Any:
    with same_random_numbers(*generators), torch.enable_grad(), _exact_products():
        seed_all(0)
        return call()


def _plain(model: nn.Module, signature: Signature, batch: tuple[Any, ...]) -> Any:
    args, kwargs = signature.unbind(batch)
    return model.forward(*args, **kwargs)


def _clone(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(rebuild(v, lambda t: t.detach().clone()) for v in batch)


def _flat(value: Any) -> list[torch.Tensor]:
    leaves: list[torch.Tensor] = []
    flatten(value, leaves, [])
    return leaves


def _strided(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors``, with the indices and the values of a sparse one in its place."""
    found: list[torch.Tensor] = []
    for t in tensors:
        if t.layout in _SPARSE:
            entries = t.detach().to_sparse_coo().coalesce()
            found += [entries.indices(), entries.values()]
        else:
            found.append(t)
    return found


def _differ(got: list[torch.Tensor], wanted: list[torch.Tensor], least: float = RTOL) -> str | None:
    if len(got) != len(wanted):
        return f"the graph returns {len(got)} tensors, the model {len(wanted)}"
    for k, (a, b) in enumerate(zip(got, wanted, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return (
                f"output {k} of the graph is {a.dtype}{tuple(a.shape)}, of the model"
                f" {b.dtype}{tuple(b.shape)}"
            )
        x, y = _real(a).double(), _real(b).double()
        scale = float(y.abs().nan_to_num(0.0, 0.0, 0.0).max()) if y.numel() else 0.0
        rtol = max(least, ULPS * torch.finfo(a.dtype).eps) if a.is_floating_point() else RTOL
        if not torch.allclose(x, y, rtol=rtol, atol=rtol * max(scale, 1e-6), equal_nan=True):
            return f"output {k} of the graph is not that of the model on the example"
    return None


def _real(t: torch.Tensor) -> torch.Tensor:
    """``t``; a complex one by its parts, since a cast to floats drops what is imaginary."""
    t = t.detach()
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
