"""Adam and AdamW on all rows of a table, without a dense gradient.

A row without gradient has g = 0. So k steps after its last gradient, at step t of its table,

    m = β₁ᵏ m₀,  v = β₂ᵏ v₀,  w ← (1 - lr·weight_decay)·w - lr/(1 - β₁ᵗ) · m / (√v/√(1 - β₂ᵗ) + eps)

with the m₀ and v₀ that the gradient left. A row that never had a gradient does not move; any other
moves by about β₁/√β₂ (0.9) times as much as at the step before, until that is too little to change
the weight in fp32: for common settings, after some 150 steps. So a step writes the rows that it
looks up and those that were looked up shortly before, and reads no others, apart from the weight
decay of AdamW. Each row's moments stay those of its last gradient, until there is another one, or
until anybody else reads them (``Moment``). The weights are always those of the last step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adam, Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from recast.runtime import device
from recast.runtime.rows.grad import RowGrad
from recast.runtime.rows.rules import Group, LazyAdam, Numbers, State, step_of

_NAMES = "exp_avg", "exp_avg_sq"
_ROWS_OF_BLOCK = 64  # of csrc/row_ages.h
_MOST = 2**30  # of rows, and of steps
# A row is at rest when its moves have shrunk by this factor, if it has not come to rest before; and
# betas with which that takes too many steps are left to the dense step.
_REST, _MOST_STEPS = 2.0**-64, 8192

# The betas of each group at an optimizer's last step: where they change, rows fade by no power.
_BETAS: WeakKeyDictionary[Optimizer, dict[int, tuple[float, float]]] = WeakKeyDictionary()

# Optimizers whose ``state_dict()`` settles their moments first.
_SETTLING: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()


class WholeAdam(LazyAdam):
    """Steps all rows. Its numbers are those of torch's Adam: eps is not divided by the correction
    of v, as SparseAdam's is.
    """

    exact = True

    def why_not(self, group: Group) -> str | None:
        if group["amsgrad"]:
            return "amsgrad keeps a maximum for every row"
        if group["differentiable"] or group["capturable"]:
            return "differentiable=True and capturable=True need torch's own step"
        if any(isinstance(n, Tensor) and not n.is_cpu for n in (group["lr"], *group["betas"])):
            return "its learning rate or betas are on a device, which is not waited for"
        if group["weight_decay"] != 0 and not group["decoupled_weight_decay"]:
            return "weight_decay adds every row to its gradient (that of AdamW does not)"
        if group["eps"] < 2.0**-100:  # in fp32 close to zero, times the correction of v
            return "eps is 0, and 0/0 makes every untouched row NaN"
        if not math.isfinite(group["lr"]):
            return "a learning rate of infinity or NaN makes every row NaN"
        if _steps_to_rest(*_betas(group)) is None:
            return f"betas={tuple(group['betas'])} let rows move for thousands of steps"
        return None

    def numbers(self, group: Group, steps: float) -> Numbers:
        beta1, beta2 = _betas(group)
        root = math.sqrt(1 - beta2 ** (steps + 1))
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        by = lr * root / (1 - beta1 ** (steps + 1))
        return Numbers(by, float(group["eps"]) * root, (beta1, beta2), lr * decay)


RULE = WholeAdam()


def _betas(group: Group) -> tuple[float, float]:
    beta1, beta2 = group["betas"]
    return float(beta1), float(beta2)


def _steps_to_rest(beta1: float, beta2: float) -> int | None:
    if beta1 == 0.0:
        return 2
    ratio = beta1 / math.sqrt(beta2) if beta2 > 0.0 else 1.0
    if ratio >= 1.0:
        return None
    steps = math.ceil(math.log(_REST) / math.log(ratio))
    return max(2, steps) if steps <= _MOST_STEPS else None


@cache
def _fades(beta1: float, beta2: float) -> Tensor:
    """(2, K) float32: β₁ᵏ and β₂ᵏ for the ages at which a row may still move."""
    steps = _steps_to_rest(beta1, beta2)
    assert steps is not None
    ages = torch.arange(steps, dtype=torch.float64)
    return torch.stack([beta1**ages, beta2**ages]).float()


class Ages:
    """When each row of a table last had a gradient, and the moments that it left.

    Attributes:
        last: (rows,) int32: the number of that step; 0: none yet; negative: the row is at rest.
        awake: (blocks of rows,) uint8: whether a row of the block may move.
        betas, fades: β₁ and β₂, and their powers.
        done: the number of the last step; ``now``: that of the one that runs, or else the same.
        wake: whether that one may move rows at rest.
        moments: exp_avg and exp_avg_sq, each row's as its last gradient left them.
    """

    def __init__(self, state: State, betas: tuple[float, float], done: int) -> None:
        """Begin with the state of a table after ``done`` steps."""
        self.moments: tuple[Tensor, ...] = tuple([state[name].detach() for name in _NAMES])
        rows = len(self.moments[0])
        self.last = torch.zeros(rows, dtype=torch.int32)
        self.awake = torch.zeros(-(-rows // _ROWS_OF_BLOCK), dtype=torch.uint8)
        self.betas, self.fades = betas, _fades(*betas)
        self.now = self.done = done
        self.wake = True
        self._lr, self._version = math.inf, -1
        # Not asked for again: it may have been switched off when the moments are settled.
        self._kernels = device.extension()
        if done > 0:
            self._kernels.begin_ages(*self.moments, self, device.threads())
        self._held = [TensorWeakRef(state[name]) for name in _NAMES]
        for name in _NAMES:
            state[name].__class__ = Moment
            state[name].ages = self

    def begin_step(self, weight: Tensor, lr: float) -> None:
        """``lr``: with the corrections of bias."""
        # The next move of a row at rest is not larger than the one that was too small, unless the
        # step size grows faster than the moments fade, or somebody has made the weight smaller.
        beta1, beta2 = self.betas
        ratio = 0.0 if beta1 == 0.0 else beta1 / math.sqrt(beta2)
        self.now = self.done + 1
        self.wake = lr * ratio > self._lr or weight._version != self._version

    def end_step(self, weight: Tensor, lr: float) -> None:
        self.done, self._lr, self._version = self.now, lr, weight._version

    def settle(self) -> None:
        """Bring all moments to the last step, and leave them to others."""
        self.now = self.done
        self._kernels.settle_moments(*self.moments, self, device.threads())
        for reference in self._held:
            moment = reference()
            if isinstance(moment, Moment):
                moment.become_ordinary()


class Moment(Tensor):
    """exp_avg or exp_avg_sq of a table with ``Ages``: whatever reads or writes its numbers finds
    those that torch's own Adam would have left, and an ordinary tensor from then on.
    """

    ages: Ages

    def become_ordinary(self: Tensor) -> None:
        del self.ages  # type: ignore[attr-defined]
        self.__class__ = Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = () if func in _ASKS_NO_NUMBERS else tuple(_moments_in((args, kwargs)))
        for moment in found:
            if isinstance(moment, Moment):  # the other one of its table may have settled both
                moment.ages.settle()
        if found:
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


def settings(optimizer: Optimizer, index: int) -> tuple[float, float] | None:
    """The betas with which tables of group ``index`` take their next step; None: as a whole. To be
    called once a step.
    """
    group = optimizer.param_groups[index]
    if reason(optimizer, group) is not None or device.extension() is None:
        return None
    betas = _betas(group)
    known = _BETAS.setdefault(optimizer, {})
    before = known.get(index, betas)
    known[index] = betas
    return betas if before == betas else None


def reason(optimizer: Optimizer, group: Group) -> str | None:
    """Why tables of ``group`` need a dense gradient, whatever they are; None if they need not."""
    if not isinstance(optimizer, Adam) or step_of(type(optimizer)) is not step_of(Adam):
        return f"{type(optimizer).__name__} is not fused; Adam, SGD and the Adagrads are"
    return RULE.why_not(group)


def of(
    optimizer: Optimizer, group: Group, weight: Tensor, grad: RowGrad,
    betas: tuple[float, float] | None,
) -> Ages | None:  # fmt: skip
    """The ages of a table of ``group`` for its next step, with the ``settings`` of the group; None:
    its gradient must be dense, and its moments are settled.
    """
    state: State = optimizer.state.get(weight, {})
    held = state.get(_NAMES[0])
    ages = held.ages if isinstance(held, Moment) else None
    fits = betas is not None and grad.lazy and why_not_table(weight) is None
    if fits and not state:
        state = optimizer.state[weight] = RULE.start(optimizer, group, weight)
    steps = float(state["step"]) if fits else 0.0
    if ages is not None and not (fits and ages.betas == betas and ages.done == steps):
        ages.settle()
        ages = None
    if fits and ages is None and steps < _MOST and all(_is_own(state[n], weight) for n in _NAMES):
        assert betas is not None
        ages = Ages(state, betas, int(steps))
        if optimizer not in _SETTLING:
            _SETTLING[optimizer] = optimizer.register_state_dict_pre_hook(settle_all)
    return ages


def settle_all(optimizer: Optimizer) -> None:
    """Make ordinary tensors of all moments of ``optimizer``."""
    for state in optimizer.state.values():
        held = state.get(_NAMES[0]) if isinstance(state, dict) else None
        if isinstance(held, Moment):
            held.ages.settle()


def why_not_table(weight: Tensor) -> str | None:
    """Why a table needs a dense gradient under any Adam; None if it does not."""
    from recast.runtime.dynamic.table import of as dynamic_table  # here: it imports this package

    if not weight.is_cpu:
        return 'on a GPU Adam moves every row at every step (sparse_semantics="lazy" does not)'
    if device.extension() is None:
        return 'without the kernels Adam moves every row (sparse_semantics="lazy" does not)'
    if weight.dtype is not torch.float32:
        return "Adam keeps moments in the table's dtype, and rows fade by powers in float32 only"
    plain = type(weight) in (Tensor, Parameter) and weight.layout is torch.strided
    if not plain or weight.dim() != 2 or not weight.is_contiguous() or weight.numel() == 0:
        return "the kernels of Adam take contiguous matrices only"
    if len(weight) >= _MOST or dynamic_table(weight) is not None:
        return "the kernels of Adam take plain tables of fewer than 2**30 rows"
    return None


def _is_own(moment: Tensor, weight: Tensor) -> bool:
    """Whether nobody else can see the numbers of ``moment``, through a view or another process."""
    uses = torch._C._storage_Use_Count(moment.untyped_storage()._cdata)  # that call's included
    return (
        type(moment) is Tensor
        and why_not_table(moment) is None
        and moment.shape == weight.shape
        and uses == 2
        and not moment.is_shared()
    )
