"""The final check of a capture: the graph gives the model's own results on both example batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.compiled.codegen import compile_graph
from recast.rewriter.compiled.copies import generators_of, same_random_numbers, seed_all
from recast.rewriter.compiled.signature import Signature
from recast.rewriter.compiled.trees import flatten, rebuild
from recast.rewriter.diff.double import doubled, in_double, widen
from recast.rewriter.ir import Graph

from .argument_writes import Place
from .constants import constants
from .opaque_calls import OpaqueCall
from .plain_model import live_copy
from .restored_state import restored_tensors
from .trace import Traced

RTOL = 1e-4  # of float32 products in float32: only a wrong graph is further away than this
ULPS = 16  # of narrower dtypes, which round after every operation
_FACTOR = 2  # of the model's own error before the judge, as the table of limits has it for bf16
_SAME = 0.25  # of the largest number, at most: a model that is further from the judge is another
_JUDGED = 2**28  # parameters, at most, of which a copy in float64 is made


def disagreement(
    root: nn.Module, traced: dict[str, Traced], signature: Signature, *batches: tuple[Any, ...]
) -> str | None:
    """Why a graph differs from the model in its mode, given the same random numbers; else None."""
    for training in (False, True):
        case = traced.get("both") or traced["train" if training else "eval"]
        why = compare(root, case, case.graph, signature, *batches, training=training)
        if why:
            return f"{why}, in {'train' if training else 'eval'} mode"
    return None


def compare(
    root: nn.Module, case: Traced, graph: Graph, signature: Signature, *batches: tuple[Any, ...],
    training: bool = False,
) -> str | None:  # fmt: skip
    """Run ``graph`` and the plain forward of ``root`` on each batch, on copies."""
    renorms = any(  # max_norm, or a user's own code
        n.target in (F.embedding, F.embedding_bag) or isinstance(n.target, OpaqueCall)
        for n in graph.nodes
    )
    generators = generators_of(root)
    for batch in batches:
        plain, mine = live_copy(root, training), live_copy(root, training)
        vars(mine)["_recast_constants"] = constants(root)
        program = compile_graph(graph, mine, "proof")
        with restored_tensors(root):
            given = _clone(batch)
            wanted = _run(generators, lambda p=plain, b=given: _plain(p, signature, b))
            wanted = wanted, [_at(given, place) for place, _ in case.argument_writes]
        with restored_tensors(root) if renorms else nullcontext():  # else it runs as it will
            got = _run(
                generators,
                lambda g=program, b=batch: g.run(*signature.leaves(_clone(b))[0], g.fetch()),
            )
        beside = case.stores or case.argument_writes
        user = (got[0], got[1][len(case.stores) :]) if beside else got
        why = _differ(_flat(user), _flat(wanted))
        if why and not _as_near(root, signature, batch, training, _flat(user), _flat(wanted)):
            return why
    return None


def _at(given: Any, place: Place) -> Any:
    """The dict entry that forward wrote into one of its arguments."""
    for key in place:
        given = given[key]
    return given


def _as_near(
    root: nn.Module, signature: Signature, batch: tuple[Any, ...], training: bool,
    got: list[torch.Tensor], wanted: list[torch.Tensor],
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
    try:
        with in_double():
            call = lambda: _plain(twin, signature, widen(_clone(batch)))  # noqa: E731
            truth = _flat(_run(generators_of(root), call))
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


def _differ(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> str | None:
    if len(got) != len(wanted):
        return f"the graph returns {len(got)} tensors, the model {len(wanted)}"
    for k, (a, b) in enumerate(zip(got, wanted, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return (
                f"output {k} of the graph is {a.dtype}{tuple(a.shape)}, of the model"
                f" {b.dtype}{tuple(b.shape)}"
            )
        x, y = a.detach().double(), b.detach().double()
        scale = float(y.abs().nan_to_num(0.0, 0.0, 0.0).max()) if y.numel() else 0.0
        rtol = max(RTOL, ULPS * torch.finfo(a.dtype).eps) if a.is_floating_point() else RTOL
        if not torch.allclose(x, y, rtol=rtol, atol=rtol * max(scale, 1e-6), equal_nan=True):
            return f"output {k} of the graph is not that of the model on the example"
    return None
