"""Which way each product of an ``mlp`` takes: all that cublasLt proposes is timed, and it is told
what was left out and why.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import cublaslt_stand_in
import emulated_gpu
import pytest
from emulated_chains import F32, MLP, Machine, chain, compare

from recast.errors import RecastWarning
from recast.runtime import fastest
from recast.runtime.gpu.cublaslt import Epilogue
from recast.runtime.mlp import products as mlp_products

SECOND = "cublaslt second"  # there is no third


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine that chooses by itself and finds cublasLt's second algorithm always the fastest."""

    def seconds(way: Any) -> float:
        rank: int | None = way.args[0] if isinstance(way, functools.partial) else None
        return {0: 2.0, 1: 1.0, None: 3.0}[rank]

    monkeypatch.setattr(fastest, "_chosen", {})
    monkeypatch.setattr(fastest, "timer_of", lambda like: seconds)
    with cublaslt_stand_in.serve() as library, emulated_gpu.serve() as gpu:
        yield Machine(library, gpu)


def test_each_product_is_chosen_once(timed: Machine) -> None:
    args = chain(70, [8, 9, 7, 2], 0.0)
    compare(MLP, args, F32)
    assert len(fastest._chosen) == 5 and set(fastest._chosen.values()) == {SECOND}
    compare(MLP, args, F32)
    compare(MLP, (args[0][:65], *args[1:]), F32)  # about as many rows
    assert len(fastest._chosen) == 5
    compare(MLP, chain(130, [8, 9, 7, 2], 0.0), F32)
    assert len(fastest._chosen) == 10


def test_sums_apart_where_they_are_the_fastest(
    timed: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DRELU and a sum of columns: the same gradients, by another product."""

    def seconds(way: Any) -> float:
        return 1.0 if isinstance(way, functools.partial) and way.args[1:] == (True,) else 2.0

    monkeypatch.setattr(fastest, "timer_of", lambda like: seconds)
    for p in (0.0, 0.3):
        compare(MLP, chain(70, [8, 9, 7, 2], p), F32)
    names = {key[0]: way for key, way in fastest._chosen.items()}  # type: ignore[index]
    assert names["input gradient"] == "cublaslt, sums apart"
    timed.products()
    compare(MLP, chain(70, [8, 9, 7, 2], 0.3), F32)
    found = timed.products()
    assert found.count("DRELU") == 2 and "DRELU_BGRAD" not in found


def test_products_of_many_rows_are_chosen_too(
    timed: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those with nothing behind them: the first layer's input, a weight alone."""
    monkeypatch.setattr(mlp_products, "_MANY", 64)
    compare(MLP, chain(70, [8, 9, 7, 2], 0.0), F32)
    kinds = [key[0] for key in fastest._chosen]  # type: ignore[index]
    assert (
        sorted(kinds)
        == ["forward"] * 2 + ["input gradient"] * 2 + ["product"] + ["weight gradient"] * 3
    )
    assert set(fastest._chosen.values()) == {SECOND}


def test_what_was_left_out_is_told(timed: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest, "_times", {})
    monkeypatch.setattr(fastest, "_left_out", {})
    mlp_products._answers.clear()
    mlp_products._begins.clear()
    with timed.library.set("zero_bit", 1), timed.library.set("refuse", int(Epilogue.DRELU_BGRAD)):
        compare(MLP, chain(70, [8, 9, 2], 0.0), F32)
    mlp_products._answers.clear()
    mlp_products._begins.clear()
    told = {row["key"].split("'")[1]: row for row in fastest.timings()}  # type: ignore[attr-defined]
    assert told["forward"]["mask, cublaslt"] == "by a kernel: the bit of a sum of 0 is set"
    assert told["forward"]["relu, cublaslt"] == "by the product"
    assert "mask, cublaslt third" not in told["forward"], "there is no third"
    assert told["input gradient"]["cublaslt"] == "it has no algorithm for this"
    assert told["input gradient"]["chosen"] == "cublaslt second, sums apart"


def test_a_way_that_is_refused_at_last_is_left_out(timed: Machine) -> None:
    """The heuristics propose an algorithm that the product then does not take."""
    with timed.library.set("fail", 15):
        compare(MLP, chain(70, [8, 9, 7, 2], 0.0), F32)
    assert set(fastest._chosen.values()) == {"plain"}


def test_a_cublaslt_that_computes_something_else_is_not_used(timed: Machine) -> None:
    with (
        timed.library.set("no_transpose", 1),
        pytest.warns(RecastWarning, match="cublaslt.* gives another result than plain"),
    ):
        compare(MLP, chain(70, [8, 9, 9, 2], 0.0), F32)
    by_key = {str(key[0]): way for key, way in fastest._chosen.items()}  # type: ignore[index]
    # Only forward has opA.
    assert by_key == {
        "forward": "plain", "input gradient": SECOND, "weight gradient": SECOND
    }  # fmt: skip
