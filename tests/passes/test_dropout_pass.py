"""fuse-relu-dropout on a dropout alone: torch's own masks, drawn faster; where it stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import fired, optimized, same
from torch import Tensor, nn
from torch.nn import functional as F

from recast.runtime.layers.drawn_dropout import drawn_dropout
from recast.runtime.mlp import run, torch_draws

WIDTH = 24


def batch(rows: int, seed: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, WIDTH, generator=g, dtype=torch.float64),)


BATCHES = [batch(40, 0), batch(31, 1)]


class Model(nn.Module):
    """``forward(x) = rest(self, x * weight)``."""

    def __init__(self, rest: Callable[[Any, Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        self.rest = rest
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.drop = nn.Dropout(0.4, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self, x * self.weight)


ALONE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a module": lambda m, x: m.drop(x) + x,
    "a function": lambda m, x: F.dropout(x, 0.4, m.training) + x,
    "always on": lambda m, x: F.dropout(x, 0.4) + x,
    "of three dimensions": lambda m, x: m.drop(x.view(-1, 4, 6)).flatten(1),
    "of what is turned": lambda m, x: m.drop(x.view(-1, 4, 6).transpose(1, 2)).flatten(1),
}


@pytest.mark.parametrize("form", ALONE)
def test_alone(form: str) -> None:
    fast = same(Model(ALONE[form]), BATCHES)
    assert fired(fast) == {"draw-dropout": 1}
    assert sum(n.target is drawn_dropout for n in fast.graph.nodes) == 1


def test_p_and_training_are_read_at_each_call() -> None:
    fast = optimized(Model(ALONE["a module"]).double(), BATCHES)
    ((x,), _) = BATCHES
    fast.drop.p = 1.0
    torch.testing.assert_close(fast(x), x * fast.weight)
    fast.drop.eval()
    torch.testing.assert_close(fast(x), 2 * x * fast.weight)


def _writes(m: Any, x: Tensor) -> Tensor:
    kept = m.drop(x)
    x.add_(1.0)  # in eval mode the dropout returned x itself
    return kept * 2.0


STAYS: dict[str, Model] = {
    "in place": Model(ALONE["a module"], inplace=True),
    "its input is written to": Model(_writes),
    "optimised in eval mode": Model(ALONE["a module"]).eval(),
}


@pytest.mark.parametrize("form", STAYS)
def test_what_stays(form: str) -> None:
    assert not fired(same(STAYS[form], BATCHES, steps=False))


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", [(600, WIDTH), (20, WIDTH), (0, WIDTH)])
def test_it_is_torchs_dropout(shape: tuple[int, int], p: float) -> None:
    x = torch.randn(shape)
    for given in (x, x.t(), x.bfloat16()):
        torch.manual_seed(3)
        expected, state = F.dropout(given, p), torch.get_rng_state()
        torch.manual_seed(3)
        out = drawn_dropout(given, p, True)
        assert torch.equal(out, expected) and torch.equal(torch.get_rng_state(), state)
        assert out.stride() == expected.stride()


def test_only_what_is_large_is_worth_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_draws, "why_not", lambda: None)
    weight = torch.ones(WIDTH, requires_grad=True)
    for rows, one in ((20, False), (600, True)):
        out = drawn_dropout(torch.ones(rows, WIDTH) * weight, 0.3, True)
        assert (type(out.grad_fn).__name__ == f"{run.Mlp.__name__}Backward") == one


def test_a_model_put_to_eval_mode_copies_nothing() -> None:
    model = Model(lambda m, x: (m.drop(x), x))  # type: ignore[arg-type,return-value]
    fast = optimized(model.float(), [(x.float(),) for (x,) in BATCHES])
    dropped, whole = fast.eval()(torch.ones(600, WIDTH))
    assert dropped.data_ptr() == whole.data_ptr()
