"""mode="graph" in a training loop left as it is: forward and backward replayed, the same numbers.

Kernels run on the emulator; the recorder is the tape, which repeats what CUDA graphs would.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
import torch.nn.functional as F
from test_recorded_models import Ragged, batches
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning, UsageError
from recast.runtime import tolerances
from recast.runtime.ranks import late_optimizers
from recast.runtime.recorded.forward import RecordedForward
from recast.runtime.recorded.training_step import TrainingStep
from recast.runtime.rows.grad import RowGrad

sys.path.insert(0, str(Path(__file__).parent))
from tape import Pairs, TapeRecorder

LOSS = F.binary_cross_entropy_with_logits


def recorded(model: nn.Module, example: Any, *optimizers: torch.optim.Optimizer) -> tuple:
    """The optimised model under mode="graph", and its recorder of forwards with gradients."""
    fast = recast.optimize(model, *optimizers[:1], example=example)
    fast = fast[0] if optimizers else fast
    training = Pairs(*optimizers)
    vars(fast)["_replays"] = RecordedForward(fast, TapeRecorder(), training)
    return fast, training


def step(model: nn.Module, optimizer: Any, inputs: Any, label: Tensor, order: str, k: int) -> None:
    label = label.to(next(model.parameters()).dtype)
    if order == "before":
        optimizer.zero_grad()
    elif order == "zeros":
        optimizer.zero_grad(set_to_none=False)
    loss = LOSS(model(*inputs), label)
    if order == "between":
        optimizer.zero_grad()
    loss.backward()
    if order == "accumulated" and k % 2 == 0:
        return
    if order == "clipped":
        nn.utils.clip_grad_norm_(model.parameters(), 0.02)
    optimizer.step()
    if order not in ("before", "zeros", "between"):
        optimizer.zero_grad()


def train(make: Any, data: list[Any], order: str) -> Pairs:
    """The same loop over the recorded model, the plain one and the plain one in float64."""
    torch.manual_seed(0)
    plain = Ragged()
    wide, twin = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    optimizers = [make(net.parameters()) for net in (twin, plain, wide)]
    with emulated_gpu.serve() as emulated:
        fast, recorder = recorded(twin, data[0][0], optimizers[0])
        for k, (inputs, label) in enumerate(data):
            step(fast, optimizers[0], inputs, label, order, k)
    assert any("embedding" in name for name in emulated.launched)
    for net, own in zip((plain, wide), optimizers[1:], strict=True):
        for k, (inputs, label) in enumerate(data):
            step(net, own, inputs, label, order, k)
    for a, b, c in zip(twin.parameters(), plain.parameters(), wide.parameters(), strict=True):
        assert tolerances.excess(a, b, c) <= tolerances.CHAIN
    return recorder


LATER = ("before", "after", "clipped", "zeros")


@pytest.mark.parametrize(
    "order",
    ["between", "accumulated", *(pytest.param(order, marks=pytest.mark.long) for order in LATER)],
)
def test_any_loop_gives_the_numbers_of_the_plain_model(order: str) -> None:
    recorder = train(lambda p: torch.optim.Adagrad(p, lr=0.1), batches(8), order)
    # A pair, and a step where gradients are those of one backward; 3 of each after the first.
    steps = order not in ("accumulated", "clipped", "zeros")
    assert recorder.recordings == 2 + steps and recorder.replays >= 6 + 3 * steps


def test_gradients_that_are_kept_stay_as_they_were() -> None:
    data = batches(6)
    model = Ragged()
    kept, expected = [], []
    with emulated_gpu.serve():
        fast, recorder = recorded(model, data[0][0], torch.optim.SGD(model.parameters(), lr=0.1))
        for inputs, label in data:
            LOSS(fast(*inputs), label).backward()
            kept.append([p.grad for p in fast.parameters()])
            fast.zero_grad()
        assert recorder.recordings == 2
        assert isinstance(kept[-1][0], RowGrad) and kept[-1][0].lazy
        norms = [torch.nn.utils.get_total_norm(grads) for grads in kept]
    plain = copy.deepcopy(model)
    for inputs, label in data:
        plain.zero_grad()
        LOSS(plain(*inputs), label).backward()
        expected.append([p.grad for p in plain.parameters()])
    for ours, theirs, norm in zip(kept, expected, norms, strict=True):
        torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(theirs))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a + 0, b)


class Net(nn.Module):
    """Several results, one without a gradient; a parameter that nothing reads; batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(30, 4)
        self.deep = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.unread = nn.Parameter(torch.zeros(3))

    def forward(self, ids: Tensor) -> dict[str, Any]:
        rows = self.emb(ids)
        return {"out": self.deep(rows.flatten(1)), "sum": rows.sum((1, 2)), "ids": ids + 1}


