"""How each product of an ``mlp`` is computed: all that cublasLt proposes is timed, and what is left
out is reported, with the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import cublaslt_stand_in
import emulated_gpu
import pytest
import torch
from emulated_chains import F32, MLP, Machine, cast, chain, compare, run

from recast.errors import RecastWarning
from recast.runtime import fastest
from recast.runtime.gpu.cublaslt import Epilogue
from recast.runtime.mlp import products as mlp_products
from recast.runtime.mlp import relu_trust

SECOND = "cublaslt second"  # there is no third


@pytest.fixture(params=["mask"])
def timed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine that chooses by itself and finds cublasLt's second algorithm always the fastest.

    And gradients of a relu by what the parameter names.
    """

    def seconds(way: Any) -> float:
        rank = way.args[0] if isinstance(way, functools.partial) else None
        if isinstance(rank, bool):  # of two: whether a mask is kept
            return 1.0 if rank == (request.param == "mask") else 2.0
        return {0: 2.0, 1: 1.0, 9: 0.5}.get(rank, 3.0) if isinstance(rank, int) else 3.0

    monkeypatch.setattr(fastest, "_chosen", {})
    monkeypatch.setattr(fastest, "timer_of", lambda like: seconds)
    with cublaslt_stand_in.serve() as library, emulated_gpu.serve() as gpu:
        yield Machine(library, gpu)


def chosen() -> dict[str, set[str]]:
    """The ways by the kind of their key."""
    found: dict[str, set[str]] = {}
    for key, way in fastest._chosen.items():
        found.setdefault(key[0], set()).add(way)  # type: ignore[index]
    return found


def test_each_product_is_chosen_once(timed: Machine) -> None:
    """Per relu the way to its gradient, and products with and without a mask; then the rest."""
    args = chain(70, [8, 9, 7, 2], 0.0)
    compare(MLP, args, F32)
    assert chosen() == {
        "relu": {"mask"}, "forward": {SECOND}, "input gradient": {SECOND},
        "weight gradient": {SECOND},
    }  # fmt: skip
    once = len(fastest._chosen)
    assert once == 2 + 2 * 2 + 2 + 1
    compare(MLP, args, F32)
    compare(MLP, (args[0][:65], *args[1:]), F32)  # about as many rows
    assert len(fastest._chosen) == once
    compare(MLP, chain(130, [8, 9, 7, 2], 0.0), F32)
    assert len(fastest._chosen) == 2 * once


@pytest.mark.parametrize("timed", ["output"], indirect=True)
@pytest.mark.parametrize("last", [False, True], ids=["linear last", "relu last"])
def test_the_output_of_a_relu_tells_its_gradient(timed: Machine, last: bool) -> None:
    """Where that is the faster way: no mask is written."""
    x, *rest = chain(70, [8, 9, 7, 2], 0.0, last=last)
    wanted = [x.requires_grad_(), *(p.requires_grad_() for p in rest[0])]
    for _ in range(2):
        timed.products()
        timed.gpu.launched.clear()
        out = MLP.target(x, *rest)
        forward, launched = timed.products(), list(timed.gpu.launched)
        torch.autograd.grad(out, wanted, torch.ones_like(out))
    assert forward == ["RELU_BIAS"] * (2 + last) and launched == []
    assert timed.gpu.launched == ["mlp_output_gradient", "mlp_sum_parts"] * (2 + last)
    assert "DRELU_BGRAD" not in timed.products()
    assert chosen()["relu"] == {"output"}


def test_a_layer_of_one_output_needs_no_mask(timed: Machine) -> None:
    """Its kernel reads the output of the relu in any case, so nothing is timed."""
    compare(MLP, chain(70, [8, 9, 1], 0.0), F32)
    assert "relu" not in chosen()
    timed.products()
    compare(MLP, chain(70, [8, 9, 1], 0.0), F32)
    assert "RELU_AUX_BIAS" not in timed.products()


def test_choices_of_tf32_are_its_own(timed: Machine) -> None:
    """What is fast for float32 is not for TF32: another algorithm, another alignment of rows."""
    settings = torch.backends.cuda.matmul
    before, args = settings.fp32_precision, chain(70, [13, 24, 9, 1], 0.0)
    try:
        kinds = []
        for precision in ("ieee", "tf32"):
            settings.fp32_precision = precision
            run(MLP.target, cast(args, F32), torch.ones(70, 1))
            kinds.append([key[0] for key in fastest._chosen])  # type: ignore[index]
    finally:
        settings.fp32_precision = before
    assert {"first layer", "relu", "forward", "one output", "weight gradient"} <= {*kinds[0]}
    assert sorted(kinds[1]) == sorted(2 * kinds[0])


