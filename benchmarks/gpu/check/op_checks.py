"""Every op with kernels for a GPU, on every sample and dtype, against its reference in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gpu.check.op_samples import LARGE
from gpu.harness.items import Item
from recast.runtime import OPS, fastest, tolerances
from recast.runtime.gpu import cublaslt
from recast.runtime.op import Op, Sample

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WAYS = {"mlp": 3}  # ops that choose by time, and how many ways are tried one by one
TF32 = ("compressed_interaction", "field_attention", "scaled_einsum")  # have kernels for it
COARSE = 2**-8  # of a norm: a few successive TF32 roundings; one wrong number is more


def ops() -> list[Op]:
    return [op for op in OPS.values() if any(k.device == "cuda" for k in op.kernels)]


def items(name: str, device: torch.device, tiny: bool) -> Iterator[Item]:
    """One item per sample and dtype of the op ``name``."""
    op = OPS[name]
    samples = list(op.samples())
    samples = samples[:3] if tiny else [*samples, *LARGE.get(name, list)()]
    for sample in samples:
        for dtype in DTYPES[:1] if tiny else DTYPES:
            label = f"{name}, {sample.label}, {str(dtype).removeprefix('torch.')}"
            yield Item(label, partial(check, op, sample, dtype, device))
        if name in TF32 and not tiny:
            yield Item(f"{name}, {sample.label}, TF32", partial(tiles, op, sample, device))
    for way in range(WAYS.get(name, 0)):  # whichever is the fastest
        for sample in samples:
            for dtype in DTYPES[:1] if tiny else DTYPES[:2]:
                label = f"{name}, {sample.label}, {str(dtype).removeprefix('torch.')}, way {way}"
                yield Item(label, partial(_by_way, way, op, sample, dtype, device))
    for kind in ("turned", 0) if name in WAYS else ():
        for sample in samples[-1:]:  # of many rows
            label = f"{name}, {sample.label}, tf32, way {kind}"
            yield Item(label, partial(_in_tf32, kind, op, sample, device))


def _in_tf32(way: int | str, op: Op, sample: Sample, device: torch.device) -> dict[str, object]:
    """Judged as float16, which has as many digits as TF32."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        with preferring(way) as chosen:
            found = check(op, sample, torch.float32, device, torch.float16)
    finally:
        matmul.fp32_precision = before
    told = ", ".join(f"{n} x {name}" for name, n in chosen.items())
    return {**found, "detail": told or "nothing to choose"}


def _by_way(
    way: int, op: Op, sample: Sample, dtype: torch.dtype, device: torch.device
) -> dict[str, object]:
    with preferring(way) as chosen:
        found = check(op, sample, dtype, device)
    told = ", ".join(f"{n} x {name}" for name, n in chosen.items())
    return {**found, "detail": told or "nothing to choose"}


@contextmanager
def preferring(way: int | str) -> Iterator[dict[str, int]]:
    """Where several ways to compute something are timed, take the one with this number (else the
    last), or the first whose name ends so, instead of the fastest; yields how often each was taken.
    """
    before, taken = (fastest.choose, fastest.chosen), dict[str, int]()

    def choose(key: Any, ways: Any, like: Tensor, results: Any) -> str:
        with cublaslt.on_device(like):
            right = [*fastest._right(key, ways, results)]
        if isinstance(way, str):
            name = next((n for n in right if n.endswith(way)), right[-1])
        else:
            name = right[min(way, len(right) - 1)]
        taken[name] = taken.get(name, 0) + 1
        return str(name)

    fastest.choose, fastest.chosen = choose, lambda key: None
    try:
        yield taken
    finally:
        fastest.choose, fastest.chosen = before


def check(
    op: Op,
    sample: Sample,
    dtype: torch.dtype,
    device: torch.device,
    judged: torch.dtype | None = None,
) -> dict[str, object]:
    """Outputs and gradients are within the limits of ``tolerances``; returns how much is used.

    ``judged``: the dtype whose limits apply, if not their own.
    """
    upstream = _upstream(op, sample, dtype)
    with convolving(in_tf32=False):  # the judge is a CPU
        ours, masks = _run(op.target, op, cast(sample.args, dtype, device), upstream, device)
    here = torch.device("cpu")
    with _dropping(masks):
        plain, _ = _run(op.reference, op, cast(sample.args, judged or dtype, here), upstream, here)
    with _dropping(masks):
        wide = cast(cast(sample.args, dtype, here), torch.float64, here)
        truth, _ = _run(op.reference, op, wide, upstream, here)
    scale = max((float(t.abs().max()) for t in truth if t.numel()), default=1.0)
    worst = 0.0
    for k, (a, b, c) in enumerate(zip(ours, plain, truth, strict=True)):
        assert a.dtype == (dtype if judged else b.dtype), f"result {k}: {a.dtype}"
        assert a.shape == b.shape, f"result {k}: {tuple(a.shape)}"
        a = a.to(judged or a.dtype)
        share = tolerances.excess(a, b, c, scale=scale)
        assert share <= 1, f"result {k} of shape {tuple(a.shape)}: {share:.2f} of the limit"
        worst = max(worst, share)
    return {"share of the limit": round(worst, 3)}


