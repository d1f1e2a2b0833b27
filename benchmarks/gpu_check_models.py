"""Whole models on a device: diffed with training steps, recorded in graphs, fed by prefetch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gpu_zoo
import torch
import torch.nn.functional as F
from gpu_groups import ROOT, Item, Skip
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import recast
from recast import optim
from recast.errors import IdError
from recast.rewriter import spec
from recast.runtime import checked, tolerances
from recast.runtime.prefetch import prefetch
from recast.runtime.training_step import TrainingStep

EXAMPLES = ("deepfm", "xdeepfm", "dcn", "dcn_v2", "pnn", "mmoe", "mlperf_dlrm")
STEPS = 8


def to(tree: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to(device), tree)


def without_dropout(model: nn.Module) -> nn.Module:
    """Masks are drawn in another way than torch's, so they are proven op by op (``masks``)."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _example(name: str, batch: int) -> spec.Subject:
    if name == "dlrm":
        return spec.load(f"{ROOT}/examples/dlrm.py:model", [f"batch={batch}"])
    return spec.load(f"{ROOT}/examples/models/{name}.py:model", [f"batch={batch}"])


# ---------------------------------------------------------------- diffs


def models(device: torch.device, tiny: bool) -> Iterator[Item]:
    """DLRM and the models of ``examples/models``."""
    for name in ("deepfm", "mlperf_dlrm") if tiny else ("dlrm", *EXAMPLES):
        yield Item(f"{name}, diff", partial(_diff_example, name, 16 if tiny else 512, device))
        if device.type == "cuda":
            yield Item(f"{name}, bfloat16 autocast", partial(_autocast, name, device))


def _diff_example(name: str, batch: int, device: torch.device) -> dict[str, object]:
    subject = _example(name, batch)
    model, example = without_dropout(subject.model).to(device), to(subject.example, device)
    return _diff(model, example, loss=subject.loss)


def _diff(model: nn.Module, example: Any, **options: Any) -> dict[str, object]:
    # Two batches tell which sizes belong to the batch; more are for the steps.
    shown = example[:2] if isinstance(example, list) else example
    fast = recast.optimize(model, example=shown)
    report = recast.diff(model, fast, example, steps=3, **options)
    report.check()
    rows = [r.share for r in report.rows]
    fired = len(fast.report.journal.fired)
    return {"share of the limit": round(max(rows), 3), "detail": f"{fired} rewrites"}


def _autocast(name: str, device: torch.device) -> dict[str, object]:
    """No worse than plain torch under the same autocast, beside what bfloat16 itself rounds."""
    subject = _example(name, 512)
    model, example = without_dropout(subject.model).to(device), to(subject.example, device)
    fast = recast.optimize(model, example=example)
    wide = copy.deepcopy(model).double()
    widened = pytree.tree_map_only(
        Tensor, lambda t: t.double() if t.is_floating_point() else t, example
    )
    leaves = [
        p for p, q in zip(model.parameters(), wide.parameters(), strict=True) if p.numel() < 1e6
    ]
    doubles = [q for q in wide.parameters() if q.numel() < 1e6]

    def run(net: nn.Module, batch: Any, parameters: list[Tensor], low: bool) -> list[Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            out = net(*batch)
        # Outside, and of float32: under autocast torch refuses losses of probabilities.
        assert subject.loss is not None
        loss = subject.loss(
            pytree.tree_map_only(Tensor, lambda t: t.double() if not low else t.float(), out)
        )
        grads = torch.autograd.grad(loss, parameters)
        return [loss, *(g.to_dense() if g.layout != torch.strided else g + 0 for g in grads)]

    truth = run(wide, widened, doubles, False)
    plain, ours = run(model, example, leaves, True), run(fast, example, leaves, True)
    worst = 0.0
    for a, b, c in zip(ours, plain, truth, strict=True):
        usual, error = (float((t.double() - c).abs().max()) for t in (b, a))
        room = max(4 * usual, tolerances.CHAIN * 2.0**-8 * float(c.abs().max()))
        worst = max(worst, error / room if room else float(error > 0))
    assert worst <= 1, f"{worst:.2f} of what bfloat16 allows"
    return {"share of the limit": round(worst, 3)}


def zoo(device: torch.device, tiny: bool) -> Iterator[Item]:
    """Five forms of the field."""
    for name, subject in gpu_zoo.ZOO.items():
        yield Item(name, partial(_diff_zoo, subject, 12 if tiny else 300, device))
        if tiny:
            return


def _diff_zoo(subject: gpu_zoo.Subject, rows: int, device: torch.device) -> dict[str, object]:
    torch.manual_seed(0)
    model = subject.make().to(device)
    return _diff(model, [to(subject.batch(rows, k), device) for k in (0, 1)])


# ---------------------------------------------------------------- optimizers


def optimizers(device: torch.device, tiny: bool) -> Iterator[Item]:
    """Tables updated on rows, with many duplicates, beside torch's own steps."""
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "SGD": partial(torch.optim.SGD, lr=0.1),
        "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
        "Adagrad, lr_decay": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1, maximize=True),
        "RowWiseAdagrad": partial(optim.RowWiseAdagrad, lr=0.1),
        "SparseAdam": partial(torch.optim.SparseAdam, lr=0.1),
    }
    for name, make in kinds.items():
        for dim in (8,) if tiny else (4, 16, 33, 64, 128, 256):
            yield Item(f"{name}, width {dim}", partial(_optimizer, name, make, dim, device))
        if tiny:
            return