def ids(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(30, (rows, 3), generator=torch.Generator().manual_seed(seed))


def net() -> tuple[Net, Net, nn.Module, Pairs]:
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    fast = recast.optimize(model, example=ids(6), passes=())
    recorder = Pairs()
    vars(fast)["_replays"] = RecordedForward(fast, TapeRecorder(), recorder)
    return model, twin, fast, recorder


def same_grads(model: nn.Module, twin: nn.Module) -> None:
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


def both(results: dict[str, Any], weight: float = 1.0) -> Tensor:
    return results["out"].square().sum() + weight * results["sum"].pow(3).sum()


def warm(fast: nn.Module, twin: nn.Module, times: int = 5) -> None:
    for k in range(times):
        for one in (fast, twin):
            one.zero_grad()
            both(one(ids(6, k))).backward()


def test_several_results_and_buffers() -> None:
    model, twin, fast, recorder = net()
    warm(fast, twin)
    assert recorder.recordings == 2
    for k in range(4):
        for one in (fast, twin):
            one.zero_grad()
            found = one(ids(6, 10 + k))
            assert torch.equal(found["ids"], ids(6, 10 + k) + 1) and not found["ids"].requires_grad
            (both(found) if k % 2 else found["out"].exp().sum()).backward()  # or of one result
        same_grads(model, twin)
    torch.testing.assert_close(fast.deep[1].running_var, twin.deep[1].running_var)
    assert int(fast.deep[1].num_batches_tracked) == 9


class Labelled(Net):
    """Its forward takes labels to train, and none to be evaluated."""

    def forward(self, ids: Tensor, label: Tensor | None = None) -> Any:
        out = super().forward(ids)["out"][:, 0]
        return out.sigmoid() if label is None else LOSS(out, label)


def test_each_form_of_call_has_recordings_of_its_own() -> None:
    torch.manual_seed(0)
    model = Labelled()
    twin = copy.deepcopy(model)
    example = ids(6), torch.rand(6).round()
    fast = recast.optimize(model, example=example, forms=[example[:1]], passes=())
    forwards, pairs = TapeRecorder(), Pairs()
    vars(fast)["_replays"] = RecordedForward(fast, forwards, pairs)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (fast, twin)]
    for k in range(8):
        found = []
        for one, opt in zip((fast, twin), optimizers, strict=True):
            opt.zero_grad()
            one.train()(ids(6, k), torch.arange(6.0) % 2).backward()
            opt.step()
            with torch.no_grad():
                found.append(one.eval()(ids(6, k)))
        torch.testing.assert_close(*found)
    assert (forwards.recordings, forwards.replays, pairs.recordings) == (1, 5, 3)


def test_two_forwards_before_a_backward() -> None:
    """The second runs as always, whichever comes first then."""
    model, twin, fast, recorder = net()
    warm(fast, twin)
    replays = recorder.replays
    for one in (fast, twin):
        one.zero_grad()
        first, second = one(ids(6, 7)), one(ids(6, 8))
        both(second, 2.0).backward()
        both(first).backward()
    same_grads(model, twin)
    assert recorder.replays == replays + 2
    for one in (fast, twin):
        one.zero_grad()
        (both(one(ids(6, 7))) * both(one(ids(6, 8)))).backward()
    same_grads(model, twin)
    for _ in range(2):  # a forward that is dropped is no longer under way
        assert fast(ids(6)) is not None
    assert recorder.replays == replays + 2 + 2 + 2


def test_a_forward_without_gradients_in_between() -> None:
    model, twin, fast, _ = net()
    warm(fast, twin)
    for one in (fast, twin):
        one.zero_grad()
        loss = both(one(ids(6, 7)))
        with torch.no_grad():
            for _ in range(5):
                one.eval()(ids(6, 9))
        one.train()
        loss.backward()
    same_grads(model, twin)


def test_a_second_backward_is_refused() -> None:
    _, twin, fast, _ = net()
    warm(fast, twin)
    loss = both(fast(ids(6)))
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="a second backward through one forward"):
        loss.backward()
    with pytest.raises(UsageError, match="create_graph"):
        torch.autograd.grad(both(fast(ids(6))), list(fast.parameters()), create_graph=True,
                            allow_unused=True)  # fmt: skip


def test_what_is_not_recorded() -> None:
    """Nothing to train, an input with a gradient, a whole step, a hook: as always."""
    _, twin, fast, recorder = net()
    warm(fast, twin, 2)
    with emulated_gpu.serve():
        whole = TrainingStep(fast, lambda r: both(r), torch.optim.SGD(fast.parameters(), lr=0.0),
                             recorder=TapeRecorder())  # fmt: skip
        for k in range(6):
            whole(ids(6, k))
    assert whole.recorded == 1 and recorder.recordings == 0
    for p in fast.parameters():
        p.requires_grad_(False)
    for k in range(5):
        fast(ids(6, k))
    assert recorder.recordings == 0


def test_beside_tables_spread_over_ranks() -> None:
    """Recording works although every optimizer of the process is hooked."""
    late_optimizers.start()
    test_what_is_not_recorded()


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.detach().abs().sum()) >= 0 else x


def test_what_waits_for_the_device_runs_as_always() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Reads())
    run = RecordedForward(model, TapeRecorder(), Pairs())
    x = torch.randn(2, 3)
    with pytest.warns(RecastWarning, match='mode="graph" runs without being recorded'):
        for _ in range(6):
            model.zero_grad()
            run(lambda args, kwargs: model(*args, **kwargs), (x,), {}).sum().backward()
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)


def test_an_input_with_a_gradient() -> None:
    model = nn.Linear(3, 3)
    recorder = Pairs()
    run = RecordedForward(model, TapeRecorder(), recorder)
    x = torch.randn(2, 3, requires_grad=True)
    for _ in range(6):
        run(lambda args, kwargs: model(*args, **kwargs), (x,), {}).sum().backward()
    assert recorder.recordings == 0 and x.grad is not None


@pytest.mark.long
def test_a_scaled_loss() -> None:
    """GradScaler reads and unscales the gradients of a replay like any others."""
    data = batches(9)
    torch.manual_seed(0)
    plain = Ragged()
    models = [copy.deepcopy(plain), plain]
    with emulated_gpu.serve():
        found = []
        for k, model in enumerate(models):
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
            net, recorder = recorded(model, data[0][0], optimizer) if k == 0 else (model, None)
            for j, (inputs, label) in enumerate(data):
                optimizer.zero_grad()
                loss = LOSS(net(*inputs), label) * (float("inf") if j == 6 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            found.append(scaler.get_scale())
            assert recorder is None or recorder.recordings == 2
    assert found[0] == found[1]
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