def tiles(op: Op, sample: Sample, device: torch.device) -> dict[str, object]:
    """The kernels of TF32, which the settings must allow: within its accuracy, by norms."""
    if op.name == "compressed_interaction":  # values near 0 may be on either side of a relu
        sample = Sample(sample.label, (*sample.args[:4], False))
    upstream = _upstream(op, sample, torch.float32)
    held = torch.backends.cuda.matmul
    before, held.fp32_precision = held.fp32_precision, "tf32"
    try:
        with convolving(in_tf32=True):
            given = cast(sample.args, torch.float32, device)
            ours, masks = _run(op.target, op, given, upstream, device)
    finally:
        held.fp32_precision = before
    here = torch.device("cpu")
    with _dropping(masks):
        wide = cast(cast(sample.args, torch.float32, here), torch.float64, here)
        truth, _ = _run(op.reference, op, wide, upstream, here)
    worst = 0.0
    for k, (a, c) in enumerate(zip(ours, truth, strict=True)):
        assert a.shape == c.shape, f"result {k}: {a.shape}"
        off, norm = float((a.double() - c).norm()), float(c.norm())
        share = off / (COARSE * norm) if norm > 1e-12 else off / COARSE
        assert share <= 1, f"result {k} of shape {tuple(a.shape)}: {share:.2f} of the limit"
        worst = max(worst, share)
    return {"share of the limit": round(worst, 3)}


@contextmanager
def convolving(*, in_tf32: bool) -> Iterator[None]:
    """Inside, whether convolutions of float32 may be TF32, as is torch's default on a GPU."""
    with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=in_tf32):
        yield


def cast(args: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """A copy of ``args`` on ``device``; a tensor passed twice stays one, strides are kept."""
    done: dict[int, Tensor] = {}

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if id(value) not in done:
            made = copy.deepcopy(value.detach())
            made = made.to(dtype) if made.is_floating_point() else made
            whole = made.as_strided((made.untyped_storage().nbytes() // made.itemsize,), (1,), 0)
            moved = whole.to(device)
            done[id(value)] = moved.as_strided(made.shape, made.stride(), made.storage_offset())
        return done[id(value)]

    return tuple([one(x) for x in a] if isinstance(a, list) else one(a) for a in args)


def _run(
    call: Callable[..., Any],
    op: Op,
    args: tuple[Any, ...],
    upstream: list[Tensor],
    device: torch.device,
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients on the CPU, and the dropout masks that the op drew."""
    leaves = [t.requires_grad_() for t in _floats(op, args)]
    torch.manual_seed(5)
    drawing: AbstractContextManager[list[Tensor]]
    drawing = _drawing() if call is op.target else nullcontext([])
    with drawing as masks:
        outs = _list(call(*args))
    if call is op.target and outs:
        own = _masks(outs[0])
        assert not (own and masks), "some masks are the op's own and some torch's: in which order?"
        masks = own or masks
    given = [u.to(device=device, dtype=o.dtype) for u, o in zip(upstream, outs, strict=True)]
    grads: Iterable[Tensor | None] = ()
    if leaves:
        grads = torch.autograd.grad(outs, leaves, given, allow_unused=True)
    dense = [_dense(g, t) for g, t in zip(grads, leaves, strict=True)]
    return [t.detach().cpu() for t in (*outs, *dense)], [m.cpu() for m in masks]


def _masks(out: Tensor) -> list[Tensor]:
    from recast.runtime.mlp import mask as mlp_mask

    maker = getattr(out.grad_fn, "_forward_cls", None)
    return mlp_mask.masks(out) if hasattr(maker, "masks") else []


@contextmanager
def _drawing() -> Iterator[list[Tensor]]:
    """The masks that torch's dropout draws inside: on a GPU, another dtype would get others."""
    masks: list[Tensor] = []
    before = F.dropout

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p in (0, 1) or not x.numel():
            return before(x, p, training)
        masks.append(torch.empty_like(x, dtype=torch.float32).bernoulli_(1 - p))
        return x * masks[-1].to(x.dtype) / (1 - p)

    F.dropout = dropout  # type: ignore[assignment]
    try:
        yield masks
    finally:
        F.dropout = before


@contextmanager
def _dropping(masks: list[Tensor]) -> Iterator[None]:
    """Let torch's dropout use ``masks``, in order; if there are none, it draws as usual."""
    waiting, before = iter(masks), F.dropout

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p in (0, 1) or not x.numel():
            return before(x, p, training)
        return x * next(waiting).to(x.dtype).reshape(x.shape) / (1 - p)

    if masks:
        F.dropout = dropout  # type: ignore[assignment]
    try:
        yield
    finally:
        F.dropout = before


def _upstream(op: Op, sample: Sample, dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(23)
    with torch.no_grad():
        outs = _list(op.reference(*cast(sample.args, torch.float32, torch.device("cpu"))))
    return [torch.randn(o.shape, generator=g).to(dtype) for o in outs]


def _floats(op: Op, args: tuple[Any, ...]) -> list[Tensor]:
    stats = args[2] if op.name == "mlp" else []
    found: dict[int, Tensor] = {}
    for arg in args:
        if arg is not stats:
            for t in _list(arg):
                if isinstance(t, Tensor) and t.is_floating_point():
                    found[id(t)] = t
    return list(found.values())


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _dense(grad: Tensor | None, like: Tensor) -> Tensor:
    if grad is None:
        return torch.zeros_like(like)
    return grad.to_dense() if grad.layout != torch.strided else grad + 0
