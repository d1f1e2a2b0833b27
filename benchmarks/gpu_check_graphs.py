"""Recorded steps against the same steps run eagerly, and against float64."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_check_models import EXAMPLES, _example, to, without_dropout
from gpu_groups import ROOT, Item, Skip
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils import _pytree as pytree

import recast
from recast.errors import RecastWarning
from recast.runtime import checked, tolerances
from recast.runtime.recorded import recording
from recast.runtime.recorded.optimizer.dense_step import DenseStep
from recast.runtime.recorded.recording import CudaRecorder, Recorder
from recast.runtime.recorded.training_step import TrainingStep
from recast.runtime.rows import optimizer as row_optimizer

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
    yield Item("ragged ids, sorts in turn", partial(_ragged, batch, device, recording.in_turn))
    # Of rows that several tiles of a sort share, too.
    yield Item("norms clipped", partial(_ragged, 16 * batch, device, clip=0.01))
    yield Item("ids that int32 cannot hold", partial(_beyond, batch, device))
    yield Item("ids of pinned memory", partial(_pinned, batch, device))
    yield Item("slices of a wide matrix", partial(_sliced, batch, device))
    yield Item("pairs by lists", partial(_listed, batch, device))
    yield Item("GradScaler", partial(_ragged, batch, device, scale=64.0))
    yield Item("dropout draws anew", partial(_draws, batch, device))
    yield Item("Adam, capturable", partial(_capturable, device))
    for name, make in DENSE.items():
        yield Item(f"dense parameters, {name}", partial(_dense_step, make, device))
    yield Item('mode="graph", forwards', partial(_forwards, device))
    yield Item('mode="graph", a loop left as it is', partial(_left_as_it_is, device))
    yield Item('mode="graph", steps replayed, a schedule', partial(_left_as_it_is, device, True))


def _step(
    model: nn.Module, loss: Any, optimizer: Any, device: torch.device, **how: Any
) -> TrainingStep:
    if device.type != "cuda":
        how["recorder"] = _recorder(optimizer, device)
    return TrainingStep(model, loss, optimizer, **how)


def _recorder(optimizer: torch.optim.Optimizer, device: torch.device) -> Recorder:
    if device.type == "cuda":
        return CudaRecorder(device)
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]
    from tape import TapeRecorder

    return TapeRecorder(optimizer)


def _train(
    make: Callable[[], nn.Module],
    loss: Callable[..., Tensor],
    batches: list[Any],
    optimizer_of: Callable[..., torch.optim.Optimizer],
    device: torch.device,
    between: Callable[[int, torch.optim.Optimizer], None] = lambda k, o: None,
    clip: float | None = None,
    scale: float | None = None,
    given: list[Any] | None = None,
) -> dict[str, object]:
    """Recorded training of the optimised model against plain training in fp32 and float64.

    ``clip``: the largest norm of all gradients; ``scale``: of the loss, which changes nothing;
    ``given``: inputs that the optimised model gets instead of those of ``batches``.
    """

    def limit(net: nn.Module) -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)

    plain = make().to(device)
    wide, twin = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    optimizer = optimizer_of(twin.parameters())
    fast, _ = recast.optimize(twin, optimizer, example=batches[0][0])
    how: dict[str, Any] = {} if clip is None else {"before_step": lambda: limit(fast)}
    if scale is not None:
        how["scaler"] = GradScaler(device.type, init_scale=scale)
    step = _step(fast, loss, optimizer, device, **how)
    found: list[list[Tensor]] = [[], [], []]
    others = [optimizer_of(net.parameters()) for net in (plain, wide)]
    for k, (inputs, targets) in enumerate(batches):
        found[0].append(step(inputs if given is None else given[k], *targets))
        between(k, optimizer)
        for at, (net, own) in enumerate(zip((plain, wide), others, strict=True)):
            dtype = torch.float64 if at else torch.float32
            args, rest = pytree.tree_map_only(Tensor, partial(_of, dtype), (inputs, targets))
            own.zero_grad()
            value = loss(net(*args), *rest)
            value.backward()
            limit(net)
            own.step()
            found[at + 1].append(value.detach())
            between(k, own)
    # On the emulator a scaler reads whether gradients are finite, so nothing is recorded there.
    emulated = scale is not None and device.type != "cuda"
    assert step.recorded or emulated, "nothing was recorded"
    torch.testing.assert_close(torch.stack(found[0]), torch.stack(found[1]), rtol=1e-4, atol=1e-6)
    worst = 0.0
    trios = zip(fast.parameters(), plain.parameters(), wide.parameters(), strict=True)
    for a, b, c in trios:
        share = tolerances.excess(a, b, c, scale=float(c.abs().max())) / tolerances.CHAIN
        worst = max(worst, share)
    assert worst <= 1, f"parameters after {len(batches)} steps: {worst:.2f} of the limit"
    return {"share of the limit": round(worst, 3), "detail": f"{step.recorded} recordings"}


def _of(dtype: torch.dtype, t: Tensor) -> Tensor:
    return t.to(dtype) if t.is_floating_point() else t


def _recorded(name: str, batch: int, device: torch.device) -> dict[str, object]:
    subject = _example(name, batch)
    assert subject.loss is not None
    batches = [(to(subject.example, device), ())] * STEPS
    return _train(lambda: without_dropout(subject.model), subject.loss, batches, ADAGRAD, device)


def _scheduled(batch: int, device: torch.device) -> dict[str, object]:
    def between(k: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 / (k + 1)

    subject = _example("deepfm", batch)
    assert subject.loss is not None
    batches = [(to(subject.example, device), ())] * STEPS
    make = partial(torch.optim.SGD, lr=0.1)
    return _train(
        lambda: without_dropout(subject.model), subject.loss, batches, make, device, between
    )


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.EmbeddingBag(400, 16, mode="sum", include_last_offset=True)
        self.top = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.top(self.emb(ids, offsets)).squeeze(1)


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
        return _train(Ragged, loss, batches, ADAGRAD, device, clip=clip, scale=scale)


class Padded(nn.Module):
    """Bags of one size; id 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.EmbeddingBag(400, 16, mode="sum", padding_idx=0)
        self.top = nn.Linear(16, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.emb(ids)).squeeze(1)


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
        found = _train(Padded, loss, to(batches, device), ADAGRAD, device, given=given)
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
    return _train(Padded, loss, to(batches, device), ADAGRAD, device, given=given)


