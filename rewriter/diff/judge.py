"""Are two tensors the same number? The judge is the float64 run of the plain model.

Both models round. So the error of ours against float64 may be what the table of limits grants, plus
a small multiple of the plain model's own error. Without a judge (a model that cannot run in
float64) ours is compared with the plain model, and only the table counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor


class Bound(Protocol):
    """The limit of one dtype."""

    @property
    def factor(self) -> float:
        """The allowed multiple of the plain model's own error."""

    @property
    def ulps(self) -> float:
        """Units in the last place of an entry's scale that are always allowed."""


class Limits(Protocol):
    """The table of limits: ``recast.runtime.tolerances``, which explains the constants."""

    ZERO: float
    CANCEL: float
    CHAIN: float
    SHRINK: float
    WILD: float

    def limit(self, dtype: torch.dtype) -> Bound:
        """The limit for ``dtype``."""


@dataclass(frozen=True, slots=True)
class Row:
    """One compared tensor, at the entry that is nearest to its limit, or furthest beyond it."""

    group: str  # outputs, gradients, after k steps, buffers
    tensor: str
    shape: tuple[int, ...]
    max_abs: float  # |ours - judge|
    max_rel: float  # the same, divided by the entry's scale
    at: tuple[int, ...] | None
    limit: float  # on max_abs
    ok: bool
    when: str = ""  # "train mode, batch 2"
    why: str = ""  # when the difference is not a number: "shape (3,) instead of (4,)"

    @property
    def share(self) -> float:
        """How much of the limit is used; above 1 is a difference."""
        if self.why or not self.limit:
            return float("inf") if not self.ok else 0.0
        return self.max_abs / self.limit

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Limit:
    """What may differ, besides what :class:`Limits` grants.

    ``usual``: the plain model's relative error elsewhere (on a tensor of few entries its error may
    be nil by luck). ``largest``: the largest magnitude of what was summed up, whose rounding noise
    is all that is left of a true zero. ``local``: the scale of an entry is its own magnitude, at
    least the tensor's typical one, at most 1 (fits outputs); otherwise the tensor's largest entry
    (fits sums over a batch). ``alone``: only what the table grants a chain of operations, whatever
    the plain model's own error.
    """

    usual: float = 0.0
    largest: float = 0.0
    local: bool = False
    alone: bool = False


def compare(
    group: str,
    name: str,
    when: str,
    ours: Tensor,
    plain: Tensor,
    truth: Tensor | None,
    limits: Limits,
    limit: Limit,
) -> Row:
    """The row that compares ``ours`` with ``plain``, judged by ``truth``."""
    row = Row(group, name, tuple(plain.shape), 0.0, 0.0, None, 0.0, True, when)
    if ours.shape != plain.shape:
        return _no(row, f"shape {tuple(ours.shape)} instead of {tuple(plain.shape)}")
    if ours.dtype != plain.dtype:
        return _no(row, f"dtype {_short(ours.dtype)} instead of {_short(plain.dtype)}")
    if not plain.numel():
        return row
    if plain.is_complex():  # as real and imaginary parts; a judge of complex64 is a reference too
        parts = (None if t is None else _parts(t) for t in (ours, plain, truth))
        ours, plain, truth = parts  # type: ignore[assignment]
    if not plain.is_floating_point():
        return _exact(row, ours, plain)
    a, b = (t.detach().to("cpu", torch.float64) for t in (ours, plain))
    if at := _pattern(a, b):
        return _no(row, f"{_at(a, at)} where the plain model has {_at(b, at)}", at)
    finite = torch.isfinite(b)
    a, b = torch.where(finite, a, 0.0), torch.where(finite, b, 0.0)
    r = b if truth is None else truth.detach().to("cpu", torch.float64)
    if r.shape != b.shape or not bool(torch.isfinite(torch.where(finite, r, 0.0)).all()):
        r = b  # float64 leaves the range where this dtype stays in it, or the reverse: no judge
    r = torch.where(finite, r, 0.0)
    bound, unit = limits.limit(plain.dtype), torch.finfo(plain.dtype).eps
    chain = limits.CHAIN if truth is None or limit.alone else 1.0
    rtol = bound.ulps * unit * chain
    scale = _scale(r, limit.local)
    own = 0.0 if limit.alone else max(float(((b - r).abs() / scale).max()), limit.usual)
    noise = bound.ulps * unit * _summed(r, limits, limit, truth is not None)
    allowed = scale * (bound.factor * own + rtol) + noise
    return _numbers(row, a, r, scale, allowed)


