"""How old the moments of each row are, in a table that is stepped as ``fading`` says.

A step writes the rows that it looks up and those that were looked up shortly before, and reads no
others, apart from the weight decay of AdamW. Each row's moments stay those of its last gradient,
until there is another one, or until anybody else reads them (``Moment``). The weights are always
those of the last step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from threading import RLock, get_ident
from time import monotonic
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from recast.runtime import device
from recast.runtime.rows import whole as row_whole
from recast.runtime.rows.fading import Fading, steps_to_rest
from recast.runtime.rows.grad import RowGrad
from recast.runtime.rows.rules import Group, State
from recast.runtime.rows.whole import Whole

_ROWS_OF_BLOCK = 64  # of csrc/row_ages.h
_MOST = 2**30  # of rows, and of steps
_LEAST = torch.finfo(torch.float32).tiny  # of a power: see csrc/row_fades.h
_FADES = 256  # at least: a power that is not kept is some ten multiplications

# After another thread has read moments: so many steps, and seconds, as that thread may have to wait
# for a core while small tables take a thousand steps.
_APART, _APART_SECONDS = 8, 1.0

# Optimizers whose ``state_dict()`` settles their moments first.
_SETTLING: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()


class Turns:
    """What the steps of one optimizer know of each other, and of threads that read moments.

    To read moments is to settle them, which must not be while a step of another thread writes them.
    Nor are they to become ``Moment`` again while the other thread copies them: so for some steps
    and some time, in which all could be copied, its tables are stepped whole.

    Attributes:
        lock: held by a step, and by who settles.
        betas: those of each group at the last step: where they change, rows fade by no power.
        thread: that of the last step; ``apart``: how many steps another one still keeps whole, the
            last of them until ``until``.
    """

    __slots__ = ("apart", "betas", "lock", "thread", "until")

    def __init__(self) -> None:
        self.lock = RLock()
        self.betas: dict[int, tuple[float, ...]] = {}
        self.thread = self.apart = 0
        self.until = 0.0

    def begin_step(self) -> None:
        self.thread = get_ident()
        if self.apart > 1 or (self.apart == 1 and monotonic() >= self.until):
            self.apart -= 1

    def note_reader(self) -> None:
        if self.thread not in (0, get_ident()):
            self.apart, self.until = _APART, monotonic() + _APART_SECONDS


_TURNS: WeakKeyDictionary[Optimizer, Turns] = WeakKeyDictionary()


def turns_of(optimizer: Optimizer) -> Turns:
    turns = _TURNS.get(optimizer)
    return _TURNS.setdefault(optimizer, Turns()) if turns is None else turns


class Setting(NamedTuple):
    """How the tables of a group take their next step."""

    rule: Fading
    betas: tuple[float, ...]


@cache
def _fades(setting: Setting) -> Tensor:
    """(moments, K) float32: powers of each beta, for all ages at which a row may still move."""
    rule, betas = setting
    steps = steps_to_rest(rule.shrinks(*betas))
    assert steps is not None
    ages = torch.arange(max(steps, _FADES), dtype=torch.float64)
    powers = [beta**ages if beta == 0.0 else (beta**ages).clamp_(min=_LEAST) for beta in betas]
    return torch.stack(powers).float()


class Ages:
    """When each row of a table last had a gradient, and the moments that it left.

    Attributes:
        last: (rows,) int32: the number of that step; 0: none yet; negative: the row is at rest.
        awake: (blocks of rows,) uint8: whether a row of the block may move.
        setting: the rule, and the betas by which moments fade.
        fades: their powers.
        done: the number of the last step; ``now``: that of the one that runs, or else the same.
        wake: whether that one may move rows at rest.
        moments: each row's as its last gradient left them.
        shrinks: what a step without gradient multiplies the move of a row by.
        lr: what moved rows without gradient in the last step, with the corrections of bias.
        version, place: the table's version counter and its memory after that.
        turns: those of their optimizer.
        settled: whether they are over.
    """

    settled = False

    def __init__(
        self, setting: Setting, moments: Mapping[str, Tensor], done: int, turns: Turns | None = None
    ) -> None:
        """Begin with the moments of a table after ``done`` steps."""
        self.moments: tuple[Tensor, ...] = tuple([moment.detach() for moment in moments.values()])
        self._names = tuple(moments)
        self.turns = Turns() if turns is None else turns
        rows = len(self.moments[0])
        self.last = torch.zeros(rows, dtype=torch.int32)
        self.awake = torch.zeros(-(-rows // _ROWS_OF_BLOCK), dtype=torch.uint8)
        self.setting, self.fades = setting, _fades(setting)
        self.betas, self.lerps = setting.betas, setting.rule.lerps
        self.shrinks = setting.rule.shrinks(*setting.betas)
        self.now = self.done = done
        self.wake = True
        self.lr = self._next_lr = math.inf
        self.place, self.version = 0, -1
        # What no step has been done with is not the optimizer's yet: it may fail.
        self._new = {} if done > 0 else dict(moments)
        # Not asked for again: it may have been switched off when the moments are settled.
        self._kernels = device.extension()
        if done > 0:
            self._kernels.begin_ages(self.moments, self, device.threads())
        self._held = [TensorWeakRef(moment) for moment in moments.values()]
        for moment in moments.values():
            # In this order: another thread that finds a Moment asks for its ages.
            moment.ages = self  # type: ignore[attr-defined]
            moment.__class__ = Moment

    def begin_step(self, weight: Tensor, lr: float) -> None:
        """``lr``: what moves rows without gradient now."""
        # The next move of a row at rest is not larger than the one that was too small, unless the
        # step size grows faster than the moments fade, or somebody has made the weight smaller.
        self.now = self.done + 1
        self.wake = lr * self.shrinks > self.lr or weight._version != self.version
        self._next_lr = lr

    def end_step(self, weight: Tensor, state: State) -> None:
        self.done, self.lr, self.version = self.now, self._next_lr, weight._version
        self.place = weight.data_ptr()
        state.update(self._new)
        self._new = {}

    def fits(self, weight: Tensor) -> bool:
        """Whether it is the table of the last step, which nothing has replaced since."""
        return weight.data_ptr() == self.place and weight.is_contiguous()

    def go_on(self, setting: Setting, steps: float, state: State) -> bool:
        """Whether they are those of ``state``, after so many steps and before one as set."""
        held = [state.get(name) for name in self._names]
        own = all(isinstance(moment, Moment) and moment.ages is self for moment in held)
        return own and self.setting == setting and self.done == steps

    def settle(self) -> None:
        """Bring all moments to the last step, and leave them to others. Waits for a step of another
        thread.
        """
        with self.turns.lock:
            if self.settled:
                return
            self.turns.note_reader()
            self.settled, self.now = True, self.done
            self._kernels.settle_moments(self.moments, self, device.threads())
            for reference in self._held:
                moment = reference()
                if isinstance(moment, Moment):
                    moment.become_ordinary()


class Moment(Tensor):
    """exp_avg, momentum_buffer and the like of a table with ``Ages``: whatever reads or writes its
    numbers finds those that torch's own step would have left, and an ordinary tensor from then on.
    """

    ages: Ages

    def become_ordinary(self: Tensor) -> None:
        self.__class__ = Tensor
        del self.ages  # type: ignore[attr-defined]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = () if func in _ASKS_NO_NUMBERS else tuple(_moments_in((args, kwargs)))
        if found:
            turns = []
            for moment in found:
                # The other one of its table may have settled both, or another thread.
                if (ages := getattr(moment, "ages", None)) is not None:
                    ages.settle()
                    turns.append(ages.turns)
            # No step of another thread makes them moments again meanwhile.
            with turns[0].lock if turns else nullcontext():
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _moments_in(values: Any) -> Iterator[Moment]:
    if isinstance(values, Moment):
        yield values
    elif isinstance(values, dict):
        yield from _moments_in(tuple(values.values()))
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _moments_in(value)


_ASKS_NO_NUMBERS = {
    *(
        getattr(Tensor, name).__get__
        for name in (
            "shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "requires_grad",
            "grad", "grad_fn", "is_leaf", "is_cpu", "is_cuda", "is_meta", "is_sparse", "_version",
        )
    ),
    *(
        getattr(Tensor, name)
        for name in (
            "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride",
            "is_contiguous", "is_floating_point", "is_complex", "storage_offset", "is_shared",
        )
    ),
}  # fmt: skip


def setting_of(optimizer: Optimizer, index: int, rule: Fading) -> tuple[Setting | None, bool]:
    """How tables of group ``index`` take their next step, and whether rows fade by powers in it;
    None: torch's own step.
    """
    group = optimizer.param_groups[index]
    if rule.why_not(group) is not None or device.extension() is None:
        return None, False
    betas = rule.betas(group)
    turns = turns_of(optimizer)
    return Setting(rule, betas), turns.betas.get(index, betas) == betas and not turns.apart


def remember(optimizer: Optimizer, index: int, betas: tuple[float, ...]) -> None:
    """Note the betas with which group ``index`` has been stepped. To be called once a step."""
    turns_of(optimizer).betas[index] = betas


def of(
    optimizer: Optimizer, group: Group, weight: Tensor, grad: RowGrad, setting: Setting | None,
    steady: bool,
) -> Ages | Whole | None:  # fmt: skip
    """How a table of ``group`` takes its next step, with what ``setting_of`` says of the group;
    None: its gradient must be dense, and its moments are settled.
    """
    state: State = optimizer.state.get(weight, {})
    ages = _of_state(state)
    known = ages is not None and ages.fits(weight)
    if (
        setting is None
        or not grad.lazy
        or grad.cell.sparse
        or not (known or why_not_table(weight, setting.rule) is None)
    ):
        if ages is not None:
            ages.settle()
        return None
    if not state and (begun := setting.rule.start(optimizer, group, weight)):
        state = optimizer.state[weight] = begun
    whole = row_whole.size(weight) <= row_whole.limit(setting.rule, group, steady)
    steps = setting.rule.steps(state) if ages is None or "step" in state else ages.done
    if ages is not None and (whole or not ages.go_on(setting, steps, state)):
        ages.settle()
        ages = None
    if ages is not None:
        return ages
    moments = setting.rule.moments(state, weight, len(setting.betas))
    if whole:
        fit = all(row_whole.takes(moment, weight) for moment in moments.values())
        return Whole(setting.betas, moments, steps) if fit else None
    if steps >= _MOST or not all(_is_own(m, weight, setting.rule) for m in moments.values()):
        return None
    if optimizer not in _SETTLING:
        _SETTLING[optimizer] = optimizer.register_state_dict_pre_hook(settle_all)
    return Ages(setting, moments, int(steps), turns_of(optimizer))


def settle_all(optimizer: Optimizer) -> None:
    """Make ordinary tensors of all moments of ``optimizer``."""
    turns = turns_of(optimizer)
    with turns.lock:
        turns.note_reader()
        for state in tuple(optimizer.state.values()):
            if isinstance(state, dict) and (ages := _of_state(state)) is not None:
                ages.settle()


def _of_state(state: State) -> Ages | None:
    return next((held.ages for held in state.values() if isinstance(held, Moment)), None)


def why_not_table(weight: Tensor, rule: Fading) -> str | None:
    """Why a table needs a dense gradient in any group; None if it does not."""
    from recast.runtime.dynamic.table import of as dynamic_table  # here: it imports this package

    if not weight.is_cpu:
        return f"on a GPU {rule.moves}"
    if device.extension() is None:
        return f"without the kernels {rule.moves}"
    if weight.dtype is not torch.float32:
        return "moments are kept in the table's dtype, and rows fade by powers in float32 only"
    plain = type(weight) in (Tensor, Parameter) and weight.layout is torch.strided
    if not plain or weight.dim() != 2 or not weight.is_contiguous() or weight.numel() == 0:
        return "the kernels that step all rows take contiguous matrices only"
    if len(weight) >= _MOST or dynamic_table(weight) is not None:
        return "the kernels that step all rows take plain tables of fewer than 2**30 rows"
    return None


def _is_own(moment: Any, weight: Tensor, rule: Fading) -> bool:
    """Whether nobody else can see the numbers of ``moment``, through a view or another process."""
    if type(moment) is not Tensor or moment.shape != weight.shape:
        return False
    uses = torch._C._storage_Use_Count(moment.untyped_storage()._cdata)  # that call's included
    return uses == 2 and not moment.is_shared() and why_not_table(moment, rule) is None
