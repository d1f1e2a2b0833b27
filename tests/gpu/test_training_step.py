"""TrainingStep: what is replayed gives the numbers of the plain loop, whatever changes on the way.

The recorder is the tape, which repeats what a CUDA graph would; `make gpu-check` runs the same with
CUDA graphs.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning, UsageError
from recast.runtime.recorded.training_step import TrainingStep

sys.path.insert(0, str(Path(__file__).parent))
from tape import TapeRecorder


class Net(nn.Module):
    """Bags cut by offsets, a dense part, batch norm."""

    def __init__(self, dropout: float = 0.0, sparse: bool = False) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(50, 8, mode="sum", include_last_offset=True, sparse=sparse)
        self.top = nn.Sequential(
            nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1)
        )

    def forward(self, dense: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.top(torch.cat([dense, self.bags(ids, offsets)], 1)).squeeze(1)


def batches(count: int, rows: int = 6, ids: int | None = 12, seed: int = 0) -> Iterator[Any]:
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        n = int(torch.randint(8, 40, (), generator=g)) if ids is None else ids
        cuts = torch.randint(n + 1, (rows - 1,), generator=g).sort().values
        offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([n])])
        inputs = (
            torch.randn(rows, 4, generator=g),
            torch.randint(50, (n,), generator=g),
            offsets,
        )
        yield inputs, torch.rand(rows, generator=g).round()


def plain_loop(model: nn.Module, optimizer: Any, data: Any, between: Any = None) -> list[Tensor]:
    losses = []
    for k, (inputs, labels) in enumerate(data):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(*inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if between is not None:
            between(k, model, optimizer)
    return losses


def both(
    make: Callable[[Any], torch.optim.Optimizer],
    data: list[Any],
    between: Callable[[int, nn.Module, Any], None] | None = None,
    *,
    net: type[Net] = Net,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    **options: Any,
) -> tuple[TrainingStep, TapeRecorder, nn.Module]:
    """Train twins with a plain loop and with TrainingStep, and compare everything.

    On a GPU, CUDA graphs are recorded, and the recorder that is returned is not used.
    """
    torch.manual_seed(3)
    plain = net().to(device, dtype)
    fast = copy.deepcopy(plain)
    data = [
        ((d.to(device, dtype), *(r.to(device) for r in rest)), y.to(device, dtype))
        for (d, *rest), y in data
    ]
    optimizers = make(plain.parameters()), make(fast.parameters())
    recorder = TapeRecorder(optimizers[1])
    loss = F.binary_cross_entropy_with_logits
    options |= {} if device == "cuda" else {"recorder": recorder}
    step = TrainingStep(fast, loss, optimizers[1], **options)
    expected = plain_loop(plain, optimizers[0], data, between)
    for k, (inputs, labels) in enumerate(data):
        torch.testing.assert_close(step(inputs, labels), expected[k])
        assert all(p.grad is None for p in fast.parameters())
        if between is not None:
            between(k, fast, optimizers[1])
    for a, b in zip(plain.state_dict().values(), fast.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)
    for p, q in zip(plain.parameters(), fast.parameters(), strict=True):
        ours, theirs = optimizers[1].state[q], optimizers[0].state[p]
        assert ours.keys() == theirs.keys()
        for name in ours:
            if isinstance(ours[name], Tensor):
                torch.testing.assert_close(ours[name], theirs[name])
            else:
                assert ours[name] == theirs[name]
    return step, recorder, fast


SGD, ADAGRAD = torch.optim.SGD, torch.optim.Adagrad


@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=0.1),
        lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
        lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
        lambda p: ADAGRAD(p, lr=0.05),
        lambda p: ADAGRAD(p, lr=0.05, lr_decay=0.1, weight_decay=0.01, maximize=True),
    ],
    ids=["sgd", "momentum", "nesterov-maximize", "adagrad", "adagrad-decay"],
)
def test_the_numbers_of_the_plain_loop(make: Any) -> None:
    _, recorder, _ = both(make, list(batches(9)))
    assert (recorder.recordings, recorder.replays) == (1, 5)


def test_a_schedule_of_every_step_is_seen_without_recording_anew() -> None:
    def between(k: int, model: nn.Module, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (k + 2)

    _, recorder, _ = both(lambda p: ADAGRAD(p, lr=0.1), list(batches(9)), between)
    assert (recorder.recordings, recorder.replays) == (1, 5)


def test_a_recording_for_each_form_of_batch() -> None:
    data = [*batches(6), *batches(6, rows=5, seed=1), *batches(3, seed=2)]
    step, recorder, _ = both(lambda p: SGD(p, lr=0.1), data)
    assert (recorder.recordings, recorder.replays, step.recorded) == (2, 7, 2)


def test_the_one_not_used_for_longest_goes() -> None:
    data = [*batches(5), *batches(5, rows=5), *batches(5, rows=4), *batches(2, rows=5)]
    step, recorder, _ = both(lambda p: SGD(p, lr=0.1), data, recordings=2)
    assert (recorder.recordings, step.recorded) == (3, 2)


@pytest.mark.parametrize("what", ["training", "momentum", "load", "freeze", "swap"])
def test_what_a_recording_takes_for_granted_is_looked_at(what: str) -> None:
    def between(k: int, model: nn.Module, optimizer: Any) -> None:
        if k != 5:
            return
        if what == "training":
            model.top[1].eval()
        elif what == "momentum":
            optimizer.param_groups[0]["momentum"] = 0.5
        elif what == "load":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif what == "freeze":
            model.top[0].weight.requires_grad_(False)
        elif what == "swap":
            model.top[4].weight.data = model.top[4].weight.data.clone() + 1

    _, recorder, _ = both(lambda p: SGD(p, lr=0.1, momentum=0.9), list(batches(10)), between)
    assert recorder.recordings == 2
    assert recorder.replays == 4


class Cut(Net):
    """Bags as differences of running sums: ids behind the last end change nothing."""

    def forward(self, dense: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        sums = F.pad(self.bags.weight[ids].cumsum(0), (0, 0, 1, 0))[offsets]
        return self.top(torch.cat([dense, sums.diff(dim=0)], 1)).squeeze(1)

    def ragged_inputs(self, dense: Tensor, ids: Tensor, offsets: Tensor) -> list[Tensor]:
        return [ids]


def test_ragged_ids_share_a_recording() -> None:
    data = list(batches(9, ids=None))
    _, recorder, _ = both(lambda p: SGD(p, lr=0.1), data, net=Cut)
    assert (recorder.recordings, recorder.replays) == (1, 5)
    lengths = [len(inputs[1]) for inputs, _ in data]
    assert len(set(lengths)) > 3
    with pytest.warns(RecastWarning, match="more ids than max_ids"):
        _, recorder, _ = both(lambda p: SGD(p, lr=0.1), data, net=Cut, max_ids=sorted(lengths)[-2])
    assert recorder.recordings == 1


def test_dropout_draws_at_every_step() -> None:
    torch.manual_seed(0)
    model = Net(dropout=0.5)
    model.train()
    optimizer = SGD(model.parameters(), lr=0.0)
    recorder = TapeRecorder(optimizer)
    step = TrainingStep(
        model, F.binary_cross_entropy_with_logits, optimizer, recorder=recorder, warmup=1
    )
    (inputs, labels), *_ = batches(1)
    losses = [float(step(inputs, labels)) for _ in range(6)]
    assert recorder.replays == 4
    assert len(set(losses)) == 6


def test_clipping_is_recorded() -> None:
    torch.manual_seed(0)
    plain = Net()
    fast = copy.deepcopy(plain)
    a, b = SGD(plain.parameters(), lr=0.5), SGD(fast.parameters(), lr=0.5)
    recorder = TapeRecorder(b)

    def clip() -> None:
        nn.utils.clip_grad_norm_(fast.parameters(), 0.01)

    loss_fn = F.binary_cross_entropy_with_logits
    step = TrainingStep(fast, loss_fn, b, recorder=recorder, before_step=clip)
    for inputs, labels in batches(7):
        a.zero_grad()
        loss_fn(plain(*inputs), labels).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        a.step()
        step(inputs, labels)
    assert recorder.replays == 3
    for p, q in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_step_that_waits_for_the_device_runs_as_always() -> None:
    def loss(output: Tensor, labels: Tensor) -> Tensor:
        found = F.binary_cross_entropy_with_logits(output, labels)
        return found if found.item() < 1e9 else found * 0

    model = Net()
    optimizer = ADAGRAD(model.parameters(), lr=0.1)
    twin = copy.deepcopy(model)
    other = ADAGRAD(twin.parameters(), lr=0.1)
    data = list(batches(8))
    expected = plain_loop(twin, other, data)
    recorder = TapeRecorder(optimizer)
    step = TrainingStep(model, loss, optimizer, recorder=recorder)
    with pytest.warns(RecastWarning, match="waits for the device") as caught:
        losses = [step(inputs, labels) for inputs, labels in data]
    assert len(caught) == 1
    assert recorder.replays == 0
    torch.testing.assert_close(losses, expected)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert optimizer.state[p]["step"] == other.state[q]["step"] == len(data)


def test_numbers_that_never_settle_are_told() -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = TrainingStep(
        model, F.binary_cross_entropy_with_logits, optimizer, recorder=TapeRecorder(optimizer)
    )
    with pytest.warns(RecastWarning, match="optimizer numbers change from one to the next"):
        for k, (inputs, labels) in enumerate(batches(20)):
            optimizer.param_groups[0]["momentum"] = 0.9 - k / 100
            step(inputs, labels)
    assert step.recorded == 0


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: torch.optim.Adam(p), "capturable=True"),
        (lambda p: torch.optim.Adafactor(p), "Adafactor on dense parameters"),
        (lambda p: ADAGRAD(p, lr=torch.tensor(0.1), lr_decay=0.1), "lr_decay is not 0"),
    ],
    ids=["adam", "adafactor", "two-decays"],
)
def test_optimizers_that_cannot_be_recorded(make: Any, why: str) -> None:
    model = Net()
    optimizer = make(model.parameters())
    step = TrainingStep(
        model, F.binary_cross_entropy_with_logits, optimizer, recorder=TapeRecorder(optimizer)
    )
    twin = copy.deepcopy(model)
    other = make(twin.parameters())
    data = list(batches(6))
    with pytest.warns(RecastWarning, match=why) as caught:
        losses = [step(inputs, labels) for inputs, labels in data]
    assert len(caught) == 1
    torch.testing.assert_close(losses, plain_loop(twin, other, data))


def test_a_rate_in_a_tensor_of_the_host_is_a_number() -> None:
    def between(k: int, model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"].mul_(0.8)

    _, recorder, _ = both(lambda p: SGD(p, lr=torch.tensor(0.1)), list(batches(8)), between)
    assert (recorder.recordings, recorder.replays) == (1, 4)


def test_several_optimizers() -> None:
    plain = Net()
    fast = copy.deepcopy(plain)
    groups = [(n.bags.parameters(), n.top.parameters()) for n in (plain, fast)]
    theirs, ours = ([ADAGRAD(a, lr=0.1), SGD(b, lr=0.2)] for a, b in groups)
    recorder = TapeRecorder(*ours)
    loss = F.binary_cross_entropy_with_logits
    step = TrainingStep(fast, loss, ours, recorder=recorder)
    for inputs, labels in batches(7):
        plain.zero_grad()
        loss(plain(*inputs), labels).backward()
        for each in theirs:
            each.step()
        step(inputs, labels)
    assert recorder.replays == 3
    for p, q in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_step_hooks_of_others_are_refused() -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *args: None)
    step = TrainingStep(
        model, F.binary_cross_entropy_with_logits, optimizer, recorder=TapeRecorder(optimizer)
    )
    (inputs, labels), *_ = batches(1)
    with pytest.warns(RecastWarning, match="step hooks"):
        step(inputs, labels)


def test_on_a_cpu_steps_run_as_always() -> None:
    model = Net()
    twin = copy.deepcopy(model)
    optimizer, other = SGD(model.parameters(), lr=0.1), SGD(twin.parameters(), lr=0.1)
    step = TrainingStep(model, F.binary_cross_entropy_with_logits, optimizer)
    data = list(batches(5))
    with pytest.warns(RecastWarning, match="no CUDA graphs on a cpu device") as caught:
        losses = [step(inputs, labels) for inputs, labels in data]
    assert len(caught) == 1
    torch.testing.assert_close(losses, plain_loop(twin, other, data))


@pytest.mark.parametrize(
    ("loss", "said"), [(lambda out: out, r"a tensor of shape \(3, 2\)"), (lambda out: None, "None")]
)
def test_a_loss_that_is_no_number(loss: Any, said: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    step = TrainingStep(model, loss, optimizer, recorder=TapeRecorder(optimizer))
    with pytest.raises(UsageError, match=f"the loss returned {said}"):
        step(torch.randn(3, 2))


def test_a_loss_that_cannot_be_called() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="the loss is of type int, which cannot be called"):
        TrainingStep(model, 3, SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]


class Halved(nn.Module):
    """Writes a weight past autograd's counter of versions before it is read."""

    def __init__(self, net: nn.Sequential, fast: nn.Module) -> None:
        super().__init__()
        self.net, self.fast = net, fast

    def forward(self, x: Tensor) -> Tensor:
        self.net[0].weight.data.mul_(0.5).clamp_(-0.1, 0.1)
        return self.fast(x)