def test_sums_apart_where_they_are_the_fastest(
    timed: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DRELU and a sum of columns: the same gradients, by another product."""

    def seconds(way: Any) -> float:
        return 1.0 if isinstance(way, functools.partial) and way.args[1:] == (True,) else 2.0

    monkeypatch.setattr(fastest, "timer_of", lambda like: seconds)
    for p in (0.0, 0.3):
        compare(MLP, chain(70, [8, 9, 7, 2], p), F32)
    assert chosen()["input gradient"] == {"cublaslt, sums apart"}
    timed.products()
    compare(MLP, chain(70, [8, 9, 7, 2], 0.3), F32)
    found = timed.products()
    assert found.count("DRELU") == 2 and "DRELU_BGRAD" not in found


def test_products_of_many_rows_are_chosen_too(
    timed: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those with nothing behind: the last layer, the first one's input, a weight alone."""
    monkeypatch.setattr(mlp_products, "MANY", 64)
    compare(MLP, chain(70, [8, 9, 7, 2], 0.0), F32)
    kinds = [key[0] for key in fastest._chosen]  # type: ignore[index]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "relu": 2, "forward": 4, "linear": 1, "product": 3, "input gradient": 2,
        "weight gradient": 3,
    }  # fmt: skip
    assert all(ways == {SECOND} for kind, ways in chosen().items() if kind != "relu")


def test_what_was_left_out_is_told(timed: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest, "_times", {})
    monkeypatch.setattr(fastest, "_left_out", {})
    relu_trust._known.clear()
    mlp_products._begins.clear()
    with timed.library.set("zero_bit", 1):
        compare(MLP, chain(70, [8, 9, 2], 0.0, bias=False), F32)
    with timed.library.set("refuse", int(Epilogue.DRELU_BGRAD)):
        compare(MLP, chain(130, [8, 9, 2], 0.0), F32)
    relu_trust._known.clear()
    mlp_products._begins.clear()
    rows = {str(row["key"]): row for row in fastest.timings()}
    told = {
        key.split("'")[1]: row for key, row in rows.items() if "forward', True, False, True" in key
    }
    told |= {key.split("'")[1]: row for key, row in rows.items() if "forward" not in key}
    assert told["forward"]["mask, cublaslt"] == "by a kernel: the bit of a sum of 0 is set"
    assert told["forward"]["relu, cublaslt"] == "by the product"
    assert "mask, cublaslt third" not in told["forward"], "there is no third"
    assert told["input gradient"]["cublaslt"] == "it has no algorithm for this"
    assert told["input gradient"]["chosen"] == "cublaslt second, sums apart"


def test_algorithms_that_need_no_memory(timed: Machine) -> None:
    """They are timed too, and used if they are the fastest."""
    with timed.library.set("roomless", 1):
        for p in (0.0, 0.3):
            compare(MLP, chain(70, [8, 9, 7, 2], p), F32)
        ways = chosen()
        assert ways.pop("relu") == {"mask"}
        assert set.union(*ways.values()) == {"cublaslt without room second"}
        compare(MLP, chain(70, [8, 9, 7, 2], 0.0), F32)


def test_a_way_that_is_refused_at_last_is_left_out(timed: Machine) -> None:
    """The heuristics propose an algorithm that the product then does not take."""
    with timed.library.set("fail", 15):
        compare(MLP, chain(70, [8, 9, 7, 2], 0.0), F32)
    assert all(ways == {"plain"} for kind, ways in chosen().items() if kind != "relu")


def test_a_cublaslt_that_computes_something_else_is_not_used(timed: Machine) -> None:
    with (
        timed.library.set("no_transpose", 1),
        pytest.warns(RecastWarning, match="cublaslt.* gives another result than plain"),
    ):
        compare(MLP, chain(70, [8, 9, 9, 2], 0.0), F32)
    # Only forward has opA.
    assert chosen() == {
        "relu": {"mask"}, "forward": {"plain"}, "input gradient": {SECOND},
        "weight gradient": {SECOND},
    }  # fmt: skip
