"""Numbers that the training loop sets between calls, as a temperature: ``varying=["heat"]``."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning, UsageError

Form = Callable[["Net", Tensor], Tensor]
IDS = torch.arange(96).view(32, 3) % 50


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heat = 1.0

    def forward(self, h: Tensor) -> Tensor:
        return (h / self.heat).softmax(-1)


class Net(nn.Module):
    scale = 2.0

    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.mlp = nn.EmbeddingBag(50, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.weight, self.k, self.steps, self.size = 0.0, 3, 0, 1.0
        self.gate, self.drop = Gate(), nn.Dropout(0.1)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, self.mlp(self.e(x)))


def counted(m: Net, h: Tensor) -> Tensor:
    m.steps += 1
    return h * m.weight + m.steps


FORMS: dict[str, tuple[Form, str, list[Any]]] = {
    "a factor": (lambda m, h: h + m.weight * h.square().mean(), "weight", [0.1, 0.3]),
    "inside a module": (lambda m, h: m.gate(h), "gate.heat", [0.5, 0.1]),
    "a probability": (lambda m, h: F.dropout(h, m.weight, m.training), "weight", [0.2, 0.6]),
    "a slope": (lambda m, h: F.leaky_relu(h - 1, m.weight), "weight", [0.2, 0.6]),
    "a tensor": (
        lambda m, h: h * torch.tensor(m.weight) + torch.full((8,), m.weight), "weight", [1.5, -2.0],
    ),
    "a bound": (lambda m, h: h.clamp(min=m.weight), "weight", [0.01, 0.3]),
    "drawn": (lambda m, h: F.gumbel_softmax(h, tau=1 + m.weight), "weight", [1.5, 2.5]),
    "an exponent": (lambda m, h: (h + 1) ** m.weight, "weight", [1.5, 2.0]),
    "smoothed labels": (
        lambda m, h: F.cross_entropy(h, h.argmax(1), label_smoothing=m.weight), "weight", [0.1],
    ),
    "a size": (lambda m, h: h[:, : m.k] @ h[:, : m.k].t(), "k", [5, 2]),
    "how many": (lambda m, h: h.topk(m.k)[0].sum(1), "k", [5, 2]),
    "a shape": (lambda m, h: torch.cat([h, h.new_zeros(h.size(0), m.k)], 1), "k", [5, 2]),
    "a mask": (lambda m, h: h * (torch.arange(8) < m.k), "k", [5, 2]),
    "beside a counter": (counted, "weight", [0.1, 0.3]),
}  # fmt: skip


def put(model: Any, path: str, value: Any) -> None:
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, value)


def steps(model: Any, optimizer: Any, path: str, values: list[Any]) -> list[Tensor]:
    """What a loop leaves that sets the number at each step."""
    torch.manual_seed(1)
    found = []
    for k, value in enumerate(values):
        put(model, path, value)
        out = model(IDS[k:])
        optimizer.zero_grad()
        (out * torch.linspace(0.5, 1.5, out.numel()).view(out.shape)).sum().backward()
        optimizer.step()
        found.append(out.detach())
    return [*found, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("form", FORMS)
def test_it_is_read_at_each_call(form: str) -> None:
    made, path, values = FORMS[form]
    plain = Net(made)
    own = copy.deepcopy(plain)
    fast, optimizer = recast.optimize(
        own, torch.optim.SGD(own.parameters(), 0.1), example=IDS, varying=[path]
    )
    assert fast.report.captured == "whole"
    owner, _, name = path.rpartition(".")
    start = getattr(plain.get_submodule(owner), name)
    wanted = steps(plain, torch.optim.SGD(plain.parameters(), 0.1), path, [start, *values])
    found = steps(fast, optimizer, path, [start, *values])  # without a warning
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_where_it_decides_a_branch_the_other_one_runs_plain() -> None:
    plain = Net(lambda m, h: h * m.weight if m.weight > 0.5 else h * 2)
    fast = recast.optimize(plain, example=IDS, varying=["weight"])
    plain.weight = fast.weight = 0.25
    torch.testing.assert_close(fast(IDS), plain(IDS))
    plain.weight = fast.weight = 0.75
    with pytest.warns(RecastWarning, match="control flow that depends on values"):
        torch.testing.assert_close(fast(IDS), plain(IDS))


def test_another_type_is_told() -> None:
    plain = Net(lambda m, h: h * m.weight)
    fast = recast.optimize(plain, example=IDS, varying=["weight"])
    fast.weight = True
    with pytest.warns(RecastWarning, match="the type of weight was changed"):
        torch.testing.assert_close(fast(IDS), plain.mlp(plain.e(IDS)))


def of_a_kind(m: Net, h: Tensor) -> Tensor:
    match m.size:
        case float():
            return h * m.size
        case _:
            return h


ASKED: dict[str, Form] = {
    "isinstance": lambda m, h: h * m.size if isinstance(m.size, float) else h,
    "no tensor": lambda m, h: h if isinstance(m.size, Tensor) else h * m.size,
    "its class": lambda m, h: h * m.size if m.size.__class__ is float else h,
    "the real part": lambda m, h: h * m.size.real,
    "match": of_a_kind,
}


@pytest.mark.parametrize("form", ASKED)
def test_what_no_trace_sees_is_proved_with_other_numbers(form: str) -> None:
    """The first one tells nothing: a factor of 1."""
    plain = Net(ASKED[form])
    fast = recast.optimize(copy.deepcopy(plain), example=IDS, varying=["size"])
    assert fast.report.captured == "partial"
    assert "forward asks more of it than is seen" in str(fast.report)
    for scale in (0.5, 1.0, -2.0):
        plain.size = fast.size = scale
        torch.testing.assert_close(fast(IDS), plain(IDS))


def pooled(e: Tensor, query: Tensor) -> Tensor:
    return ((e @ query).softmax(1).unsqueeze(-1) * e).sum(1)


LENGTHS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pooled": pooled,
    "mean": lambda e, query: e.sum(1) / e.size(1),
    "loop": lambda e, query: sum((e[:, j] * j for j in range(e.size(1))), e[:, 0]),
}


class Truncated(nn.Module):
    def __init__(self, of: Callable[[Tensor, Tensor], Tensor], k: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.query = nn.Embedding(50, 8), nn.Parameter(torch.randn(8))
        self.of, self.k = of, k

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.e(x[:, : self.k]), self.query)


@pytest.mark.parametrize("form", LENGTHS)
@pytest.mark.parametrize("start", [2, 3, 8])
def test_a_length_that_the_example_does_not_reach(start: int, form: str) -> None:
    plain = Truncated(LENGTHS[form], start)
    fast = recast.optimize(copy.deepcopy(plain), example=IDS, varying=["k"])
    assert fast.report.captured == ("partial" if form == "loop" else "whole")
    for k in (start, 2, 1, 5):
        plain.k = fast.k = k
        torch.testing.assert_close(fast(IDS), plain(IDS), rtol=1e-4, atol=1e-5)


def test_a_number_that_a_length_is_compared_with() -> None:
    plain = Net(lambda m, h: h[:, : m.k] if h.size(1) > m.k else h)
    plain.k = 20
    fast = recast.optimize(copy.deepcopy(plain), example=IDS, varying=["k"])
    assert fast.report.captured == "whole"
    torch.testing.assert_close(fast(IDS), plain(IDS), rtol=1e-4, atol=1e-5)
    plain.k = fast.k = 3
    with pytest.warns(RecastWarning, match="control flow that depends on"):
        torch.testing.assert_close(fast(IDS), plain(IDS))


def test_in_a_model_that_is_captured_in_part() -> None:
    fast = recast.optimize(Outer(), example=IDS, varying=["inner.gate.heat"])
    assert fast.report.captured == "partial"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = copy.deepcopy(fast._root)
        for heat in (0.5, 0.2):
            other.inner.gate.heat = fast.inner.gate.heat = heat
            torch.testing.assert_close(fast(IDS), other(IDS))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Net(lambda m, h: m.gate(h))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * len(globals()["".join(["FOR", "MS"])])  # not captured


def test_copies() -> None:
    fast = recast.optimize(Heated(), example=IDS, varying=["gate.heat"])
    plain = Heated()
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        other.gate.heat = plain.gate.heat = 0.3
        torch.testing.assert_close(other(IDS), plain(IDS))
    assert fast.gate.heat == 1.0


class Heated(Net):
    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.mlp(self.e(x)))


def test_of_all_forms_of_call() -> None:
    class Two(Heated):
        def forward(self, x: Tensor, label: Tensor | None = None) -> Tensor:
            out = super().forward(x)
            return out if label is None else (out - label[:, None]).square().mean()

    plain, batch = Two(), (IDS, torch.rand(32))
    fast = recast.optimize(plain, example=batch, forms=[(IDS,)], varying=["gate.heat"])
    plain.gate.heat = fast.gate.heat = 0.3
    torch.testing.assert_close(fast(*batch), plain(*batch))
    torch.testing.assert_close(fast(IDS), plain(IDS))
    assert recast.diff(plain, fast, batch).ok


def test_a_module_of_two_names() -> None:
    class Twice(Heated):
        def __init__(self) -> None:
            super().__init__()
            self.other = self.gate

        def forward(self, x: Tensor) -> Tensor:
            return self.other(super().forward(x))

    plain = Twice()
    fast = recast.optimize(copy.deepcopy(plain), example=IDS, varying=["other.heat"])
    plain.other.heat = fast.other.heat = 0.3
    torch.testing.assert_close(fast(IDS), plain(IDS))


def test_said() -> None:
    fast = recast.optimize(Heated(), example=IDS, varying=("gate.heat", "weight"))
    assert "varying numbers, read at each call: gate.heat" in fast.report.notes
    assert fast.why_not_recordable() == "forward reads numbers that vary, and a replay would not"


def test_a_change_of_another_number_names_the_remedy() -> None:
    fast = recast.optimize(Heated(), example=IDS)
    fast.gate.heat = 0.5
    with pytest.warns(RecastWarning, match=r"or give it varying=\['gate.heat'\] first"):
        fast(IDS)


@pytest.mark.parametrize(
    ("varying", "what", "why", "tries"),
    [
        ("weight", "is a str, not a list", "the path of each number", "varying=['weight']"),
        (["heat"], "'heat' is no number", "no attribute of that path", "varying=['gate.heat']"),
        (["gate.hot"], "'gate.hot' is no number", "no attribute", "varying=['gate.heat']"),
        (["drop.p"], "'drop.p' is no number", "Dropout is a layer of torch", "varying=["),
        (["scale"], "'scale' is no number", "no attribute of that path", "varying=["),
        (["training"], "'training' is no number", "it is a bool", "varying=["),
        (["e"], "'e' is no number", "no attribute of that path", "varying=["),
    ],
)  # fmt: skip
def test_what_is_no_number(varying: Any, what: str, why: str, tries: str) -> None:
    with pytest.raises(UsageError) as caught:
        recast.optimize(Heated(), example=IDS, varying=varying)
    error = caught.value
    assert what in error.what and why in error.why and any(tries in t for t in error.tries)


def test_an_example_is_needed() -> None:
    with pytest.raises(UsageError, match="varying numbers are given, and no example"):
        recast.optimize(Heated(), varying=["gate.heat"])