class Tables(nn.Module):
    def __init__(self, dim: int, sparse: bool) -> None:
        super().__init__()
        self.emb = nn.ModuleList(
            nn.EmbeddingBag(n, dim, mode="sum", sparse=sparse) for n in (5, 300, 20_000)
        )

    def forward(self, ids: list[Tensor]) -> Tensor:
        return torch.cat([emb(i) for emb, i in zip(self.emb, ids, strict=True)], 1)


def _optimizer(
    name: str, make: Callable[..., torch.optim.Optimizer], dim: int, device: torch.device
) -> dict[str, object]:
    g = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Tables(dim, sparse=name == "SparseAdam").to(device)
    batches = [
        ([(torch.rand(64, 4, generator=g).pow(3) * n).long().to(device) for n in (5, 300, 20_000)],)
        for _ in range(3)
    ]
    return _diff(model, batches, optimizer=make)


# ---------------------------------------------------------------- graphs


def graphs(device: torch.device, tiny: bool) -> Iterator[Item]:
    """Recorded steps beside the same steps run one by one, and beside float64."""
    for name in ("pnn",) if tiny else ("dlrm", *EXAMPLES):
        yield Item(f"{name}, recorded", partial(_recorded, name, 6 if tiny else 512, device))
    batch = 6 if tiny else 64
    yield Item("a schedule of every step", partial(_scheduled, batch, device))
    yield Item("ragged ids", partial(_ragged, batch, device))
    yield Item("dropout draws anew", partial(_draws, batch, device))
    yield Item("Adam, capturable", partial(_capturable, device))
    yield Item('mode="graph", forwards', partial(_forwards, device))
    yield Item('mode="graph", a loop left as it is', partial(_left_as_it_is, device))


def _step(model: nn.Module, loss: Any, optimizer: Any, device: torch.device) -> TrainingStep:
    if device.type == "cuda":
        return TrainingStep(model, loss, optimizer)
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]
    from tape import TapeRecorder

    return TrainingStep(model, loss, optimizer, recorder=TapeRecorder(optimizer))


def _train(
    make: Callable[[], nn.Module],
    loss: Callable[..., Tensor],
    batches: list[Any],
    optimizer_of: Callable[..., torch.optim.Optimizer],
    device: torch.device,
    between: Callable[[int, torch.optim.Optimizer], None] = lambda k, o: None,
) -> dict[str, object]:
    """Recorded training of the optimised model beside plain training in fp32 and float64."""
    plain = make().to(device)
    wide, twin = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    optimizer = optimizer_of(twin.parameters())
    fast, _ = recast.optimize(twin, optimizer, example=batches[0][0])
    step = _step(fast, loss, optimizer, device)
    found: list[list[Tensor]] = [[], [], []]
    others = [optimizer_of(net.parameters()) for net in (plain, wide)]
    for k, (inputs, targets) in enumerate(batches):
        found[0].append(step(inputs, *targets))
        between(k, optimizer)
        for at, (net, own) in enumerate(zip((plain, wide), others, strict=True)):
            dtype = torch.float64 if at else torch.float32
            args, rest = pytree.tree_map_only(
                Tensor,
                lambda t, d=dtype: t.to(d) if t.is_floating_point() else t,
                (inputs, targets),
            )
            own.zero_grad()
            value = loss(net(*args), *rest)
            value.backward()
            own.step()
            found[at + 1].append(value.detach())
            between(k, own)
    assert step.recorded, "nothing was recorded"
    torch.testing.assert_close(torch.stack(found[0]), torch.stack(found[1]), rtol=1e-4, atol=1e-6)
    worst = 0.0
    trios = zip(fast.parameters(), plain.parameters(), wide.parameters(), strict=True)
    for a, b, c in trios:
        share = tolerances.excess(a, b, c, scale=float(c.abs().max())) / tolerances.CHAIN
        worst = max(worst, share)
    assert worst <= 1, f"parameters after {len(batches)} steps: {worst:.2f} of the limit"
    return {"share of the limit": round(worst, 3), "detail": f"{step.recorded} recordings"}


