"""Chains of layers in one C++ call: which it takes, its numbers, equal bits on any threads."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from recast.runtime import device, tolerances
from recast.runtime.mlp import layers as mlp_layers
from recast.runtime.mlp.chain import Chain as Called
from recast.runtime.mlp.chain import chain_of, parse

MLP = torch.ops.recast.mlp.default
# Rows, then widths: beyond a block of the depth, of the rows and of the columns; odd; narrow; none.
SHAPES = [
    (7, (5, 9, 3)),
    (131, (300, 33, 17, 1)),
    (190, (13, 64, 40)),
    (1, (70, 6)),
    (40, (3, 1040, 2)),
    (37, (2, 30, 4, 21, 3, 10)),  # narrow layers between wide ones
    (0, (4, 8, 2)),
    (2500, (6, 20, 9)),  # beyond the rows that go through all layers at once
]
LASTS = ["none", "relu", "sigmoid", "tanh"]
Chain = tuple[list[Tensor | None], list[str]]


@pytest.fixture(params=device.ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    why = device.why_not(request.param)()
    if why is not None:
        pytest.skip(why)
    return str(request.param)


def chain(widths: tuple[int, ...], last: str, bias: bool = True) -> Chain:
    """Parameters and steps; small weights, so that a sigmoid has a slope."""
    g = torch.Generator().manual_seed(sum(widths))
    params: list[Tensor | None] = []
    steps: list[str] = []
    for wide, high in pairwise(widths):
        params.append(torch.randn(high, wide, generator=g).mul_(wide**-0.5).requires_grad_())
        params.append(torch.randn(high, generator=g).requires_grad_() if bias else None)
        steps += ["linear", "relu"]
    return params, steps[:-1] if last == "none" else [*steps[:-1], last]


def evaluate(
    x: Tensor, params: list[Tensor | None], steps: list[str], upstream: Tensor
) -> list[Tensor]:
    """The result, then the gradients of the input and the params."""
    x = x.detach().requires_grad_()
    out = MLP(x, params, [], steps, [], [])
    leaves = [x, *(p for p in params if p is not None)]
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("last", LASTS)
@pytest.mark.parametrize(("rows", "widths"), SHAPES, ids=str)
def test_against_float64(
    rows: int, widths: tuple[int, ...], last: str, bias: bool, isa: str
) -> None:
    g = torch.Generator().manual_seed(rows)
    x, upstream = torch.randn(rows, widths[0], generator=g), torch.randn(rows, widths[-1])
    params, steps = chain(widths, last, bias)
    with device.use(isa):
        ours = evaluate(x, params, steps, upstream)
        with torch.no_grad():
            assert torch.equal(MLP(x, params, [], steps, [], []), ours[0])
        taken = mlp_layers.forward(chain_of(params, [], steps, [], []), x, steps)
    wide = widths[-1] > 8 and last in ("sigmoid", "tanh")  # torch's own are faster
    assert (taken is None) is wide
    with device.use("torch"):
        plain = evaluate(x, params, steps, upstream)
        doubles = [None if p is None else p.detach().double().requires_grad_() for p in params]
        truth = evaluate(x.double(), doubles, steps, upstream.double())
    terms = max(rows, *widths) ** 0.5
    for a, b, c in zip(ours, plain, truth, strict=True):
        assert tolerances.excess(a, b, c, scale=terms) <= 1


@pytest.mark.parametrize("rows", [130, 600, 2300])
def test_bits_do_not_depend_on_threads(rows: int, isa: str) -> None:
    g = torch.Generator().manual_seed(3)
    x, upstream = torch.randn(rows, 210, generator=g), torch.randn(rows, 5, generator=g)
    params, steps = chain((210, 150, 45, 5), "tanh")
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 4, 7):
            torch.set_num_threads(threads)
            with device.use(isa):
                found.append(evaluate(x, params, steps, upstream))
                with torch.no_grad():
                    found[-1].append(MLP(x, params, [], steps, [], []))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)


def test_nan_and_infinity_pass_as_in_torch(isa: str) -> None:
    x = torch.randn(20, 30)
    x[3, 4], x[5, 6] = float("nan"), float("inf")
    params, steps = chain((30, 24, 18), "relu")
    upstream = torch.randn(20, 18)
    with device.use(isa):
        ours = evaluate(x, params, steps, upstream)
    with device.use("torch"):
        plain = evaluate(x, params, steps, upstream)
    for a, b in zip(ours, plain, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
    # Where a relu let a NaN pass, so does its gradient.
    assert ours[0].isnan().any() and ours[2].isnan().any()


@pytest.mark.parametrize("frozen", [{0, 1}, {0, 1, 2, 3}, {2}, {1, 3, 5}])
@pytest.mark.parametrize("input", [True, False])
def test_only_wanted_gradients(frozen: set[int], input: bool) -> None:
    params, steps = chain((12, 20, 16, 2), "sigmoid")
    x, upstream = torch.randn(9, 12, requires_grad=input), torch.randn(9, 2)
    for k in frozen:
        some = params[k]
        assert some is not None
        some.requires_grad_(False)
    leaves = [t for t in (x, *params) if t is not None and t.requires_grad]
    found = []
    for kernel in ("portable", "torch"):
        with device.use(kernel):
            out = MLP(x, params, [], steps, [], [])
            found.append(torch.autograd.grad(out, leaves, upstream))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_written_to_before_backward() -> None:
    """Values saved for backward may not change; a first weight and a result may, as in torch."""
    params, steps = chain((12, 20, 2), "none")
    first, second = params[0], params[2]
    assert first is not None and second is not None
    x, upstream = torch.randn(9, 12), torch.randn(9, 2)
    with device.use("portable"):
        wanted = torch.autograd.grad(MLP(x, params, [], steps, [], []), second, upstream)
        out = MLP(x, params, [], steps, [], [])
        assert type(out.grad_fn).__name__ == "LayersBackward"
        with torch.no_grad():
            first.mul_(2)
            out.mul_(3)
        assert torch.equal(torch.autograd.grad(out, second, upstream)[0], wanted[0])
        out = MLP(x, params, [], steps, [], [])
        with torch.no_grad():
            second.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, first, upstream)


def test_second_derivatives() -> None:
    params, steps = chain((6, 8, 3), "tanh")
    x, upstream = torch.randn(5, 6, requires_grad=True), torch.randn(5, 3)
    found = []
    for kernel in ("portable", "torch"):
        with device.use(kernel):
            out = MLP(x, params, [], steps, [], [])
            (first,) = torch.autograd.grad(out, x, upstream, create_graph=True)
            found.append(
                torch.autograd.grad(first.square().sum(), [p for p in params if p is not None])
            )
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_weights_are_read_at_every_call() -> None:
    """However they change, even if no version counter records it."""
    params, steps = chain((12, 20, 9), "none")
    x, first = torch.randn(33, 12), params[0]
    assert first is not None
    changes = [
        lambda: first.data.mul_(2),
        lambda: first.detach().numpy().__iadd__(1),
        lambda: setattr(first, "data", torch.randn(20, 12)),
    ]
    for change in changes:
        with torch.no_grad(), device.use("portable"):
            called = chain_of(params, [], steps, [], [])
            before = mlp_layers.forward(called, x, steps)
            change()
            after = mlp_layers.forward(called, x, steps)
        with torch.no_grad(), device.use("torch"):
            wanted = MLP(x, params, [], steps, [], [])
        assert before is not None and after is not None
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, wanted)


def test_dropout_counts_as_nothing_outside_of_training() -> None:
    params, steps = chain((12, 20, 9), "none")
    dropping = ["linear", "dropout", "relu", "dropout", "linear", "dropout"]
    x, upstream, numbers = torch.randn(33, 12), torch.randn(33, 9), [0.5] * 3
    with device.use("portable"):
        wanted = evaluate(x, params, steps, upstream)
        out = MLP(x, params, [], dropping, numbers, [False] * 3)
        assert type(out.grad_fn).__name__ == "LayersBackward"
        found = torch.autograd.grad(out, [p for p in params if p is not None], upstream)
        for a, b in zip((out, *found), (wanted[0], *wanted[2:]), strict=True):
            assert torch.equal(a, b)
        with torch.no_grad():
            assert torch.equal(MLP(x, params, [], dropping, numbers, [False] * 3), wanted[0])
            dropped = MLP(x, params, [], dropping, numbers, [False, False, True])
        assert 0 < (dropped == 0).float().mean() < 1


NORMS = [
    ["linear", "batch_norm", "relu", "dropout", "linear", "batch_norm", "relu", "linear"],
    ["linear", "batch_norm", "linear", "relu", "linear", "batch_norm", "sigmoid"],
    ["linear", "relu", "linear", "batch_norm", "linear", "batch_norm", "relu", "relu"],
]


def normed(
    steps: list[str], widths: tuple[int, ...], affine: bool
) -> tuple[list[Tensor | None], list[Tensor | None], list[float | None], list[bool]]:
    """Params, stats, numbers, and flags of evaluation; statistics far from 0 and 1."""
    g = torch.Generator().manual_seed(sum(widths))
    params: list[Tensor | None] = []
    stats: list[Tensor | None] = []
    numbers: list[float | None] = []
    wide, rest = widths[0], list(widths[1:])
    for step in steps:
        if step == "linear":
            high = rest.pop(0)
            params += [torch.randn(high, wide, generator=g) * wide**-0.5]
            params += [torch.randn(high, generator=g)]
            wide = high
        elif step == "batch_norm":
            params += [torch.randn(wide, generator=g) if affine else None for _ in range(2)]
            stats += [torch.randn(wide, generator=g), torch.rand(wide, generator=g) * 3 + 0.01]
            stats += [torch.tensor(7)]
            numbers += [0.1, 1e-3]
        elif step == "dropout":
            numbers.append(0.5)
    return (
        params,
        stats,
        numbers,
        [False] * sum(step in ("batch_norm", "dropout") for step in steps),
    )


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("steps", NORMS, ids=["-".join(s[0] for s in steps) for steps in NORMS])
@pytest.mark.parametrize(("rows", "widths"), [SHAPES[k] for k in (1, 4, 5, 6, 7)], ids=str)
def test_norms_with_running_statistics(
    rows: int, widths: tuple[int, ...], steps: list[str], affine: bool, isa: str
) -> None:
    first, second, third = (*widths, 12)[:3]
    widths = (first, second, third, 3)
    x = torch.randn(rows, widths[0], generator=torch.Generator().manual_seed(rows))
    params, stats, numbers, flags = normed(steps, widths, affine)
    lists = (stats, steps, numbers, flags)
    with torch.no_grad(), device.use(isa):
        ours = mlp_layers.forward(chain_of(params, *lists), x, steps)
        assert ours is not None
        assert torch.equal(MLP(x, params, *lists), ours)
    doubles = [[None if t is None else t.double() for t in ts] for ts in (params, stats)]
    with torch.no_grad(), device.use("torch"):
        plain = MLP(x, params, *lists)
        truth = MLP(x.double(), doubles[0], doubles[1], *lists[1:])
    assert tolerances.excess(ours, plain, truth, scale=max(widths) ** 0.5) <= 1
    assert all(p is not None for p in params) is affine and stats[0] is not None


def test_norms_of_the_batch_and_recorded_ones_are_not_taken() -> None:
    steps, widths = NORMS[0], (12, 20, 16, 2)
    params, stats, numbers, flags = normed(steps, widths, affine=True)
    x = torch.randn(9, 12)
    with device.use("portable"):
        chain = chain_of(params, stats, steps, numbers, flags)
        assert mlp_layers.fitting(chain, x, steps, recorded=False) is not None
        assert mlp_layers.fitting(chain, x, steps, recorded=True) is None
        first = chain_of(params, stats, steps, numbers, [True, False, False])
        assert mlp_layers.fitting(first, x, steps, recorded=False) is None
        bare = chain_of(params, [None] * len(stats), steps, numbers, flags)
        assert mlp_layers.forward(bare, x, steps) is None
        before = ["batch_norm", "linear"]
        early = chain_of([None, None, *params[:2]], stats[:3], before, numbers[:2], [False])
        assert mlp_layers.forward(early, x, before) is None


def test_where_it_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flops of the call decide, on processors where torch's products are no faster; without
    gradients its rows and weights do.
    """
    linear = nn.Linear(50, 40)
    params, steps = [linear.weight, linear.bias], ["linear", "relu"]
    x = torch.randn(30, 50)

    def letters(x: Tensor, steps: list[str], recorded: bool = True) -> str | None:
        called = Called(parse(tuple(steps)).steps, params, [], [], [])
        found = mlp_layers.fitting(called, x, steps, recorded=recorded)
        return None if found is None else found.thens

    monkeypatch.setattr(mlp_layers, "why_not", lambda: None)
    monkeypatch.setattr(mlp_layers, "one_is_torchs", lambda: False)
    assert letters(x, steps) is None
    assert letters(x, steps, recorded=False) == "r"
    assert letters(x[:3], steps, recorded=False) == "r"
    monkeypatch.setattr(mlp_layers, "WORTH_WEIGHTS", 50 * 40)
    assert letters(x[:3], steps, recorded=False) is None
    assert letters(x[:16], steps, recorded=False) == "r"
    monkeypatch.setattr(mlp_layers, "WORTH", 2 * 30 * 40 * 51)
    assert letters(x, steps) == "r"
    assert letters(x.double(), steps) is None
    assert letters(x, ["relu", "linear"]) is None
    assert letters(x, ["linear", "relu", "relu"]) == "r"
    assert letters(x, ["linear", "gelu"]) is None
    monkeypatch.setattr(mlp_layers, "one_is_torchs", lambda: True)
    assert letters(x, steps) is None
    assert letters(x, steps, recorded=False) is None
    params += [torch.randn(1, 40), None]
    assert letters(x, [*steps, "linear"]) == "rn"
    monkeypatch.setattr(mlp_layers, "why_not", lambda: "torch's are faster")
    assert letters(x, [*steps, "linear"]) is None
    assert letters(x, [*steps, "linear"], recorded=False) is None


