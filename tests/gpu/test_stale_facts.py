"""Changes between replays in which no tensor changes: constants and objects of a batch, attributes,
settings and hooks of modules, lists of an optimizer, and what else reads the batch.
"""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulated_gpu
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning
from recast.runtime.gpu import copies
from recast.runtime.recorded.batches.batch import key_of
from recast.runtime.recorded.forward import RecordedForward
from recast.runtime.recorded.training_step import TrainingStep

sys.path.insert(0, str(Path(__file__).parent))
from tape import Pairs, TapeRecorder

ROWS = 20
LABEL = torch.ones(6)


@pytest.fixture(autouse=True)
def served() -> Iterator[None]:
    """The tape notes the emulator's launches, but does not see what the CPU's kernels do."""
    with emulated_gpu.serve():
        yield


class Box:
    """An object of a batch, which may be written to."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Net(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.rows, self.norm, self.top = nn.Embedding(ROWS, 4), nn.LayerNorm(4), nn.Linear(4, 1)
        self.scale = 1.0
        beside = torch.eye(4)
        self.register_buffer("beside", beside.to_sparse() if sparse else beside)

    def forward(self, ids: Tensor, other: Any = 1.0) -> Tensor:
        out = self.top(self.norm(self.rows(ids))).squeeze(1) * self.scale
        if isinstance(other, float):
            return out + torch.ones(len(out)).copysign(torch.full((len(out),), other))
        value = other.value if isinstance(other, Box) else float(other[0])
        return out * value


def ids(k: int, most: int = ROWS) -> Tensor:
    return torch.randint(most, (6,), generator=torch.Generator().manual_seed(k))


class Way:
    """Calls of a model, recorded in one way: ``run(ids, other)`` gives what the model gives."""

    def __init__(self, name: str, model: Any, *example: Any, plain: bool = False) -> None:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.name, self.fast = name, model
        if not plain:
            self.fast, _ = recast.optimize(model, self.optimizer, example=(ids(0), *example))
        if name == "step":
            recorder = TapeRecorder(self.optimizer)
            loss = F.binary_cross_entropy_with_logits
            self.step = TrainingStep(self.fast, loss, self.optimizer, recorder=recorder)
        else:
            self.recorder = TapeRecorder()
            forward = RecordedForward(self.fast, self.recorder, Pairs(self.optimizer))
            vars(self.fast)["_replays"] = forward

    def same(self, plain: Callable[..., Tensor], *batch: Any) -> None:
        expected = plain(*batch).detach()
        if self.name == "step":
            found = self.step(batch, LABEL)
            expected = F.binary_cross_entropy_with_logits(expected, LABEL)
        elif self.name == "eval":
            with torch.no_grad():
                found = self.fast(*batch)
        else:
            found = self.fast(*batch)
            found.sum().backward()
            self.optimizer.zero_grad()
        torch.testing.assert_close(found.detach(), expected)


WAYS = pytest.mark.parametrize("way", ["eval", "train", "step"])


def test_zeros_of_two_signs() -> None:
    way = Way("step", model := Net(), plain=True)
    for k in range(10):
        way.same(model, ids(k), -0.0 if k > 6 and k % 2 else 0.0)
    assert key_of(float("nan")) == key_of(-float("nan") * 0)
    assert key_of(1) != key_of(True) != key_of(1.0) and key_of(complex(0, -0.0)) != key_of(0j)


@WAYS
@pytest.mark.parametrize("kind", ["array", "tensor in an object", "object"])
def test_objects_that_are_written_to(way: str, kind: str) -> None:
    array = np.ones(6, np.float32)
    other: Any = array if kind == "array" else Box(torch.ones(6) if "tensor" in kind else 1.0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RecastWarning)
        run = Way(way, model := Net(), other)
        for k in range(8):
            array[:] = k
            if isinstance(other, Box):
                other.value = torch.full((6,), float(k)) if "tensor" in kind else float(k)
            run.same(lambda *batch: Net.forward(model, *batch), ids(k), other)
    assert any("may be written to" in str(w.message) for w in told)


def doubled(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda m: setattr(m, "scale", 3.0),
    "setting": lambda m: setattr(m.norm, "eps", 5.0),
    "forward": lambda m: setattr(m.top, "forward", lambda x: x.sum(1, keepdim=True)),
    "hook": lambda m: m.top.register_forward_hook(doubled),
}


@WAYS
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore::recast.errors.RecastWarning")
def test_modules_that_are_changed(way: str, change: str) -> None:
    run = Way(way, Net())
    for k in range(8):
        run.same(lambda *batch: Net.forward(run.fast._root, *batch), ids(k))
    before = 0 if way == "step" else run.recorder.replays
    CHANGES[change](run.fast)
    for k in range(4):
        run.same(lambda *batch: Net.forward(run.fast._root, *batch), ids(k))
    assert way != "eval" or before > 0


class Outer(nn.Module):
    """Its own forward is not captured; that of the inner module is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor = Net(), 1.0
        self.factors, self.named, self.offset = [1.0], {"factor": 1.0}, torch.zeros(1)
        self.bend: Callable[[Tensor], Tensor] = torch.tanh

    def forward(self, ids: Tensor, other: Any = 1.0) -> Tensor:
        assert type(ids) is Tensor, "no tracer"
        return self.around(self.inner(ids, other))

    def around(self, x: Tensor) -> Tensor:
        factor = self.factor * self.factors[0] * self.named["factor"]
        return self.bend(x * factor + self.offset)


