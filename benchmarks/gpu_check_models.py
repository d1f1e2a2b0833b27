"""Whole models on a device: diffed with training steps, recorded in graphs, fed by prefetch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import gpu_zoo
import torch
from gpu_groups import ROOT, Item
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import recast
from recast import optim
from recast.errors import IdError
from recast.rewriter.cli import spec
from recast.runtime import checked, tolerances
from recast.runtime.recorded.prefetch import prefetch

EXAMPLES = ("deepfm", "xdeepfm", "dcn", "dcn_v2", "pnn", "mmoe", "mlperf_dlrm")


def to(tree: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to(device), tree)


def without_dropout(model: nn.Module) -> nn.Module:
    """Our masks are drawn in another way than torch's, so they are proven op by op (``masks``)."""
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
    """No worse than plain torch under the same autocast, up to the rounding of bfloat16."""
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

    def run(net: nn.Module, batch: Any, parameters: Sequence[Tensor], low: bool) -> list[Tensor]:
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
    """Five common forms of models."""
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
    """Tables updated by rows, with many duplicates, against torch's own steps."""
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
    # Not Adagrad in float16: its eps is 0 there, and plain torch divides 0 by it.
    for name, dtype in (
        ("Adagrad", torch.bfloat16),
        ("SGD", torch.bfloat16),
        ("SGD", torch.float16),
    ):
        label = f"{name}, {str(dtype).removeprefix('torch.')}"
        yield Item(label, partial(_optimizer, name, kinds[name], 16, device, dtype))
    yield Item(
        "Adagrad, many ids", partial(_optimizer, "", kinds["Adagrad"], 16, device, rows=30_000)
    )
    yield Item("Adam, lazy", partial(_lazy, device))
    yield Item("two runs, one result", partial(_twice, device))


class Tables(nn.Module):
    def __init__(self, dim: int, sparse: bool) -> None:
        super().__init__()
        self.emb = nn.ModuleList(
            nn.EmbeddingBag(n, dim, mode="sum", sparse=sparse) for n in (5, 300, 20_000)
        )

    def forward(self, ids: list[Tensor]) -> Tensor:
        return torch.cat([emb(i) for emb, i in zip(self.emb, ids, strict=True)], 1)


def _optimizer(
    name: str,
    make: Callable[..., torch.optim.Optimizer],
    dim: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    rows: int = 64,
) -> dict[str, object]:
    torch.manual_seed(0)
    model = Tables(dim, sparse=name == "SparseAdam").to(device=device, dtype=dtype)
    return _diff(model, [(ids,) for ids in _many(device, rows)], optimizer=make)


def _many(device: torch.device, rows: int = 64) -> list[list[Tensor]]:
    """Three batches of ids with many duplicates."""
    g = torch.Generator().manual_seed(0)
    return [
        [(torch.rand(rows, 4, generator=g).pow(3) * n).long().to(device) for n in (5, 300, 20_000)]
        for _ in range(3)
    ]


def _trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[list[Tensor]]
) -> list[Tensor]:
    """The parameters after a step with each batch."""
    for k, ids in enumerate(batches):
        optimizer.zero_grad()
        out = model(ids)
        g = torch.Generator(out.device).manual_seed(k)
        out.backward(torch.randn(out.shape, generator=g, device=out.device))
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _lazy(device: torch.device) -> dict[str, object]:
    """Adam on touched rows only, against torch's SparseAdam."""
    batches = _many(device)
    torch.manual_seed(0)
    plain = Tables(16, sparse=True).to(device)
    twin = Tables(16, sparse=False).to(device)
    twin.load_state_dict(plain.state_dict())
    example = ([ids[:, :2] for ids in batches[0]],)
    fast, own = recast.optimize(
        twin, torch.optim.Adam(twin.parameters(), lr=0.1), example=example, sparse_semantics="lazy"
    )
    theirs = torch.optim.SparseAdam(plain.parameters(), lr=0.1)
    for a, b in zip(_trained(fast, own, batches), _trained(plain, theirs, batches), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    return {}


def _twice(device: torch.device) -> dict[str, object]:
    """Under ``use_deterministic_algorithms`` two runs give the same bits."""
    found = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            torch.manual_seed(0)
            model = Tables(64, sparse=False).to(device)
            batches = _many(device)
            fast, own = recast.optimize(
                model, torch.optim.Adagrad(model.parameters(), lr=0.1), example=(batches[0],)
            )
            found.append(_trained(fast, own, batches))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), "two results"
    return {}


# ---------------------------------------------------------------- batches and bad input


def batches(device: torch.device, tiny: bool) -> Iterator[Item]:
    """Prefetching, and ids out of range."""
    yield Item("prefetch, values", partial(_prefetched, device))
    yield Item("ids out of range, counted", partial(_bad_ids, device))
    if device.type == "cuda":
        yield Item("ids out of range, checked", partial(_checked_ids, device))


def _prefetched(device: torch.device) -> dict[str, object]:
    g = torch.Generator().manual_seed(0)
    made: list[dict[str, Any]]
    made = [{"k": k, "x": [torch.randn(1 << 20, generator=g)]} for k in range(12)]
    burn = torch.randn(2048, 2048, device=device) if device.type == "cuda" else None
    sums = []
    for batch in prefetch(made, device, depth=2):
        if burn is not None:  # keeps the user's stream busy, so that copies overtake it
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
