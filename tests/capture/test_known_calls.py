"""Calls that were examined before run without another look, and any change is still seen."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning

pytestmark = pytest.mark.usefixtures("known_calls")
torch.manual_seed(0)
IDS, MORE = torch.randint(9, (6, 2)), torch.randint(9, (5, 2))
WEIGHTS = torch.rand(6, 4)
scale = 2.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(9, 4)
        self.top = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 4))

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        return self.top(self.rows(ids)) * weights * scale


class OfDict(Net):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(batch["ids"], batch["weights"])


class OfList(Net):
    def forward(self, batch: list[Tensor], none: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(*batch)


class OfTuple(Net):
    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(*batch)


def made(kind: type[Net] = Net, *args: Any, **kwargs: Any) -> tuple[Net, Any]:
    """A model, and its result, for which calls of this form are known."""
    model = kind().eval()
    args = args or (() if kwargs else (IDS, WEIGHTS))
    fast = recast.optimize(model, example=args[0] if kind is OfDict else args or kwargs)
    for _ in range(2):
        fast(*args, **kwargs)
    return model, fast


def is_known(fast: Any, *args: Any, **kwargs: Any) -> bool:
    return fast._runner.known_call(args, kwargs) is not None


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        (Net, (IDS, WEIGHTS)),
        (OfDict, ({"ids": IDS, "weights": WEIGHTS},)),
        (OfList, ([IDS, WEIGHTS],)),
        (OfTuple, ((IDS, WEIGHTS),)),
    ],
)
def test_forms(kind: type[Net], args: tuple[Any, ...]) -> None:
    model, fast = made(kind, *args)
    want = (*args, None) if kind is OfList else args
    assert is_known(fast, *want)
    torch.testing.assert_close(fast(*args), model(*args))


class WithConstants(Net):
    def forward(  # type: ignore[override]
        self, ids: Tensor, weights: Tensor, twice: bool = True, times: int = 1, by: float = 0.5,
        how: str = "sum", power: float = 0.0,
    ) -> Tensor:  # fmt: skip
        out = super().forward(ids, weights) * (2 if twice else 1) * times * by
        return out + power if how == "sum" else out


def test_constants() -> None:
    given: list[Any] = [True, 1, 0.5, "sum"]
    model = WithConstants().eval()
    for power in (0.0, 3.0):  # zeros are told by their sign, in Python
        fast = recast.optimize(model, example=(IDS, WEIGHTS, *given, power))
        for _ in range(2):
            fast(IDS, WEIGHTS, *given, power)
        assert is_known(fast, IDS, WEIGHTS, *given, power) == bool(power)
    others = {0: (False, 1, "", None), 1: (2, True, 1.0), 2: (0.25, 1, float("nan")), 3: ("", b"")}
    for k, values in others.items():
        for value in values:
            assert not is_known(fast, IDS, WEIGHTS, *given[:k], value, *given[k + 1 :], 3.0), value
    with pytest.warns(RecastWarning, match="times is another int"):
        got = fast(IDS, WEIGHTS, True, 2, power=3.0)
    torch.testing.assert_close(got, model(IDS, WEIGHTS, True, 2, power=3.0))


def test_by_name() -> None:
    model, fast = made()
    assert is_known(fast, ids=IDS, weights=WEIGHTS)
    assert is_known(fast, IDS, weights=WEIGHTS)
    assert not is_known(fast, weights=WEIGHTS, ids=IDS)  # bound first
    assert not is_known(fast, IDS, ids=IDS, weights=WEIGHTS)
    assert not is_known(fast, IDS, WEIGHTS, weights=WEIGHTS)
    assert not is_known(fast, IDS)
    want = model(IDS, WEIGHTS)
    torch.testing.assert_close(fast(ids=IDS, weights=WEIGHTS), want)
    torch.testing.assert_close(fast(weights=WEIGHTS, ids=IDS), want)


def test_keys_in_another_order_and_other_containers() -> None:
    model, fast = made(OfDict, {"ids": IDS, "weights": WEIGHTS})
    other = {"weights": WEIGHTS, "ids": IDS}
    assert not is_known(fast, other)
    torch.testing.assert_close(fast(other), model(other))
    _, fast = made(OfList, [IDS, WEIGHTS])
    for changed in ((IDS, WEIGHTS), [IDS], [IDS, WEIGHTS, WEIGHTS], [IDS, None]):
        assert not is_known(fast, changed, None)
    assert not is_known(fast, [IDS, WEIGHTS], IDS)
    assert is_known(fast, [IDS, WEIGHTS])  # its other argument is left out


def test_stars_and_keywords_are_bound() -> None:
    class Stars(Net):
        def forward(self, *batch: Tensor) -> Tensor:
            return super().forward(*batch)

    class Keyword(Net):
        def forward(self, ids: Tensor, *, weights: Tensor) -> Tensor:
            return super().forward(ids, weights)

    _, fast = made(Stars, IDS, WEIGHTS)
    assert not is_known(fast, (IDS, WEIGHTS))
    with pytest.warns(RecastWarning, match="1 entries"), pytest.raises(TypeError):
        fast((IDS, WEIGHTS))
    _, fast = made(Keyword, ids=IDS, weights=WEIGHTS)
    with pytest.raises(TypeError, match="positional"):
        fast(IDS, WEIGHTS)


class Own(Tensor):
    pass


@pytest.mark.parametrize(
    "other",
    [
        (MORE, WEIGHTS[:5]),
        (IDS.int(), WEIGHTS),
        (IDS, WEIGHTS.double()),
        (IDS, WEIGHTS[0]),
        (IDS, torch._neg_view(WEIGHTS)),
        (IDS, WEIGHTS.as_subclass(Own)),
        (IDS, WEIGHTS.to(torch.complex64)),
        (IDS, WEIGHTS.to_sparse()),
        (IDS, WEIGHTS > 0.5),
    ],
)
def test_other_inputs_are_examined(other: tuple[Tensor, Tensor]) -> None:
    model, fast = made()
    assert not is_known(fast, *other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecastWarning)
        torch.testing.assert_close(fast(*other), model(*other))
    assert is_known(fast, IDS, WEIGHTS)


def _hook(model: Net) -> None:
    model.top[1].register_forward_hook(lambda *_: torch.ones(6, 3))


def _code(model: Net) -> None:
    Net.forward.__code__ = _other_forward.__code__


def _other_forward(self: Net, ids: Tensor, weights: Tensor) -> Tensor:
    return self.rows(ids) * weights * scale


def _slope(model: Net) -> None:
    object.__setattr__(model.top[1], "__class__", nn.Tanh)


def _global(model: Net) -> None:
    globals()["scale"] = 3.0


def _method(model: Net) -> None:
    Net.forward = _other_forward  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Net], object]] = {
    "hook": _hook,
    "module": lambda m: m.top.__setitem__(1, nn.Tanh()),
    "class": _slope,
    "one more": lambda m: m.top.append(nn.Tanh()),
    "code": _code,
    "method": _method,
    "global": _global,
    "setting": lambda m: setattr(m.rows, "mode", "sum"),
    "own forward": lambda m: setattr(m.top[0], "forward", lambda x: x.new_ones(6, 3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Net, "forward", Net.forward)  # put back, as are its code and the global
    monkeypatch.setitem(globals(), "scale", 2.0)
    code = Net.forward.__code__
    model, fast = made()
    before = fast(IDS, WEIGHTS)
    assert is_known(fast, IDS, WEIGHTS)
    try:
        CHANGES[change](model)
        if change not in ("code", "method", "global"):  # of the class, or of all
            CHANGES[change](fast)
        assert not is_known(fast, IDS, WEIGHTS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecastWarning)
            now = fast(IDS, WEIGHTS)
        torch.testing.assert_close(now, model(IDS, WEIGHTS))
        assert not torch.equal(now, before)
    finally:
        monkeypatch.undo()
        Net.forward.__code__ = code


def test_modes() -> None:
    class Dropped(Net):
        def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(ids, weights), 0.5, self.training)

    _, fast = made(Dropped)
    fast.train()
    torch.manual_seed(1)
    first = fast(IDS, WEIGHTS)
    assert is_known(fast, IDS, WEIGHTS)
    torch.manual_seed(1)
    torch.testing.assert_close(fast(IDS, WEIGHTS), first)
    assert (first == 0).any() and not (fast.eval()(IDS, WEIGHTS) == 0).any()


def test_writes_that_change_nothing() -> None:
    """A script's own variables are globals of its forward."""
    _, fast = made()
    globals()["step_of_a_loop"] = 1
    try:
        assert is_known(fast, IDS, WEIGHTS)
    finally:
        del globals()["step_of_a_loop"]


