"""Checks that all ranks step alike: the same optimizer steps, with the same settings.

A rank that skips a step, steps twice or has another learning rate goes on with other parameters,
and no collective fails. So every rank keeps a record of its steps, and a few numbers of it travel
with a message that is sent anyway: the counts of ids, or the dense gradients of a model without
sharded tables. Only if they differ are the records themselves exchanged, through the store of the
process group, so that the error can say which rank differs in what.

A rank that steps some of the dense parameters, and gets the others from the ranks that step them
(ZeRO by hand), steps otherwise than they do, and rightly so. Once the records show that each dense
parameter is stepped by one rank alone, only the steps of tables are compared, and the values, until
a rank steps another one.

Compared exactly: the steps since the call before, with the settings of all parameter groups; which
parameters are trained; whether this call's gradients are averaged (``no_sync``); whether gradients
of an earlier pass are left. Compared within ``_TOLERANCE``, as machines may round differently: the
factor by which clipping and loss scaling multiplied the gradient of one table, and the norm of some
elements of one dense parameter, of others after each step. Neither is compared after a step with
gradients of a ``no_sync`` pass, which are each rank's own: a user who does that averages by hand.
"""

from __future__ import annotations

import json
import math
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from recast.errors import UsageError
from recast.runtime.ranks import faults_agree
from recast.runtime.rows.grad import RowGrad

NUMBERS = 3  # of each rank: a checksum of what must be equal; the factor; the norm
_PACKED, _WORDS, _FLOATS = f"<{NUMBERS}q", "<2q", "<2d"
_TOLERANCE = 1e-3  # relative
_FLOOR = 1e-5  # of a norm: rounding weighs more in what passes through zero
_UNKNOWN = math.nan
_ELEMENTS = 64
_MOST = 4096  # steps that are kept, of a model that is not called
# Settings by which ranks may differ: other ways to the same numbers, and what says who a rank is.
_OF_A_RANK = ("foreach", "fused", "capturable", "differentiable", "rank", "local_rank", "seed")
_NUMBERS = (bool, int, float)
_COMPARED = (torch.float32, torch.float64)  # a step in fewer bits rounds more than _TOLERANCE
_FACTOR, _VALUES = "the factor of clipping and loss scaling", "values of dense parameters"
_STEPS = "optimizer steps since the last comparison"
_TRIES = (
    "step(), zero_grad(), clipping, loss scaling, schedulers and load_state_dict() alike on every"
    " rank; then restart from the last recast.checkpoint"
)
_HERE = threading.local()  # ranks that are threads have their own


@dataclass(frozen=True, slots=True)
class Scope:
    """What a step is of: the names of the dense parameters, and whether of tables, too."""

    dense: tuple[str, ...] = ()
    tables: bool = False


@dataclass(slots=True)
class Told:
    """What one rank says about its steps when it calls the model."""

    steps: tuple[str, ...] = ()
    frozen: str = ""
    averaged: bool = True
    left: bool = False
    factor: float = _UNKNOWN
    compared: str = ""  # the parameter whose norm this is
    norm: float = _UNKNOWN
    record: ref[StepRecord] | None = None  # that it is from
    of_tables: tuple[str, ...] = ()  # the steps of optimizers that hold tables
    scopes: tuple[Scope, ...] = ()  # of all steps, in the order in which they were

    def dense(self) -> frozenset[str]:
        """The dense parameters that were stepped."""
        return frozenset(name for scope in self.scopes for name in scope.dense)

    def numbers(self) -> list[int]:
        """NUMBERS numbers, for the other ranks."""
        exact = "\n".join((*self.steps, self.frozen, f"{self.averaged} {self.left}"))
        floats = struct.unpack(_WORDS, struct.pack(_FLOATS, self.factor, self.norm))
        return [zlib.crc32(exact.encode()), *floats]

    def facts(self) -> dict[str, str]:
        """The same as text, by name."""
        return {
            _STEPS: "\n".join(self.steps or ["none"]),
            "frozen parameters": self.frozen,
            "no_sync()": "outside" if self.averaged else "inside",
            "gradients of an earlier pass": "there" if self.left else "none",
            _FACTOR: f"{self.factor:.6g}",
            _VALUES: f"{self.compared} has a norm of {self.norm:.6g}"
            if self.compared
            else "not compared",
        }