def _summed(r: Tensor, limits: Limits, limit: Limit, judged: bool) -> float:
    """The magnitude of what was summed up to ``r``: ``largest`` where float64 says a true zero.

    Elsewhere terms may cancel to a hundredth; where they cancel further, the plain model's own
    error shows it.
    """
    size = float(r.abs().max())
    if judged and size < limits.ZERO * limit.largest:
        return limit.largest
    if limit.local:
        return 0.0  # the scale of each entry is enough
    return min(limit.largest, limits.CANCEL * size) if judged else limit.largest


def usual(plain: Tensor, truth: Tensor) -> float:
    """The relative error of the plain model on one tensor."""
    error = relative(plain, truth, truth, local=False)
    return error if error < 1.0 else 0.0  # a true zero: nothing to learn from it


def drawn(limit: Limit, judge: Tensor, draws: Iterable[Any]) -> Limit:
    """``limit`` with the largest error of further ``draws`` of the tensor, see
    :mod:`.rounding_noise`.
    """
    errors = [relative(t, judge, judge, limit.local) for t in draws if isinstance(t, Tensor)]
    return replace(limit, usual=max([limit.usual, *errors]))


def relative(plain: Tensor, truth: Tensor, of: Tensor, local: bool) -> float:
    """The largest error over the scale ``of`` a tensor; 0 where they do not compare."""
    if not plain.is_floating_point() or plain.shape != truth.shape or not plain.numel():
        return 0.0
    b, r, scale = (t.detach().to("cpu", torch.float64) for t in (plain, truth, of))
    return ((b - r).abs() / _scale(scale, local)).max().item()


def _numbers(row: Row, a: Tensor, r: Tensor, scale: Tensor, allowed: Tensor) -> Row:
    error = (a - r).abs()
    worst = int((error / allowed).reshape(-1).argmax())
    far, most = float(error.reshape(-1)[worst]), float(allowed.reshape(-1)[worst])
    return Row(
        row.group, row.tensor, row.shape, far, far / float(scale.reshape(-1)[worst]),
        _index(worst, row.shape), most, far <= most, row.when,
    )  # fmt: skip


def _scale(r: Tensor, local: bool) -> Tensor:
    tiny = torch.finfo(torch.float32).tiny  # keeps a tensor of zeros from dividing by zero
    if not local:
        return r.abs().max().clamp(min=tiny).expand_as(r)
    typical = float(r.square().mean().sqrt())
    return r.abs().clamp(min=max(min(typical, 1.0), tiny))


def _parts(t: Tensor) -> Tensor:
    return torch.view_as_real(t.detach().resolve_conj())


def _exact(row: Row, ours: Tensor, plain: Tensor) -> Row:
    wrong = (ours != plain).reshape(-1)
    if not bool(wrong.any()):
        return row
    at = _index(int(wrong.int().argmax()), row.shape)
    return _no(row, f"{_at(ours, at)} instead of {_at(plain, at)}", at)


def _pattern(a: Tensor, b: Tensor) -> tuple[int, ...] | None:
    """Where one is NaN or infinite and the other is not (or of the other sign)."""
    same = (a == b) | (torch.isnan(a) & torch.isnan(b)) | (torch.isfinite(a) & torch.isfinite(b))
    if bool(same.all()):
        return None
    return _index(int((~same).reshape(-1).int().argmax()), tuple(b.shape))


def _no(row: Row, why: str, at: tuple[int, ...] | None = None) -> Row:
    inf = float("inf")
    return Row(row.group, row.tensor, row.shape, inf, inf, at, 0.0, False, row.when, why)


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return tuple(reversed(index))


def _at(t: Tensor, at: tuple[int, ...]) -> Any:
    return t[at].item()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


__all__ = ["Bound", "Limit", "Limits", "Row", "compare", "usual"]
