"""Tables updated by rows, with many duplicates, against torch's own steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

import recast
from gpu.check.model_checks import diff_training
from gpu.harness.items import Item
from recast import optim


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


ROWS: tuple[int, ...] = (5, 300, 20_000)  # of the tables


class Tables(nn.Module):
    def __init__(self, dim: int, sparse: bool) -> None:
        super().__init__()
        self.emb = nn.ModuleList(nn.EmbeddingBag(n, dim, mode="sum", sparse=sparse) for n in ROWS)

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
    return diff_training(model, [(ids,) for ids in _many(device, rows)], optimizer=make)


def _many(device: torch.device, rows: int = 64) -> list[list[Tensor]]:
    """Three batches of ids with many duplicates."""
    g = torch.Generator().manual_seed(0)
    return [
        [(torch.rand(rows, 4, generator=g).pow(3) * n).long().to(device) for n in ROWS]
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