@pytest.mark.parametrize("at", [0, 2, 4], ids=["first", "last", "prelu"])
@pytest.mark.parametrize("kernel", ["portable", "fused"])  # the latter goes layer by layer
def test_weights_replaced_before_backward(kernel: str, at: int) -> None:
    """As one who perturbs weights for a forward only: its gradient is of those it read."""
    params, steps = chain((6, 9, 3), "prelu")
    params.append(torch.full((1,), 0.25))
    x, found = torch.randn(40, 6), []
    for way in (kernel, "torch"):
        leaves = [p if p is None else p.detach().clone().requires_grad_() for p in params]
        weight = leaves[at]
        assert weight is not None
        kept, weight.data = weight.data, weight.data * 0.5
        with device.use(way):
            out = MLP(x, leaves, [], steps, [], [])
            weight.data = kept
            given = [p for p in leaves if p is not None]
            found.append(torch.autograd.grad(out.square().sum(), given))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kernel", ["portable", "fused"])
def test_weights_written_before_backward(kernel: str) -> None:
    params, steps = chain((6, 9, 3), "relu")
    leaves = [p if p is None else p.detach().clone().requires_grad_() for p in params]
    with device.use(kernel):
        out = MLP(torch.randn(40, 6), leaves, [], steps, [], [])
        with torch.no_grad():
            torch._foreach_mul_([p for p in leaves if p is not None], 0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
