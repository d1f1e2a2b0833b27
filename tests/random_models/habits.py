"""How a random model is trained: an optimizer, and what a trainer does around its steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from recast.rewriter.diff.model_runs import forward, leaves, weighted

Make = Callable[[list[dict[str, Any]]], Optimizer]

# Where state starts from nothing, an epsilon of the size of a gradient: without one, the first step
# of Adam and its like is the sign of the gradient, and that of a true zero is rounding's.
_O = torch.optim
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda g: _O.SGD(g, lr=0.1),
    "momentum": lambda g: _O.SGD(g, lr=0.05, momentum=0.9, nesterov=True),
    "decayed": lambda g: _O.SGD(g, lr=0.1, weight_decay=0.01),
    "Adagrad": lambda g: _O.Adagrad(g, lr=0.05, initial_accumulator_value=0.1),
    "Adagrad, decays": lambda g: _O.Adagrad(
        g, lr=0.05, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.1
    ),
    "Adam": lambda g: _O.Adam(g, lr=0.02, eps=0.1),
    "Adam, decayed": lambda g: _O.Adam(g, lr=0.02, eps=0.1, weight_decay=0.01, amsgrad=True),
    "AdamW": lambda g: _O.AdamW(g, lr=0.02, eps=0.1, foreach=False),
    "Adam, fused": lambda g: _O.Adam(g, lr=0.02, eps=0.1, fused=True),
    "SGD, fused": lambda g: _O.SGD(g, lr=0.1, fused=True),
    "RMSprop": lambda g: _O.RMSprop(g, lr=0.02, eps=0.3, momentum=0.5),
    "Adadelta": lambda g: _O.Adadelta(g, lr=0.5, eps=0.1),
    "NAdam": lambda g: _O.NAdam(g, lr=0.02, eps=0.1),
    "maximised": lambda g: _O.SGD(g, lr=0.1, maximize=True),
}
SPARSE = ("SGD", "Adagrad")  # those that take torch's sparse gradients
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "warm": lambda o: lr_scheduler.LambdaLR(o, lambda k: (k + 1) / 4),
}


@dataclass(frozen=True)
class Habit:
    """How a trainer works. ``events[k]`` happens after step k."""

    optimizer: str = "Adagrad"
    groups: bool = False
    scheduler: str | None = None
    clip: str | None = None
    accumulate: int = 1
    zeros: bool = False  # zero_grad(set_to_none=False)
    closure: bool = False
    events: tuple[str, ...] = ()


PLAIN = Habit()


class Run(NamedTuple):
    """A training in progress; an event may put copies in the place of its parts."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    habit: Habit


def habits(sparse: bool) -> st.SearchStrategy[Habit]:
    """Any habit; ``sparse``: torch's own gradients are sparse, which few of its parts take."""
    if sparse:
        events = [name for name in EVENTS if name not in OF_DENSE]
        return st.builds(
            Habit,
            optimizer=st.sampled_from(SPARSE), groups=st.booleans(), zeros=st.just(False),
            scheduler=st.sampled_from((None, *SCHEDULERS)), clip=st.none(),
            accumulate=st.sampled_from((1, 2)), closure=st.booleans(),
            events=st.lists(st.sampled_from(events), max_size=4).map(tuple),
        )  # fmt: skip
    return st.builds(
        Habit,
        optimizer=st.sampled_from(list(OPTIMIZERS)), groups=st.booleans(), zeros=st.booleans(),
        scheduler=st.sampled_from((None, *SCHEDULERS)),
        clip=st.sampled_from((None, None, "norm", "value")), accumulate=st.sampled_from((1, 2)),
        closure=st.booleans(),
        events=st.lists(st.sampled_from(list(EVENTS)), max_size=4).map(tuple),
    )  # fmt: skip