class Dots(nn.Module):
    """Products of all pairs of rows and what is given with them."""

    pairs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3))
        self.top = nn.Linear(14, 1)
        self.register_buffer("pairs", torch.tril_indices(4, 4, -1))

    def forward(self, x: Tensor, ids: list[Tensor]) -> Tensor:
        t = torch.stack([x, *[emb(i) for emb, i in zip(self.emb, ids, strict=True)]], 1)
        li, lj = self.pairs
        return self.top(torch.cat([x, torch.bmm(t, t.mT)[:, li, lj]], 1)).squeeze(1)


def _sliced(batch: int, device: torch.device) -> dict[str, object]:
    """Recorded, they are copies, which other kernels read: those the first capture cannot load."""
    g = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(STEPS):
        wide = torch.randn(batch, 41, generator=g).to(device)
        ids = [torch.randint(50, (batch, 2), generator=g).to(device) for _ in range(3)]
        label = torch.rand(batch, generator=g).round().to(device)
        batches.append(((wide[:, 1:9], ids), (label,)))
    return _train(Dots, F.binary_cross_entropy_with_logits, batches, ADAGRAD, device)


class Listed(nn.Module):
    """Products of pairs that are lists: they stay on the host when the model moves to a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(50, 8) for _ in range(4))
        self.top = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.stack([emb(ids[:, k]) for k, emb in enumerate(self.emb)], 1)
        products = rows[:, [0, 0, 0, 1, 1]] * rows[:, [1, 2, 3, 2, 3]]
        return self.top(F.relu(products).mean(1)).squeeze(1)


def _listed(batch: int, device: torch.device) -> dict[str, object]:
    g = torch.Generator().manual_seed(0)
    batches = [
        ((torch.randint(50, (batch, 4), generator=g),), (torch.rand(batch, generator=g).round(),))
        for _ in range(STEPS)
    ]
    loss = F.binary_cross_entropy_with_logits
    return _train(Listed, loss, to(batches, device), ADAGRAD, device)


def _draws(batch: int, device: torch.device) -> dict[str, object]:
    subject = _example("deepfm", batch)
    assert subject.loss is not None
    model = subject.model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    example = to(subject.example, device)
    fast, _ = recast.optimize(model, optimizer, example=example)
    step = _step(fast, subject.loss, optimizer, device)
    losses = {float(step(example)) for _ in range(10)}
    assert step.recorded
    assert len(losses) == 10, f"{len(losses)} different losses in 10 steps"
    return {}


def _capturable(device: torch.device) -> dict[str, object]:
    if device.type != "cuda":
        raise Skip("torch has no capturable optimizers on a CPU")
    torch.manual_seed(0)
    make = partial(torch.optim.Adam, lr=0.01, capturable=True)
    g = torch.Generator().manual_seed(0)
    batches = [
        to(((torch.randn(32, 8, generator=g),), (torch.rand(32, 1, generator=g),)), device)
        for _ in range(STEPS)
    ]

    def between(k: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 / (k + 1)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    return _train(model, F.mse_loss, batches, make, device, between)


DENSE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, weight_decay=0.01),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}
HEADER = Path(torch.__file__).parent / "include/ATen/native/cuda/DeviceAddCmulCdiv.cuh"


def _dense_step(
    make: Callable[..., torch.optim.Optimizer], device: torch.device
) -> dict[str, object]:
    """The optimizer of dense parameters, recorded once and replayed with a new rate each time.

    On a GPU bit for bit torch's own step. On a CPU torch rounds differently; and versions of torch
    without its header of fused multiply-adds left these to the compiler, except in SGD.
    """
    g = torch.Generator(device).manual_seed(0)
    sets: list[list[Tensor]] = []
    for _ in range(2):
        g.manual_seed(0)
        whole = torch.randn(1001, generator=g, device=device)
        made = [torch.randn(n, generator=g, device=device) for n in (3, 17 * 5, 129, 70_001)]
        sets.append([nn.Parameter(t) for t in (whole[1:], *made)])  # one at an odd address
    theirs, ours = (make(parameters) for parameters in sets)
    for parameters in sets:
        for p in parameters:
            p.grad = torch.empty_like(p)

    def prepare(k: int) -> None:
        """Set the gradients of step ``k``, in place, and its rate."""
        for optimizer in (theirs, ours):
            optimizer.param_groups[0]["lr"] = 0.1 / (k + 2)
        for a, b in zip(*sets, strict=True):
            assert a.grad is not None and b.grad is not None
            a.grad.normal_(generator=g)
            b.grad.copy_(a.grad)

    prepare(0)
    theirs.step(), ours.step()  # the first step creates the state
    to_the_bit = device.type == "cuda" and (isinstance(ours, torch.optim.SGD) or HEADER.exists())
    rtol, atol = (0.0, 0.0) if to_the_bit else (1e-5, 1e-6)
    same = partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    recorder, replay = _recorder(ours, device), None
    for k in range(1, STEPS):
        prepare(k)
        theirs.step()
        if replay is None:
            with recording.recording() as recorded:
                step = DenseStep(ours, device)
                recorded.before_replay(step.renew)
                _, replay = recorder.record(partial(step.run, ours.param_groups))
        else:
            recorded.prepare()
        replay()
        for a, b in zip(*sets, strict=True):
            same(b, a, msg=partial("step {}: {}".format, k))
            for key, held in theirs.state[a].items():
                same(ours.state[b][key], held, msg=partial("{}, step {}: {}".format, key, k))
    return {"detail": "to the bit" if to_the_bit else f"within {rtol:g}"}


def _forwards(device: torch.device) -> dict[str, object]:
    if device.type != "cuda":
        raise Skip("there are no CUDA graphs on a CPU")
    model: Any = _example("deepfm", 64).model.to(device).eval()
    batches = [to(_example("deepfm", n).example, device) for n in (64, 64, 64, 64, 7, 7, 7, 7)]
    fast = recast.optimize(model, example=batches[0], mode="graph")
    for batch in batches:
        model.emb[0].weight.data.mul_(1.01)  # in place: a replay sees it
        with torch.no_grad():
            torch.testing.assert_close(fast(*batch), model(*batch), rtol=1e-4, atol=1e-5)
    replays = vars(fast)["_replays"]
    assert len(replays._recordings) == 2, "a recording for each size"
    return {}


@contextmanager
def _replays() -> Iterator[list[bool]]:
    """Whether each of the optimizers' steps inside was replayed."""
    found: list[bool] = []
    before = list(row_optimizer.instead)

    def seen(ask: Callable[..., bool]) -> Callable[..., bool]:
        def answer(*args: Any) -> bool:
            found.append(ask(*args))
            return found[-1]

        return answer

    row_optimizer.instead[:] = [seen(ask) for ask in before]
    try:
        yield found
    finally:
        row_optimizer.instead[:] = before


