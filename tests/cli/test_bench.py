"""``recast bench``: medians, memory to the byte, and steps that do what they say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recast.rewriter.cli import bench


def test_peak_is_exact() -> None:
    def step() -> None:
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(500, dtype=torch.uint8)
        del a
        c = torch.empty(100, dtype=torch.uint8)
        del b, c

    assert bench.peak_bytes(step) == 1500
    assert bench.peak_bytes(lambda: None) == 0


def test_a_dense_gradient_shows() -> None:
    """The gradient of a table is made and dropped inside of one step."""
    table = nn.Embedding(10_000, 8)
    ids = torch.arange(5)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    dense = bench.training_step(table, (ids,), None, optimizer)
    table_bytes = 10_000 * 8 * 4
    for _ in range(2):
        assert bench.peak_bytes(dense) >= table_bytes
    assert table.weight.grad is None


def test_order_alternates_and_all_rounds_are_kept() -> None:
    called: list[str] = []
    rounds: list[int] = []
    timings = bench.compare(
        lambda: called.append("plain"), lambda: called.append("fast"),
        rounds=4, warmup=1, progress=rounds.append,
    )  # fmt: skip
    pairs = [tuple(called[k : k + 2]) for k in range(2, 10, 2)]
    assert pairs == [("plain", "fast"), ("fast", "plain")] * 2
    assert [len(t.seconds) for t in timings] == [4, 4]
    assert rounds == [0, 1, 2, 3]


def test_numbers() -> None:
    plain, fast = bench.Timing([4.0, 2.0, 3.0], 4_000_000), bench.Timing([1.0, 2.0], 1_000)
    found = bench.Bench("M", "a step", plain, fast, "a machine")
    assert found.speedup == 2.0
    assert plain.iqr == 1.0
    assert bench.Timing([1.0]).iqr == 0.0
    assert found.to_dict()["memory_ratio"] == 1 / 4000
    text = str(found)
    assert text.splitlines()[0] == "M: 2.00 × as fast as plain"
    assert "4 MB" in text
    assert "1 kB" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5, "2.5 s"), (0.0931, "93.1 ms"), (0.00085, "850 µs"), (2e-8, "0.02 µs")],
)
def test_durations(seconds: float, text: str) -> None:
    assert bench.duration(seconds) == text


def test_steps() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    start = model[0].weight.detach().clone()
    x = (torch.randn(4, 3),)
    bench.inference_step(model, x)()
    assert not model.training
    assert torch.equal(model[0].weight, start)
    bench.training_step(model, x, None, torch.optim.SGD(model.parameters(), lr=1.0))()
    assert model.training
    assert not torch.equal(model[0].weight, start)
    assert model[0].weight.grad is None


def test_random_weights_give_every_output_a_gradient() -> None:
    weigh = bench._Weights()
    a, b = torch.ones(3, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    weigh({"a": a, "b": [b, torch.ones(2)]}).backward()
    assert a.grad is not None and b.grad is not None
    assert len(a.grad.unique()) == 3
    assert torch.equal(weigh([a, b]), weigh([a, b]))


def test_times_that_do_not_tell_the_two_apart_are_called_so() -> None:
    steady = bench.Timing([2.0, 2.1, 2.2]), bench.Timing([1.0, 1.1, 1.2])
    noisy = bench.Timing([1.0, 2.0, 4.0]), bench.Timing([1.0, 1.5, 4.0])
    told = [str(bench.Bench("M", "a step", *pair, "a machine")) for pair in (steady, noisy)]
    assert ["more --rounds" in text for text in told] == [False, True]