ADAGRAD = partial(torch.optim.Adagrad, lr=0.05)


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


def _ragged(batch: int, device: torch.device) -> dict[str, object]:
    g = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(STEPS):
        counts = torch.randint(0, 6, (batch,), generator=g)
        offsets = F.pad(counts.cumsum(0), (1, 0))
        ids = torch.randint(400, (int(offsets[-1]),), generator=g)
        label = torch.rand(batch, generator=g).round()
        batches.append(to(((ids, offsets), (label,)), device))
    torch.manual_seed(0)
    return _train(Ragged, F.binary_cross_entropy_with_logits, batches, ADAGRAD, device)


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


def _forwards(device: torch.device) -> dict[str, object]:
    if device.type != "cuda":
        raise Skip("there are no CUDA graphs on a CPU")
    model = _example("deepfm", 64).model.to(device).eval()
    batches = [to(_example("deepfm", n).example, device) for n in (64, 64, 64, 64, 7, 7, 7, 7)]
    fast = recast.optimize(model, example=batches[0], mode="graph")
    for batch in batches:
        model.emb[0].weight.data.mul_(1.01)  # in place: a replay sees it
        with torch.no_grad():
            torch.testing.assert_close(fast(*batch), model(*batch), rtol=1e-4, atol=1e-5)
    replays = vars(fast)["_replays"]
    assert len(replays._recordings) == 2, "a recording for each size"
    return {}


def _left_as_it_is(device: torch.device) -> dict[str, object]:
    """Forward and backward replayed, beside plain training in fp32 and float64."""
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
    for k in range(2 * STEPS):
        for net, own in zip((fast, plain, wide), optimizers, strict=True):
            if k % 2:  # gradients may be there still when the next forward comes
                own.zero_grad()
            loss = subject.loss(net(*(widened if net is wide else example)))
            if not k % 2:
                own.zero_grad()
            loss.backward()
            own.step()
    pairs = len(vars(fast)["_replays"]._training._recordings)
    assert pairs == 1, f"{pairs} recordings"
    worst = 0.0
    for a, b, c in zip(fast.parameters(), plain.parameters(), wide.parameters(), strict=True):
        share = tolerances.excess(a, b, c, scale=float(c.abs().max())) / tolerances.CHAIN
        worst = max(worst, share)
    assert worst <= 1, f"parameters after {2 * STEPS} steps: {worst:.2f} of the limit"
    return {"share of the limit": round(worst, 3)}


# ---------------------------------------------------------------- batches and bad input


def batches(device: torch.device, tiny: bool) -> Iterator[Item]:
    """Prefetching, and ids that no table has."""
    yield Item("prefetch, values", partial(_prefetched, device))
    yield Item("ids out of range, counted", partial(_bad_ids, device))
    if device.type == "cuda":
        yield Item("ids out of range, checked", partial(_checked_ids, device))


def _prefetched(device: torch.device) -> dict[str, object]:
    g = torch.Generator().manual_seed(0)
    made = [{"k": k, "x": [torch.randn(1 << 20, generator=g)]} for k in range(12)]
    burn = torch.randn(2048, 2048, device=device) if device.type == "cuda" else None
    sums = []
    for batch in prefetch(made, device, depth=2):
        if burn is not None:  # keeps the stream of the user behind that of the copies
            for _ in range(20):
                burn = burn @ burn * 1e-3
        assert batch["x"][0].device.type == device.type
        sums.append(batch["x"][0].double().sum())
    expected = torch.stack([b["x"][0].double().sum() for b in made])
    torch.testing.assert_close(torch.stack(sums).cpu(), expected)
    return {}


def _lookup(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = Tables(16, sparse=False).to(device)
    good = [torch.zeros(8, 3, dtype=torch.long, device=device) for _ in range(3)]
    return recast.optimize(model, example=(good,))


def _bad(device: torch.device) -> list[Tensor]:
    ids = [torch.ones(8, 3, dtype=torch.long, device=device) for _ in range(3)]
    ids[1][4, 1] = 300
    return ids


def _bad_ids(device: torch.device) -> dict[str, object]:
    model = _lookup(device)
    before = checked.bad_ids()
    with torch.no_grad():
        out = model(_bad(device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    good = model([i.clamp(max=1) for i in _bad(device)])
    torch.testing.assert_close(out[:4], good[:4])
    assert checked.bad_ids() == before + 1
    return {}


def _checked_ids(device: torch.device) -> dict[str, object]:
    with checked.checked():
        try:
            _lookup(device)(_bad(device))
        except IdError as error:
            assert "300" in str(error)
            return {"detail": error.what}
    raise AssertionError("no IdError")
