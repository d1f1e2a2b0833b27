"""Chains of layers on few rows: the one C++ call against plain torch in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from recast.runtime import device, tolerances
from recast.runtime.mlp import mlp
from recast.runtime.mlp import small as mlp_small

ISAS = [isa for isa in device.ISAS if device.why_not(isa)() is None]
CHAINS = {
    "relu": ("linear", "relu", "linear", "relu"),
    "head": ("linear", "relu", "dropout", "linear", "sigmoid"),
    "tanh": ("linear", "tanh", "linear"),
    "one": ("linear",),
    "twice": ("linear", "linear", "relu", "sigmoid"),
    "behind a layer": ("relu", "dropout", "linear", "tanh"),
    "behind a gate": ("sigmoid", "relu", "linear", "linear"),
}
WIDTHS = ((13, 32, 5), (1, 1, 1), (16, 7, 33), (130, 3, 17))


def params(steps: tuple[str, ...], widths: tuple[int, ...], bias: bool) -> list[Tensor | None]:
    g = torch.Generator().manual_seed(len(steps) + sum(widths))
    made: list[Tensor | None] = []
    for into, out in list(pairwise(widths))[: steps.count("linear")]:
        made.append(torch.randn(out, into, generator=g) / into**0.5)
        made.append(torch.randn(out, generator=g) if bias else None)
    return made


def run(x: Tensor, own: list[Tensor | None], steps: tuple[str, ...]) -> Tensor | None:
    return mlp_small.result(x, own, steps, [False] * steps.count("dropout"))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("chain", CHAINS)
def test_numbers(isa: str, rows: int, chain: str) -> None:
    steps = CHAINS[chain]
    for widths in WIDTHS:
        for bias in (True, False):
            own = params(steps, widths, bias)
            x = torch.randn(rows, widths[0], generator=torch.Generator().manual_seed(rows))
            numbers: list[float | None] = [0.3] * steps.count("dropout")
            flags = [False] * len(numbers)
            wide = [None if p is None else p.double() for p in own]
            want = mlp.reference(x.double(), wide, [], steps, numbers, flags)
            plain = mlp.reference(x, own, [], steps, numbers, flags)
            with device.use(isa):
                got = run(x, own, steps)
            assert got is not None
            assert tolerances.excess(got, plain, want, scale=float(x.abs().max())) <= 1


def test_what_is_not_for_it() -> None:
    steps, widths = CHAINS["head"], (13, 8, 3)
    own, x = params(steps, widths, True), torch.randn(2, 13)
    assert run(x, own, steps) is not None
    assert run(torch.randn(5, 13), own, steps) is None  # rows
    assert run(torch.randn(0, 13), own, steps) is None
    assert run(torch.randn(2, 12), own, steps) is None  # a width that does not fit: torch's error
    assert run(torch.randn(13, 2).t(), own, steps) is None  # not contiguous
    assert run(x.double(), own, steps) is None
    assert mlp_small.result(x, own, steps, [True]) is None  # dropout draws
    assert mlp_small.result(x, own, ("linear", "gelu", "linear"), []) is None
    assert mlp_small.result(x, own[:3], steps, [False]) is None
    assert mlp_small.result(x, [], ("relu",), []) is None  # no layer
    turned = torch.randn(13, 8).t()
    assert run(x, [turned, *own[1:]], steps) is None


def test_what_is_not_a_number_stays_so() -> None:
    own = params(("linear", "relu"), (3, 4), True)
    got = run(torch.tensor([[1.0, float("nan"), 2.0]]), own, ("linear", "relu"))
    assert got is not None and got.isnan().all()


def test_it_serves_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import recast

    model = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid()).eval()
    fast = recast.optimize(model, example=[(torch.randn(6, 9),), (torch.randn(4, 9),)])
    asked: list[object] = []
    own = mlp_small.result
    monkeypatch.setattr(mlp_small, "result", lambda *a: asked.append(r := own(*a)) or r)
    with torch.no_grad():
        x = torch.randn(1, 9)
        assert tolerances.excess(fast(x), model(x), model.double()(x.double())) <= 1
    assert len(asked) == 1 and asked[0] is not None


class Experts(nn.Module):
    """Two experts and their gate, of which the first layers are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2)
        )
        self.gate = nn.Linear(48, 2)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).softmax(1)
        return sum(gate[:, k : k + 1] * e(x) for k, e in enumerate(self.experts))


def test_it_serves_what_is_left_of_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    import recast

    model = Experts().eval()
    fast = recast.optimize(model, example=[(torch.randn(6, 48),), (torch.randn(4, 48),)])
    assert "linears" in fast.code
    asked: list[tuple[object, tuple[str, ...]]] = []
    own = mlp_small.result

    def spy(x: Tensor, params: object, steps: tuple[str, ...], training: object) -> Tensor | None:
        found = own(x, params, steps, training)  # type: ignore[arg-type]
        asked.append((found, tuple(steps)))
        return found

    monkeypatch.setattr(mlp_small, "result", spy)
    with torch.no_grad():
        x = torch.randn(1, 48)
        kept = x.clone()
        assert tolerances.excess(fast(x), model(x), model.double()(x.double())) <= 1
    assert torch.equal(x, kept)
    assert all(found is not None for found, _ in asked)
    assert [steps for _, steps in asked] == [("linear",)] * 3 + [("relu", "linear")] * 2


def test_threads_give_the_same_bits() -> None:
    steps = ("linear", "relu", "linear")
    own = params(steps, (415, 514, 259), True)
    x = torch.randn(3, 415, generator=torch.Generator().manual_seed(1))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(run(x, own, steps))
    finally:
        torch.set_num_threads(before)
    assert found[0] is not None
    assert all(torch.equal(found[0], other) for other in found[1:])