OF_PARTS: dict[str, Callable[[Any], Any]] = {
    "attribute of a part": lambda m: setattr(m.inner, "scale", 3.0),
    "attribute": lambda m: setattr(m, "factor", 3.0),
    "a list": lambda m: m.factors.__setitem__(0, 3.0),
    "another list": lambda m: setattr(m, "factors", [3.0]),
    "a dict": lambda m: m.named.update(factor=3.0),
    "another tensor": lambda m: setattr(m, "offset", torch.ones(1)),
    "another function": lambda m: setattr(m, "bend", torch.sigmoid),
}


@WAYS
@pytest.mark.parametrize("change", OF_PARTS)
@pytest.mark.filterwarnings("ignore::recast.errors.RecastWarning")
def test_modules_that_are_captured_in_part(way: str, change: str) -> None:
    run = Way(way, Outer())
    root = run.fast._root
    assert set(run.fast.parts) == {"inner"}
    plain = lambda *batch: root.around(Net.forward(root.inner, *batch))  # noqa: E731
    for k in range(8):
        run.same(plain, ids(k))
    before = 0 if way == "step" else run.recorder.replays
    OF_PARTS[change](run.fast)
    for k in range(4):
        run.same(plain, ids(k))
    assert way != "eval" or before > 0


@WAYS
@pytest.mark.filterwarnings("ignore:.*without being recorded.*SparseTensorImpl")
def test_a_sparse_buffer(way: str) -> None:
    run = Way(way, model := Net(sparse=True))
    for k in range(6):
        run.same(lambda *batch: Net.forward(model, *batch), ids(k))


@pytest.mark.parametrize("who", ["hook", "forward"])
def test_who_else_is_given_the_batch_of_a_step_reads_int64(who: str) -> None:
    """A hook may be torch's own, as those that compute weights: such steps are recorded."""
    seen = []

    def hashed(ids: Tensor) -> Tensor:
        seen.append(ids.dtype)
        return ids * 2654435761 % ROWS

    model = Net()
    run = Way("step", model)
    if who == "hook":
        hook = lambda m, args: (hashed(args[0]),)  # noqa: E731
        hook.__module__ = "torch.nn.utils.of_a_test"
        run.fast.register_forward_pre_hook(hook)
    else:
        inner = run.fast.forward
        run.fast.forward = lambda ids: inner(hashed(ids))
    for k in range(7):
        many = ids(k, 2**40)
        run.same(lambda x: Net.forward(model, x * 2654435761 % ROWS), many)
    assert run.step.recorded == 1 and set(seen) == {torch.int64}


def test_a_list_of_an_optimizer_that_is_written_to() -> None:
    found = []
    for listed in (True, False):
        torch.manual_seed(0)
        optimizer = torch.optim.Adam((model := Net()).parameters(), lr=0.1)
        fast, _ = recast.optimize(model, optimizer, example=ids(0), sparse_semantics="lazy")
        vars(fast)["_replays"] = RecordedForward(fast, TapeRecorder(), Pairs(optimizer))
        betas = [0.9, 0.99]
        (group,) = optimizer.param_groups
        for k in range(14):
            betas[0] = 0.1 if k > 8 else 0.9
            group["betas"] = betas if listed else tuple(betas)
            optimizer.zero_grad()
            fast(ids(k)).square().sum().backward()
            optimizer.step()
        found.append(model.top.weight.detach())
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_replaced_module_lives_while_a_recording_knows_its_id() -> None:
    run = Way("step", model := Net(), plain=True)
    for k in range(5):
        run.step((ids(k),), LABEL)
    gone = weakref.ref(model.norm)
    model.norm = nn.LayerNorm(4)
    for k in range(6):  # of another form: the first recording stays
        run.step((ids(k)[:3],), LABEL[:3])
    gc.collect()
    assert run.step.recorded == 2 and gone() is not None
    for k in range(4):
        run.step((ids(k),), LABEL)
    gc.collect()
    assert gone() is None


def test_a_recording_is_freed_before_the_next_of_its_form_is_made() -> None:
    run = Way("step", Net(), plain=True)
    held, begin, alive = run.step._recordings._recorded, run.step.begin, []

    def seen(made: Any) -> Any:
        alive.append(gone())
        return begin(made)

    for k in range(5):
        run.step((ids(k),), LABEL)
    gone = weakref.ref(next(iter(held.values())).recording)
    run.step.begin = seen  # type: ignore[method-assign]
    run.optimizer.param_groups[0]["momentum"] = 0.5
    for k in range(4):
        run.step((ids(k),), LABEL)
    assert alive == [None]


def test_rooms_are_made_while_another_thread_looks_for_one() -> None:
    class Held:
        """A maker of copies, as far as it is known."""

        def originals_at(self, address: int) -> None:
            return None

    number, errors, done = torch.zeros(1, dtype=torch.int32), [], threading.Event()

    def look() -> None:
        try:
            while not done.is_set():
                copies.move_to_own_memory([number])
        except RuntimeError as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=look)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        held = []
        for _ in range(3000):
            held.append(Held())
            copies._register(held[-1])  # type: ignore[arg-type]
    finally:
        sys.setswitchinterval(interval)
        done.set()
        thread.join()
    assert not errors
