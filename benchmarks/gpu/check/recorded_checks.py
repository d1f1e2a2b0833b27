"""Recorded steps against the same steps run eagerly, and against float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import recast
from gpu.check.example_models import EXAMPLES, load_example, to, without_dropout
from gpu.check.graph_mode_checks import forwards, training_loop
from gpu.check.recorded_models import Dots, Listed, Padded, Ragged
from gpu.check.recorded_optimizers import DENSE, capturable, dense_step
from gpu.check.recorded_run import compare_training, recorded_step
from gpu.harness.items import Item, Skip
from recast.errors import RecastWarning
from recast.runtime import checked
from recast.runtime.recorded import recording

STEPS = 8
ADAGRAD = partial(torch.optim.Adagrad, lr=0.05)


def graphs(device: torch.device, tiny: bool) -> Iterator[Item]:
    """Recorded steps beside the same steps run one by one, and beside float64."""
    for name in ("pnn",) if tiny else ("dlrm", *EXAMPLES):
        yield Item(f"{name}, recorded", partial(_recorded, name, 6 if tiny else 512, device))
    batch = 6 if tiny else 64
    yield Item("a schedule of every step", partial(_scheduled, batch, device))
    yield Item("ragged ids", partial(_ragged, batch, device))
    # Sorted while the forward runs, as above, and in turn.
    yield Item(
        "ragged ids, sorts in turn", partial(_ragged, batch, device, recording.in_host_order)
    )
    # Of rows that several tiles of a sort share, too.
    yield Item("norms clipped", partial(_ragged, 16 * batch, device, clip=0.01))
    yield Item("ids that int32 cannot hold", partial(_beyond, batch, device))
    yield Item("ids of pinned memory", partial(_pinned, batch, device))
    yield Item("slices of a wide matrix", partial(_sliced, batch, device))
    yield Item("pairs by lists", partial(_listed, batch, device))
    yield Item("GradScaler", partial(_ragged, batch, device, scale=64.0))
    yield Item("dropout draws anew", partial(_draws, batch, device))
    yield Item("Adam, capturable", partial(capturable, device))
    for name, make in DENSE.items():
        yield Item(f"dense parameters, {name}", partial(dense_step, make, device))
    yield Item('mode="graph", forwards', partial(forwards, device))
    yield Item('mode="graph", a loop left as it is', partial(training_loop, device))
    yield Item('mode="graph", steps replayed, a schedule', partial(training_loop, device, True))


def _recorded(name: str, batch: int, device: torch.device) -> dict[str, object]:
    subject = load_example(name, batch)
    assert subject.loss is not None
    batches = [(to(subject.example, device), ())] * STEPS
    return compare_training(
        lambda: without_dropout(subject.model), subject.loss, batches, ADAGRAD, device
    )


def _scheduled(batch: int, device: torch.device) -> dict[str, object]:
    def between(k: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 / (k + 1)

    subject = load_example("deepfm", batch)
    assert subject.loss is not None
    batches = [(to(subject.example, device), ())] * STEPS
    make = partial(torch.optim.SGD, lr=0.1)
    return compare_training(
        lambda: without_dropout(subject.model), subject.loss, batches, make, device, between
    )


def _ragged(
    batch: int,
    device: torch.device,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    clip: float | None = None,
    scale: float | None = None,
) -> dict[str, object]:
    g = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(STEPS):
        counts = torch.randint(0, 6, (batch,), generator=g)
        offsets = F.pad(counts.cumsum(0), (1, 0))
        ids = torch.randint(400, (int(offsets[-1]),), generator=g)
        label = torch.rand(batch, generator=g).round()
        batches.append(to(((ids, offsets), (label,)), device))
    torch.manual_seed(0)
    loss = F.binary_cross_entropy_with_logits
    with around():
        return compare_training(Ragged, loss, batches, ADAGRAD, device, clip=clip, scale=scale)


def _bags(batch: int) -> list[Any]:
    g = torch.Generator().manual_seed(0)
    return [
        ((torch.randint(400, (batch, 5), generator=g),), (torch.rand(batch, generator=g).round(),))
        for _ in range(STEPS)
    ]


def _beyond(batch: int, device: torch.device) -> dict[str, object]:
    """Ids are int32 in the memory of a recording; those beyond it are left out, like padding."""
    batches, given, count = _bags(batch), [], 0
    for k, ((ids,), _) in enumerate(batches):
        bad = ids.clone()
        if k >= STEPS // 2:  # recorded by then
            bad[1, 1], bad[2, 0], bad[3, 4] = 2**32 + 7, -(2**33) + 7, 2**31 - 1
            ids[1, 1] = ids[2, 0] = ids[3, 4] = 0
            count += 3
        given.append((bad.to(device),))
    before = checked.bad_ids()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RecastWarning)
        loss = F.binary_cross_entropy_with_logits
        found = compare_training(Padded, loss, to(batches, device), ADAGRAD, device, given=given)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    left_out = checked.bad_ids() - before
    assert left_out == count, f"{left_out} ids were counted, not {count}"
    said = [str(w.message) for w in told if "left out" in str(w.message)]  # if it came in time
    assert all("first at place 6 of lookup 0" in one for one in said), said
    return found


def _pinned(batch: int, device: torch.device) -> dict[str, object]:
    if device.type != "cuda":
        raise Skip("memory of a CPU is pinned for a GPU only")
    batches = _bags(batch)
    given = [(ids.pin_memory(),) for (ids,), _ in batches]
    loss = F.binary_cross_entropy_with_logits
    return compare_training(Padded, loss, to(batches, device), ADAGRAD, device, given=given)


def _sliced(batch: int, device: torch.device) -> dict[str, object]:
    """Recorded, they are copies, which other kernels read: those the first capture cannot load."""
    g = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(STEPS):
        wide = torch.randn(batch, 41, generator=g).to(device)
        ids = [torch.randint(50, (batch, 2), generator=g).to(device) for _ in range(3)]
        label = torch.rand(batch, generator=g).round().to(device)
        batches.append(((wide[:, 1:9], ids), (label,)))
    return compare_training(Dots, F.binary_cross_entropy_with_logits, batches, ADAGRAD, device)


def _listed(batch: int, device: torch.device) -> dict[str, object]:
    g = torch.Generator().manual_seed(0)
    batches = [
        ((torch.randint(50, (batch, 4), generator=g),), (torch.rand(batch, generator=g).round(),))
        for _ in range(STEPS)
    ]
    loss = F.binary_cross_entropy_with_logits
    return compare_training(Listed, loss, to(batches, device), ADAGRAD, device)


def _draws(batch: int, device: torch.device) -> dict[str, object]:
    subject = load_example("deepfm", batch)
    assert subject.loss is not None
    model = subject.model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    example = to(subject.example, device)
    fast, _ = recast.optimize(model, optimizer, example=example)
    step = recorded_step(fast, subject.loss, optimizer, device)
    losses = {float(step(example)) for _ in range(10)}
    assert step.recorded
    assert len(losses) == 10, f"{len(losses)} different losses in 10 steps"
    return {}