def trained(
    model: nn.Module, batches: list[tuple[Any, ...]], habit: Habit, steps: int = 4
) -> tuple[nn.Module, Optimizer]:
    """The model and its optimizer after ``steps`` steps; both may be copies."""
    model.train()
    wanted = [p.requires_grad for p in model.parameters()]
    first = list(model.parameters())
    run = Run(model, *_made(model, habit), habit)
    try:
        for k in range(steps):
            for part in range(habit.accumulate):
                batch = batches[(k + part) % len(batches)]
                _step(run.model, run.optimizer, batch, habit, k, part)
            if run.scheduler is not None:
                run.scheduler.step()
            if k < len(habit.events):
                run = EVENTS[habit.events[k]](run, batches[k % len(batches)])
    finally:
        for parameter, records in zip(first, wanted, strict=True):
            parameter.requires_grad_(records)
    return run.model, run.optimizer


def _made(model: nn.Module, habit: Habit) -> tuple[Optimizer, Any]:
    every = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": every}]
    if habit.groups and len(every) > 1:
        groups = [{"params": every[::2]}, {"params": every[1::2], "lr": 0.03}]
    optimizer = OPTIMIZERS[habit.optimizer](groups)
    return optimizer, SCHEDULERS[habit.scheduler](optimizer) if habit.scheduler else None


def _step(
    model: nn.Module, optimizer: Optimizer, batch: tuple[Any, ...], habit: Habit, k: int, part: int
) -> None:
    """One forward and backward; the last of an accumulation updates."""
    if part == 0:
        optimizer.zero_grad(set_to_none=not habit.zeros)
    last = part == habit.accumulate - 1

    def backward() -> Tensor | None:
        loss = weighted(leaves(forward(model, batch, k)).values(), k)
        if loss is not None and loss.requires_grad:
            (loss / habit.accumulate).backward()
        if last and habit.clip == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        elif last and habit.clip == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
        return loss

    if last and habit.closure:
        optimizer.step(backward)  # type: ignore[arg-type]
    else:
        backward()
        if last:
            optimizer.step()


# ---------------------------------------------------------------- between steps


def _evaluated(run: Run, batch: tuple[Any, ...]) -> Run:
    run.model.eval()
    with torch.no_grad():
        forward(run.model, batch, 0)
    run.model.train()
    return run


def _copied(run: Run, batch: tuple[Any, ...]) -> Run:
    return Run(*copy.deepcopy((run.model, run.optimizer, run.scheduler)), run.habit)


def _saved(run: Run, batch: tuple[Any, ...]) -> Run:
    """A run that goes on from a checkpoint."""
    held = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    with torch.no_grad():
        for p in run.model.parameters():
            p.zero_()
    optimizer, scheduler = _made(run.model, run.habit)
    run.model.load_state_dict(held[0])
    optimizer.load_state_dict(held[1])
    if run.scheduler is not None:
        scheduler.load_state_dict(run.scheduler.state_dict())
    return Run(run.model, optimizer, scheduler, run.habit)


def _restored(run: Run, batch: tuple[Any, ...]) -> Run:
    run.model.load_state_dict({k: v.clone() for k, v in run.model.state_dict().items()})
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    return run


def _scaled(run: Run, batch: tuple[Any, ...]) -> Run:
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(0.9)
    return run


def _frozen(run: Run, batch: tuple[Any, ...]) -> Run:
    next(run.model.parameters()).requires_grad_(False)
    return run


def _thawed(run: Run, batch: tuple[Any, ...]) -> Run:
    next(run.model.parameters()).requires_grad_(True)
    return run


def _norms(run: Run, batch: tuple[Any, ...]) -> Run:
    """What a trainer logs."""
    for grad in _grads(run.model):
        grad.norm()
    return run


def _halved(run: Run, batch: tuple[Any, ...]) -> Run:
    for grad in _grads(run.model):
        grad.mul_(0.5)
    return run


def _grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


EVENTS: dict[str, Callable[[Run, tuple[Any, ...]], Run]] = {
    "eval": _evaluated,
    "copy": _copied,
    "saved": _saved,
    "restored": _restored,
    "scaled": _scaled,
    "frozen": _frozen,
    "thawed": _thawed,
    "norms": _norms,
    "half": _halved,
}
OF_DENSE = ("norms", "half")  # events that torch's sparse gradients do not take