class StepRecord:
    """The steps of this rank on the parameters of a model: ``dense``, by name, are those that every
    rank has, ``tables`` those of which each has a part. Whoever replaces parameters sets them anew.
    """

    def __init__(self) -> None:
        self.dense: dict[str, nn.Parameter] = {}
        self.tables: list[nn.Parameter] = []
        self.names: list[str] = []  # of those in ``dense`` that are trained
        self.frozen = ""
        self.first: nn.Parameter | None = None  # of these
        self.steps: list[str] = []  # since the last call
        self.scopes: list[Scope] = []  # of each of them
        self.factor = _UNKNOWN  # at the last of these
        self.count = 0  # calls after steps
        # What this rank steps, once it is known that each dense parameter is stepped by one alone.
        self.divided: frozenset[str] | None = None
        self.passes = 0  # that averaged gradients
        self.averaged = True  # whether the backward pass of the last call averages
        self.alone = False  # whether the last step was with gradients that are this rank's own
        _live().add(self)

    def set_parameters(self, dense: dict[str, nn.Parameter], tables: list[nn.Parameter]) -> None:
        """The parameters of the model from now on; likewise if one was frozen or unfrozen."""
        self.dense, self.tables = dense, tables
        self.names = [n for n, p in dense.items() if p.requires_grad]
        self.frozen = ", ".join(n for n, p in dense.items() if not p.requires_grad)
        self.first = dense[self.names[0]] if self.names else None
        _HERE.generation = getattr(_HERE, "generation", 0) + 1

    def note(self, settings: str, scope: Scope = Scope()) -> None:
        """An optimizer with these settings is about to step the parameters in ``scope``."""
        self.steps.append(settings)
        self.scopes.append(scope)
        del self.steps[:-_MOST], self.scopes[:-_MOST]
        self.alone = not self.averaged
        self.factor = _UNKNOWN if self.alone else self._factor()

    def begin(self, averaged: bool) -> Told:
        """What this rank says at a call that begins now; then :meth:`sent`, when it has said it.

        ``averaged``: whether the backward pass averages gradients.
        """
        told = Told(tuple(sorted(self.steps)), factor=self.factor, record=ref(self))
        told.scopes, both = tuple(self.scopes), zip(self.steps, self.scopes, strict=True)
        told.of_tables = tuple(sorted(text for text, scope in both if scope.tables))
        if self.divided is not None and told.dense() <= self.divided:
            told.steps = told.of_tables  # otherwise all is compared anew
        if torch.is_grad_enabled():
            told.frozen, told.averaged = self.frozen, averaged
            told.left = self.first is not None and self.first.grad is not None
        if (told.steps or self.divided is not None) and self.names and not self.alone:
            told.compared = self.names[(self.count + 1) % len(self.names)]
            told.norm = _norm(self.dense[told.compared])
        return told

    def sent(self, told: Told) -> None:
        """The other ranks learn ``told``."""
        if told.steps or self.divided is not None:
            self.count += 1  # here, as a rank may also evaluate by itself, and tells nobody
        del self.steps[: len(told.scopes)], self.scopes[: len(told.scopes)]
        self.factor = _UNKNOWN

    def _factor(self) -> float:
        if not self.tables:
            return _UNKNOWN
        grad = self.tables[self.count % len(self.tables)].grad
        scale = grad.cell.scale if isinstance(grad, RowGrad) else None
        if scale is None or (isinstance(scale, Tensor) and not scale.is_cpu):
            return _UNKNOWN
        return float(scale)


def _norm(parameter: Tensor) -> float:
    if not parameter.is_cpu or parameter.dtype not in _COMPARED or not parameter.numel():
        return _UNKNOWN  # a GPU would have to be waited for
    norm = float(torch.linalg.vector_norm(parameter.detach().flatten()[:_ELEMENTS]))
    return math.inf if math.isnan(norm) else norm


# ---------------------------------------------------------------- what steps


def _live() -> WeakSet[StepRecord]:
    if not hasattr(_HERE, "live"):
        _HERE.live = WeakSet()
    live: WeakSet[StepRecord] = _HERE.live
    return live


