"""Cross networks beyond the samples: sizes at which the kernels are used, threads, bad shapes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from recast.errors import InputError
from recast.runtime import OPS, device, tolerances

NAMES = ("cross_vector", "cross_matrix", "cross_mixture")


def large(name: str, rows: int, d: int = 130, layers: int = 2) -> list[Any]:
    """Arguments with enough work for the kernels and for several threads."""
    g = torch.Generator().manual_seed(53)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    x = rand(rows, d)
    biases = [rand(d) for _ in range(layers)]
    if name == "cross_vector":
        return [x, x, [rand(1, d) / d for _ in range(layers)], [None] * layers, biases]
    if name == "cross_matrix":
        weights = [rand(d, d) / d**0.5 for _ in range(layers)]
        return [x, x, weights, biases, [None] * 2 * layers, [None] * layers, [1] * layers]
    v, core, u = rand(3, 4, d) / d**0.5, rand(3, 4, 4), rand(3, d, 4)
    return [x, x, v, core, u, rand(3, d) / d, None, biases[0], None, "tanh", 0.0, False]


def leaves(args: list[Any]) -> list[Tensor]:
    flat = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]
    return list({id(t): t for t in flat}.values())


def evaluate(call: Callable[..., Tensor], args: list[Any]) -> list[Tensor]:
    """The output, and the gradients of everything under a random upstream gradient."""
    wanted = [t.requires_grad_() for t in leaves(args)]
    out = call(*args)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(59)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, wanted, up)]


@pytest.mark.parametrize("name", NAMES)
def test_large_calls_against_float64(name: str) -> None:
    op, rows = OPS[name], 1100
    ours = evaluate(op.target, large(name, rows))
    plain = evaluate(op.reference, large(name, rows))
    wide = [
        [None if t is None else t.double() if isinstance(t, Tensor) else t for t in a]
        if isinstance(a, list) else a.double() if isinstance(a, Tensor) else a
        for a in large(name, rows)
    ]  # fmt: skip
    wide[1] = wide[0]
    truth = evaluate(op.reference, wide)
    for k, (a, b, c) in enumerate(zip(ours, plain, truth, strict=True)):
        assert tolerances.excess(a, b, c) <= 1, k


@pytest.mark.parametrize("name", ["cross_vector", "cross_matrix"])
def test_kernels_are_taken_from_a_size_on(name: str) -> None:
    """Below it torch's own layers are faster; under ``device.use`` kernels always run."""
    if device.extension() is None:
        pytest.skip("no kernels")
    op = OPS[name]
    rows = importlib.import_module(f"recast.runtime.interactions.{name}").WORTH // 130
    for count, taken in ((rows, False), (rows + 1, True)):
        args = large(name, count)
        leaves(args)[0].requires_grad_()
        out = op.target(*args)
        assert ("Cross" in type(out.grad_fn).__name__) == taken
    with device.use("portable"):
        args = large(name, 2)
        leaves(args)[0].requires_grad_()
        assert "Cross" in type(op.target(*args).grad_fn).__name__


@pytest.mark.parametrize("name", NAMES)
def test_threads_do_not_change_sums(name: str) -> None:
    """All but BLAS's own products has the same bits on one thread and on three."""
    before = torch.get_num_threads()
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            results.append(evaluate(OPS[name].target, large(name, 1100)))
        finally:
            torch.set_num_threads(before)
    for a, b in zip(*results, strict=True):
        if name == "cross_vector":
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


BAD: dict[str, tuple[str, Callable[[list[Any]], None], str]] = {
    "x": ("cross_vector", lambda a: a.__setitem__(1, a[0][:, 1:]), "with first features"),
    "vector": ("cross_vector", lambda a: a[2].__setitem__(0, torch.ones(3)), "cross layer 0"),
    "lists": ("cross_vector", lambda a: a[3].pop(), "1 scalars"),
    "matrix": ("cross_matrix", lambda a: a[2].__setitem__(1, torch.ones(3, 3)), "cross layer 1"),
    "bias": ("cross_matrix", lambda a: a[3].__setitem__(0, torch.ones(3)), "a bias of cross layer"),
    "depths": ("cross_matrix", lambda a: a.__setitem__(6, [1, 3]), "of depths [1, 3]"),
    "experts": ("cross_mixture", lambda a: a.__setitem__(4, torch.ones(3, 4, 130)), "V is (E, r"),
    "gate": ("cross_mixture", lambda a: a.__setitem__(5, None), "mixture of 3 experts"),
    "activation": ("cross_mixture", lambda a: a.__setitem__(9, "sine"), "unknown activation"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_shapes_are_told(case: str) -> None:
    name, spoil, why = BAD[case]
    args = large(name, 4)
    spoil(args)
    with pytest.raises(InputError) as caught:
        OPS[name].target(*args)
    assert why in str(caught.value)