def _left_as_it_is(device: torch.device, schedule: bool = False) -> dict[str, object]:
    """Forward, backward and step replayed, against plain training in fp32 and float64.

    ``schedule``: the rate changes at every step, and no gradient is left from the step before.
    """
    if device.type != "cuda":
        raise Skip("there are no CUDA graphs on a CPU")
    subject = _example("dlrm", 512)
    assert subject.loss is not None
    plain = without_dropout(subject.model).to(device)
    wide, twin = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    example = to(subject.example, device)
    widened = pytree.tree_map_only(
        Tensor, lambda t: t.double() if t.is_floating_point() else t, example
    )
    optimizers = [ADAGRAD(net.parameters()) for net in (twin, plain, wide)]
    fast, _ = recast.optimize(twin, optimizers[0], example=example, mode="graph")
    with _replays() as replayed:
        for k in range(2 * STEPS):
            for net, own in zip((fast, plain, wide), optimizers, strict=True):
                early = schedule or k % 2  # else gradients are there still at the next forward
                if schedule:
                    own.param_groups[0]["lr"] = 0.05 / (k + 1)
                if early:
                    own.zero_grad()
                loss = subject.loss(net(*(widened if net is wide else example)))
                if not early:
                    own.zero_grad()
                loss.backward()
                own.step()
    assert any(replayed) or not schedule, "no step was replayed"
    pairs = len(vars(fast)["_replays"]._training._recordings)
    assert pairs == 1, f"{pairs} recordings"
    worst = 0.0
    for a, b, c in zip(fast.parameters(), plain.parameters(), wide.parameters(), strict=True):
        share = tolerances.excess(a, b, c, scale=float(c.abs().max())) / tolerances.CHAIN
        worst = max(worst, share)
    assert worst <= 1, f"parameters after {2 * STEPS} steps: {worst:.2f} of the limit"
    told = f"{sum(replayed)} steps replayed"
    return {"share of the limit": round(worst, 3), "detail": told}