class _Known:
    """What is known of an optimizer: the records that its steps belong to, its settings as text."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.generation, self.size = -1, -1
        self.records: list[tuple[ref[StepRecord], Scope]] = []
        self.keys = [key for key in optimizer.defaults if key not in _OF_A_RANK]
        self.values: set[tuple[Any, ...]] = set()
        self.text = ""

    def find_records(self, optimizer: Optimizer) -> list[tuple[ref[StepRecord], Scope]]:
        groups = optimizer.param_groups
        size = sum([len(group["params"]) for group in groups])
        generation = getattr(_HERE, "generation", 0)
        if (self.generation, self.size) != (generation, size):
            self.generation, self.size = generation, size
            held = {id(p) for group in groups for p in group["params"]}
            self.records = []
            for one in _live():
                dense = tuple(name for name, p in one.dense.items() if id(p) in held)
                tables = any(id(p) in held for p in one.tables)
                if dense or tables:
                    self.records.append((ref(one), Scope(dense, tables)))
        return self.records

    def settings(self, optimizer: Optimizer) -> str:
        """The settings of the groups, each once and in order: a rank may leave out groups of tables
        that are not there, and make groups in another order.
        """
        keys = self.keys
        values = {tuple(map(_plain, map(g.get, keys))) for g in optimizer.param_groups}
        if values != self.values or not self.text:
            self.values = values
            rows = {" ".join([f"{k}={_shown(v)}" for k, v in zip(keys, row, strict=True)])
                    for row in values}  # fmt: skip
            self.text = "\n".join(f"{type(optimizer).__name__}: {row}" for row in sorted(rows))
        return self.text


def _plain(value: Any) -> Any:
    """A setting as a plain value; what cannot be compared between processes as None."""
    if isinstance(value, _NUMBERS):
        return value
    if isinstance(value, Tensor):
        return float(value) if value.is_cpu and value.numel() == 1 else None
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else None


def _shown(value: Any) -> str:
    """A plain value without the last bits, which the cosine of a scheduler may round otherwise."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def note_step(optimizer: Optimizer) -> None:
    """``optimizer`` is about to step. One that another optimizer steps (as that inside of torch's
    ZeroRedundancyOptimizer, which differs between ranks) does not count.
    """
    outer = getattr(_HERE, "outer", None)
    last: Optimizer | None = None if outer is None else outer()
    if last not in (None, optimizer) and any(held is optimizer for held in vars(last).values()):
        return
    _HERE.outer = ref(optimizer)
    if not hasattr(_HERE, "known"):
        _HERE.known = WeakKeyDictionary()
    known: _Known | None = _HERE.known.get(optimizer)
    if known is None:
        known = _HERE.known[optimizer] = _Known(optimizer)
    records = known.find_records(optimizer)
    if records:
        settings = known.settings(optimizer)
        for found, scope in records:
            record = found()
            if record is not None:
                record.note(settings, scope)


# ---------------------------------------------------------------- what travels


def set_from(told: Told) -> None:
    """The call that begins sends ``told``."""
    _HERE.told = told


def current() -> Told:
    """What this rank says in the call that has begun."""
    told: Told | None = getattr(_HERE, "told", None)
    return Told() if told is None else told


class AppendedNumbers:
    """Numbers that travel with an all-reduced buffer, behind it: each rank writes its bytes into
    its own part and zeros into the others', so the sum holds those of all, exactly, in any dtype.
    """

    def __init__(self, told: Told, buffer: Tensor) -> None:
        self.told, self.size = told, buffer.numel()
        world, rank = dist.get_world_size(), dist.get_rank()
        packed = struct.pack(_PACKED, *told.numbers())
        own = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        behind = buffer.new_zeros(world, len(own))
        behind[rank] = own
        self.buffer = torch.cat([buffer, behind.flatten()])

    def check(self) -> None:
        """Raise UsageError, on every rank, if the numbers differ; the sum must be there."""
        behind = self.buffer[self.size :].view(dist.get_world_size(), -1)
        rows = behind.to(torch.uint8).contiguous()
        check_equal(self.told, [struct.unpack(_PACKED, bytes(row.tolist())) for row in rows])


def check_equal(told: Told, numbers: Sequence[Sequence[int]]) -> None:
    """Raise UsageError, on every rank, if the ``numbers`` of the ranks differ; ``told`` is of this
    rank.
    """
    first = numbers[0]
    if all(one == first for one in numbers):
        return
    floats = [struct.unpack(_FLOATS, struct.pack(_WORDS, *one[1:])) for one in numbers]
    factors, norms = zip(*floats, strict=True)
    facts = told.facts()
    for name, close in ((_FACTOR, _close(factors)), (_VALUES, _close(norms, _FLOOR))):
        if close:  # then what one rank does not know must not be named as a difference
            del facts[name]
    alike = len({one[0] for one in numbers}) == 1
    if alike and not {_FACTOR, _VALUES} & facts.keys():
        return
    record = told.record() if told.record is not None else None
    if not alike and record is not None and _divided(record, told):
        record.divided, record.count = told.dense(), 0
        facts[_STEPS] = "\n".join(told.of_tables)
        faults_agree.agree(facts, tries=_TRIES)
        return
    for record in _live():  # whoever goes on all the same compares the steps from here on
        record.steps, record.scopes, record.count, record.divided = [], [], 0, None
    faults_agree.agree(facts, tries=_TRIES)
    raise UsageError("ranks differ in their optimizer steps", tries=(_TRIES,))


def _divided(record: StepRecord, told: Told) -> bool:
    """Whether each dense parameter that is trained is stepped by one rank alone, and those of
    several ranks as often. All ranks call it.
    """
    own = Counter(name for scope in told.scopes for name in scope.dense)
    found = [json.loads(text) for text in faults_agree.of_all(json.dumps(own))]
    names = [name for one in found for name in one]
    times = {count for one in found for count in one.values()}
    stepping = sum(bool(one) for one in found)
    return stepping > 1 and len(times) == 1 and sorted(names) == sorted(record.names)


def _close(values: Sequence[float], floor: float = 0.0) -> bool:
    known = [v for v in values if not math.isnan(v)]
    if not known or max(known) == min(known):
        return True
    apart = max(known) - min(known)
    return apart <= max(_TOLERANCE * max(map(abs, known)), floor) and math.isfinite(apart)