def test_many_sizes() -> None:
    model, fast = made()
    for n in range(1, 200):
        ids, weights = IDS[:1].expand(n, 2), WEIGHTS[:1].expand(n, 4)
        torch.testing.assert_close(fast(ids, weights), model(ids, weights))
    fast(IDS, WEIGHTS)
    fast(IDS, WEIGHTS)
    torch.testing.assert_close(fast(IDS, WEIGHTS), model(IDS, WEIGHTS))


def test_parameters_are_read_anew() -> None:
    model, fast = made()
    with torch.no_grad():
        fast.top[0].weight = nn.Parameter(torch.ones(3, 4))
        model.top[0].weight = nn.Parameter(torch.ones(3, 4))
    torch.testing.assert_close(fast(IDS, WEIGHTS), model(IDS, WEIGHTS))
    model.top[0].bias = fast.top[0].bias = None
    torch.testing.assert_close(fast(IDS, WEIGHTS), model(IDS, WEIGHTS))


def test_errors_say_the_same() -> None:
    model, fast = made()
    bad = IDS.clone()
    bad[3, 1] = 9
    assert is_known(fast, bad, WEIGHTS)
    with pytest.raises(recast.errors.IdError, match="id 9 of lookup 0"):
        fast(bad, WEIGHTS)
    with pytest.raises((IndexError, RuntimeError)):
        model(bad, WEIGHTS)


def test_threads() -> None:
    """torch lets other threads run while it is asked whether an input is a negative view."""
    model, fast = made()
    batches = [(IDS[:n], WEIGHTS[:n] + n) for n in range(1, 7)]
    with torch.no_grad():
        want = [model(*batch) for batch in batches]
        for batch in batches:
            fast(*batch)

    def call(k: int) -> bool:
        with torch.no_grad():
            got = [fast(*batches[k]) for _ in range(400)]
        return all(torch.equal(one, got[0]) and torch.allclose(one, want[k]) for one in got)

    with ThreadPoolExecutor(len(batches)) as pool:
        assert all(pool.map(call, range(len(batches))))


def test_nothing_is_kept_alive() -> None:
    _, fast = made()
    gone = weakref.ref(fast._root)
    del fast, _
    gc.collect()
    assert gone() is None


def test_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    from recast.rewriter.compiled import known_calls

    monkeypatch.setattr(known_calls, "recognizer", None)
    model, fast = made()
    assert not is_known(fast, IDS, WEIGHTS)
    torch.testing.assert_close(fast(IDS, WEIGHTS), model(IDS, WEIGHTS))