def test_a_weight_written_in_forward_is_cast_after_that() -> None:
    def losses(warmup: int) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        data = [torch.randn(64, 16) for _ in range(6)]
        optimizer = SGD(net.parameters(), lr=0.5)
        recorder = TapeRecorder(optimizer)
        with emulated_gpu.serve() as gpu:
            model = Halved(net, recast.optimize(net, example=(data[0],)))
            step = TrainingStep(
                model, lambda y: y.float().square().mean(), optimizer,
                autocast=torch.bfloat16, recorder=recorder, warmup=warmup,
            )  # fmt: skip
            found = [step(x) for x in data]
            assert "cast_rows" in gpu.launched
        return found, recorder.replays

    (always, none), (recorded, replays) = losses(6), losses(1)
    assert (none, replays) == (0, 4)
    assert all(map(torch.equal, always, recorded))


def test_parameters_on_two_devices_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(UsageError, match=r"cpu, meta"):
        TrainingStep(model, F.mse_loss, SGD(model.parameters(), lr=0.1))


CUDA_OPTIMIZERS = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "sgd fused": lambda p: SGD(p, lr=0.1, fused=True),
    "adagrad": lambda p: ADAGRAD(p, lr=0.05, lr_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, capturable=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True, fused=True),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
@pytest.mark.parametrize("name", CUDA_OPTIMIZERS)
def test_with_cuda_graphs(name: str) -> None:
    def between(k: int, model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 / (k + 2)

    step, _, _ = both(CUDA_OPTIMIZERS[name], list(batches(9)), between, device="cuda")
    assert step.recorded == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_ragged_ids_with_cuda_graphs() -> None:
    step, _, _ = both(lambda p: SGD(p, lr=0.1), list(batches(9, ids=None)), net=Cut, device="cuda")
    assert step.recorded == 1
