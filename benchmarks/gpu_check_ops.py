"""Every op with kernels for a GPU, on every sample and dtype, against its reference in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from gpu_groups import Item
from torch import Tensor
from torch.nn import functional as F

from recast.runtime import OPS, fastest, tolerances
from recast.runtime.gpu import cublaslt
from recast.runtime.op import Op, Sample

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WAYS = {"mlp": 3}  # ops that choose by time, and how many ways are tried one by one
TF32 = ("compressed_interaction", "field_attention", "scaled_einsum")  # have kernels for it
COARSE = 2**-8  # of a norm: a few successive TF32 roundings; one wrong number is more
FEW = 4  # inputs that a unit of a large chain adds


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
    with _convolving(in_tf32=False):  # the judge is a CPU
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
        with _convolving(in_tf32=True):
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


def _convolving(*, in_tf32: bool) -> AbstractContextManager[None]:
    found: AbstractContextManager[None] = torch.backends.cudnn.flags(
        enabled=torch.backends.cudnn.enabled, allow_tf32=in_tf32
    )
    return found


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


# ---------------------------------------------------------------- sizes that fill a GPU


def _large_lookups() -> list[Sample]:
    g = torch.Generator().manual_seed(1)
    found = []
    for dim in (8, 16, 33, 64, 128, 256):
        tables = [torch.randn(n, dim, generator=g) for n in (3, 1000, 50_000)]
        counts = torch.randint(0, 9, (4096,), generator=g)
        counts[7] = 3000  # one bag that is split
        ends = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
        total = int(ends[-1])
        # Squares of uniform numbers: few ids are hot.
        hot = (torch.rand(total, generator=g).square() * 50_000).long()
        ids = [
            torch.randint(3, (4096,), generator=g),
            torch.randint(1000, (4096, 5), generator=g, dtype=torch.int32),
            hot,
            hot,
        ]
        sample_weights = [None, None, None, torch.randn(total, generator=g)]
        table, mode = [0, 1, 2, 2], ["none", "mean", "sum", "sum"]
        off = [False] * 4
        args = (
            tables, ids, [None, None, ends, ends], sample_weights, table, mode, [None] * 4,
            [False, False, True, True], off,
        )  # fmt: skip
        found.append(Sample(f"large, width {dim}", args))
    return found


def _large_dots() -> list[Sample]:
    g = torch.Generator().manual_seed(2)
    found = []
    for rows, count, dim in ((4096, 27, 128), (4096, 27, 64), (1000, 9, 32), (777, 40, 16)):
        features = [torch.randn(rows, dim, generator=g) for _ in range(count)]
        li, lj = torch.tril_indices(count, count, -1)
        args = (features, features[0], li, lj, 1)
        found.append(Sample(f"large, {count} features of {dim}", args))
    return found


def _large_gathers() -> list[Sample]:
    g = torch.Generator().manual_seed(8)
    found = []
    for rows, tables, dim in ((4096, 26, 128), (777, 9, 16)):
        weights = [torch.randn(n, dim, generator=g) for n in [3, 50_000] * (tables // 2)]
        weights += [torch.randn(7, dim, generator=g)] * (tables % 2)
        ids = [torch.randint(w.shape[0], (rows,), generator=g) for w in weights]
        cuts = torch.arange(rows)
        li, lj = torch.tril_indices(tables + 1, tables + 1, -1)
        x, none, off = torch.randn(rows, dim, generator=g), [None] * tables, [False] * tables
        args = (
            weights, ids, [cuts] * tables, [*range(tables)], ["sum"] * tables, none, off, False,
            [x], [-1, *range(tables)], x, li, lj, 1,
        )  # fmt: skip
        found.append(Sample(f"large, {tables} lookups of {dim}", args))
    return found


def _large_mlps() -> list[Sample]:
    """Chains whose values before each relu are the same number in every dtype, and never near 0.

    Even the narrowest dtype holds every product and partial sum exactly: a unit adds few inputs,
    which are small multiples of a power of two, and its bias is an odd multiple of half of that.
    Otherwise rounding would move one value in a million across the relu and change its gradient.
    """
    g = torch.Generator().manual_seed(3)
    found = []
    chains = ((479, 1024, 512, 256, 1), 700), ((13, 512, 256, 128), 700), ((1000, 1000, 999), 700)
    for sizes, rows in (*chains, ((24, 16, 1), 5000)):  # so many that one output is a choice, too
        params: list[Tensor] = []
        unit = 1.0  # of what comes in
        for a, b in list(pairwise(sizes))[:-1]:
            weight = torch.zeros(b, a)
            places = torch.rand(b, a, generator=g).topk(min(a, FEW)).indices
            weight.scatter_(1, places, torch.randint(2, places.shape, generator=g) * 2.0 - 1)
            unit /= 2
            params += [weight, unit * (2 * torch.randint(-2, 2, (b,), generator=g) + 1)]
        a, b = sizes[-2:]
        params += [torch.randn(b, a, generator=g) * a**-0.5, torch.randn(b, generator=g)]
        steps = ["linear", "relu"] * (len(sizes) - 2) + ["linear"]
        x = torch.randint(-1, 2, (rows, sizes[0]), generator=g).float()
        found.append(Sample(f"large, {'-'.join(map(str, sizes))}", (x, params, [], steps, [], [])))
    return found


def _large_fields() -> list[Sample]:
    g = torch.Generator().manual_seed(4)
    found = []
    for batch, heads, fields, dim in ((700, 2, 39, 16), (300, 1, 26, 32), (90, 4, 130, 8)):
        q, k, v = (
            torch.randn(batch, fields, heads, dim, generator=g).transpose(1, 2) for _ in range(3)
        )
        args = (q, k, v, dim**-0.5, 0.0, True, fields == 26)
        found.append(Sample(f"large, {fields} fields of {dim}", args))
    return found


def _large_layers() -> list[Sample]:
    """Products of more samples than are processed at a time."""
    g = torch.Generator().manual_seed(5)
    found = []
    for batch, left, right, dim, outputs in ((1003, 26, 26, 16, 33), (301, 39, 100, 10, 64)):
        x, y = (torch.randn(batch, n, dim, generator=g) for n in (left, right))
        weight = torch.randn(outputs, left * right, generator=g) * (left * right) ** -0.5
        args = (x, y, weight, torch.randn(outputs, generator=g), True)
        found.append(Sample(f"large, {left} by {right} to {outputs}", args))
    return found


def _large_gates() -> list[Sample]:
    g = torch.Generator().manual_seed(6)
    found = []
    for rows, experts, dim in ((5000, 8, 128), (3001, 5, 67)):
        vectors = [torch.randn(rows, dim, generator=g) for _ in range(experts)]
        gates = [torch.randn(rows, experts, generator=g) for _ in range(3)]
        args = (vectors, gates, [*range(experts)] * 3, True, False)
        found.append(Sample(f"large, {experts} vectors of {dim}", args))
    return found


def _large_dice() -> list[Sample]:
    g = torch.Generator().manual_seed(7)
    return [
        Sample(f"large, {rows} x {width}", (
            torch.randn(rows, width, generator=g), torch.randn(rows, width, generator=g),
            torch.randn(width, generator=g),
        ))
        for rows, width in ((50_001, 200), (70_000, 1), (300, 3001))
    ]  # fmt: skip


def _large_experts() -> list[Sample]:
    g = torch.Generator().manual_seed(9)
    found = []
    for rows, experts, width, depth in ((5000, 4, 128, 128), (3001, 9, 36, 52)):
        scale, x = torch.randn(rows, width, generator=g), torch.randn(rows, depth, generator=g)
        weight = torch.randn(experts, width, depth, generator=g) * depth**-0.5
        args = (scale, weight, x, "bi,eij,bj->bei")
        found.append(Sample(f"large, {experts} of {width} by {depth}", args))
    return found


LARGE: dict[str, Callable[[], list[Sample]]] = {
    "embedding_bags": _large_lookups,
    "compressed_interaction": _large_layers,
    "dice": _large_dice,
    "dot_interaction": _large_dots,
    "field_attention": _large_fields,
    "gated_sums": _large_gates,
    "gathered_dots": _large_gathers,
    "mlp": _large_mlps,
    "scaled_einsum": _large_experts,
}
