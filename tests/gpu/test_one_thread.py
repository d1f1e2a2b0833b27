"""The backward of a replayed forward runs in the calling thread; nothing else is made to."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from test_recorded_training import both, ids, net, same_grads, warm

from recast.runtime.recorded.gradients import one_thread
from recast.runtime.recorded.training import ForwardBackward


def on() -> bool:
    """Whether torch's engine may use threads of its own for a backward that is called here."""
    return torch._C._is_multithreading_enabled()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The same in each replayed backward."""
    found: list[bool] = []
    before = ForwardBackward.differentiate

    def differentiate(self: ForwardBackward, *args: Any) -> Any:
        found.append(on())
        return before(self, *args)

    monkeypatch.setattr(ForwardBackward, "differentiate", differentiate)
    return found


def test_from_a_forward_to_the_step(seen: list[bool]) -> None:
    _, twin, fast, _ = net()
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.0)
    other = torch.optim.SGD(twin.parameters(), lr=0.0)
    warm(fast, twin)
    one_thread.end()
    seen.clear()
    for own in (optimizer, other):  # any optimizer: the backward is over by then
        loss = both(fast(ids(6)))
        assert not on()
        loss.backward()
        own.step()
        assert on()
    assert seen == [False] * 2
    both(fast(ids(6)))
    with torch.no_grad():
        fast(ids(6))
    assert on(), "that backward does not come"


def test_who_has_turned_it_off_finds_it_off(seen: list[bool]) -> None:
    _, twin, fast, _ = net()
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.0)
    warm(fast, twin)
    one_thread.end()
    with torch.autograd.set_multithreading_enabled(False):
        for k in range(2):
            both(fast(ids(6, k))).backward()
            optimizer.step()
            assert not on()
    assert on()


def test_another_thread_keeps_its_own(seen: list[bool]) -> None:
    """Forward here, backward there."""
    model, twin, fast, _ = net()
    warm(fast, twin)
    for one in (fast, twin):
        one.zero_grad()
    seen.clear()
    loss = both(fast(ids(6)))
    thread = threading.Thread(target=lambda: loss.backward())
    thread.start()
    thread.join()
    assert seen == [True]
    both(twin(ids(6))).backward()
    same_grads(model, twin)
    one_thread.end()
    assert on()


def test_an_optimizer_that_steps_in_a_hook(seen: list[bool]) -> None:
    """Nothing is switched inside a pass: torch restores what it found at its start."""
    _, twin, fast, _ = net()
    warm(fast, twin)
    one_thread.end()
    optimizers = [torch.optim.SGD([p], lr=0.0) for p in fast.parameters()]
    for p, own in zip(fast.parameters(), optimizers, strict=True):
        p.register_post_accumulate_grad_hook(lambda _, own=own: own.step())  # type: ignore[misc]
    both(fast(ids(6))).backward()
    with torch.no_grad():
        fast(ids(6))
    assert on()
