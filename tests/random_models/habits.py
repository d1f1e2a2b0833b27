"""How a random model is trained: an optimizer, and what a trainer does around its steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from recast.rewriter.diff.trial import forward, leaves, weighted

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
EVENTS = ("eval", "copy", "saved", "restored", "scaled", "frozen", "thawed", "norms", "half")


@dataclass(frozen=True)
class Habit:
    """``events``: what happens after the step of the same place, several at one place by turns."""

    optimizer: str = "Adagrad"
    groups: bool = False
    scheduler: str | None = None
    clip: str | None = None
    accumulate: int = 1
    zeros: bool = False  # zero_grad(set_to_none=False)
    closure: bool = False
    events: tuple[str, ...] = ()


PLAIN = Habit()


def habits(sparse: bool) -> st.SearchStrategy[Habit]:
    """Any habit; ``sparse``: torch's own gradients are sparse, which few of its parts take."""
    if sparse:
        return st.builds(
            Habit,
            optimizer=st.sampled_from(SPARSE), groups=st.booleans(), zeros=st.just(False),
            scheduler=st.sampled_from((None, *SCHEDULERS)), clip=st.none(),
            accumulate=st.sampled_from((1, 2)), closure=st.booleans(),
            events=st.lists(st.sampled_from(EVENTS[:-2]), max_size=4).map(tuple),
        )  # fmt: skip
    return st.builds(
        Habit,
        optimizer=st.sampled_from(list(OPTIMIZERS)), groups=st.booleans(), zeros=st.booleans(),
        scheduler=st.sampled_from((None, *SCHEDULERS)),
        clip=st.sampled_from((None, None, "norm", "value")), accumulate=st.sampled_from((1, 2)),
        closure=st.booleans(), events=st.lists(st.sampled_from(EVENTS), max_size=4).map(tuple),
    )  # fmt: skip


def trained(
    model: nn.Module, batches: list[tuple[Any, ...]], habit: Habit, steps: int = 4
) -> tuple[nn.Module, Optimizer]:
    """The model and its optimizer after ``steps`` steps; both may be copies."""
    model.train()
    wanted = [p.requires_grad for p in model.parameters()]
    first = list(model.parameters())
    optimizer, scheduler = _made(model, habit)
    try:
        for k in range(steps):
            for part in range(habit.accumulate):
                batch = batches[(k + part) % len(batches)]
                _step(model, optimizer, batch, habit, k, part)
            if scheduler is not None:
                scheduler.step()
            if k < len(habit.events):
                model, optimizer, scheduler = _event(
                    habit.events[k], model, optimizer, scheduler, batches[k % len(batches)], habit
                )
    finally:
        for parameter, records in zip(first, wanted, strict=True):
            parameter.requires_grad_(records)
    return model, optimizer


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


def _event(
    name: str, model: nn.Module, optimizer: Optimizer, scheduler: Any, batch: tuple[Any, ...],
    habit: Habit,
) -> tuple[nn.Module, Optimizer, Any]:  # fmt: skip
    if name == "eval":
        model.eval()
        with torch.no_grad():
            forward(model, batch, 0)
        model.train()
    elif name == "copy":
        return copy.deepcopy((model, optimizer, scheduler))
    elif name == "saved":  # a run that goes on from a checkpoint
        held = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        optimizer, again = _made(model, habit)
        model.load_state_dict(held[0])
        optimizer.load_state_dict(held[1])
        if scheduler is not None:
            again.load_state_dict(scheduler.state_dict())
        return model, optimizer, again
    elif name == "restored":
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
        optimizer.load_state_dict(optimizer.state_dict())
    elif name == "scaled":
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
    elif name in ("frozen", "thawed"):
        next(model.parameters()).requires_grad_(name == "thawed")
    elif name == "norms":  # what a trainer logs
        for p in model.parameters():
            if p.grad is not None:
                p.grad.norm()
    elif name == "half":
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
    return model, optimizer, scheduler
