"""The host code of dot_interaction for a GPU, run on the emulator: what is launched, and when."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import emulated_gpu
import pytest
import torch
from seen_ops import SeenOps
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import recast
from recast.runtime.interactions import dot_pairs
from recast.runtime.interactions.dot_interaction import dot_interaction
from recast.runtime.recorded import recording
from recast.runtime.tolerances import excess

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
DOT = dot_interaction.target


@pytest.fixture
def emulated() -> Iterator[emulated_gpu.Emulated]:
    with emulated_gpu.serve() as gpu:
        yield gpu


def rand(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def lower(n: int) -> tuple[Tensor, Tensor]:
    li, lj = torch.tril_indices(n, n, -1)
    return li, lj


def gradients(out: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(out, wanted, rand(*out.shape, dtype=out.dtype, seed=3)))


def test_one_launch_each_way(emulated: emulated_gpu.Emulated) -> None:
    x, rest = rand(5, 8).requires_grad_(), rand(5, 3, 8).requires_grad_()
    out = DOT([x, rest], x, *lower(4), 1)
    assert emulated.launched == ["dot_forward"]
    gradients(out, [x, rest])
    assert emulated.launched == ["dot_forward", "dot_backward"]


def test_only_wanted_gradients_are_written(emulated: emulated_gpu.Emulated) -> None:
    fixed, x, wide = rand(5, 8), rand(5, 8, seed=1).requires_grad_(), rand(5, 2, 8, seed=2)
    out = DOT([fixed, wide, x], None, *lower(4), 0)
    (ours,) = gradients(out, [x])
    (plain,) = gradients(dot_interaction.reference([fixed, wide, x], None, *lower(4), 0), [x])
    torch.testing.assert_close(ours, plain)
    assert ours.untyped_storage().nbytes() == ours.nbytes, "no memory for the others"


def test_the_gradient_of_a_shared_dense_part_lies_alone(emulated: emulated_gpu.Emulated) -> None:
    x, rest = rand(5, 8).requires_grad_(), rand(5, 3, 8).requires_grad_()
    ours = gradients(DOT([x, rest], x, *lower(4), 0), [x, rest])
    assert all(g.is_contiguous() for g in ours)


# ---------------------------------------------------------------- autocast


def given(kind: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
    """Features and dense part as models have them under autocast, all of them leaves."""

    def leaf(seed: int, of: torch.dtype, width: int = 16) -> Tensor:
        return rand(6, width, dtype=of, seed=seed).requires_grad_()

    first = F32 if kind == "all in fp32" else dtype
    others = dtype if kind in ("rows narrow", "dense in fp32") else F32
    features = [leaf(0, first), *(leaf(k, others) for k in (1, 2, 3))]
    if kind == "rows narrow":
        return features, None
    return features, leaf(7, F32, 5) if kind == "dense in fp32" else features[0]


KINDS = ("rows in fp32", "all in fp32", "rows narrow", "dense in fp32")


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast(emulated: emulated_gpu.Emulated, kind: str, dtype: torch.dtype) -> None:
    """As bmm and cat under autocast, fused; gradients come back in each input's dtype."""
    features, dense = given(kind, dtype)
    wanted = list({id(t): t for t in (*features, dense) if t is not None}.values())
    with torch.autocast("cpu", dtype):
        ours = DOT(features, dense, *lower(4), 1)
        plain = dot_interaction.reference(features, dense, *lower(4), 1)
    assert ours.dtype == plain.dtype
    grads = gradients(ours, wanted)
    assert emulated.launched == ["dot_forward", "dot_backward"]
    with_torch = gradients(plain, wanted)
    wide = {id(t): t.detach().double().requires_grad_() for t in wanted}
    far = None if dense is None else wide[id(dense)]
    truth = dot_interaction.reference([wide[id(f)] for f in features], far, *lower(4), 1)
    exact = gradients(truth, list(wide.values()))
    # The output may be fp32 (with a dense part in it), its products were of narrow numbers.
    assert excess(ours.to(dtype), plain.to(dtype), truth) <= 1
    for t, a, b, c in zip(wanted, grads, with_torch, exact, strict=True):
        assert a.dtype == t.dtype
        assert excess(a.to(dtype), b.to(dtype), c) <= 1


def test_autocast_leaves_float64_alone(emulated: emulated_gpu.Emulated) -> None:
    x = rand(3, 4, 8, dtype=F64)
    with torch.autocast("cpu", BF16):
        out = DOT([x], None, *lower(4), 0)
    assert out.dtype == F64 and not emulated.launched
    assert torch.equal(out, dot_interaction.reference([x], None, *lower(4), 0))


def test_second_derivatives_under_autocast(emulated: emulated_gpu.Emulated) -> None:
    x = rand(3, 4, 8).requires_grad_()
    found = []
    for call in (DOT, dot_interaction.reference):
        with torch.autocast("cpu", BF16):
            out = call([x], None, *lower(4), 0)
        (first,) = torch.autograd.grad(out, x, rand(*out.shape, dtype=BF16), create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*found, rtol=0.05, atol=0.05)


def test_tracing_and_transforms_under_autocast_see_plain_torch(
    emulated: emulated_gpu.Emulated,
) -> None:
    x, (li, lj) = rand(3, 4, 8), lower(4)

    def call(t: Tensor) -> Tensor:
        return DOT([t], None, li, lj, 0)

    with torch.autocast("cpu", BF16):
        traced = make_fx(call)(x)
        wanted = dot_interaction.reference([x], None, li, lj, 0)
        many = torch.vmap(call)(x[None])[0]
        slope = torch.func.grad(lambda t: call(t).float().square().mean())(x)
    assert any(n.target is torch.ops.aten.bmm.default for n in traced.graph.nodes)
    assert torch.equal(many, wanted) and torch.equal(traced(x), wanted)
    assert slope.dtype == F32 and slope.abs().max() > 0
    assert not emulated.launched


def test_a_dispatch_mode_under_autocast_sees_the_op_once(emulated: emulated_gpu.Emulated) -> None:
    x = rand(3, 4, 8).requires_grad_()
    with torch.autocast("cpu", BF16), SeenOps() as seen:
        out = DOT([x], None, *lower(4), 0)
    assert out.dtype == BF16 and out.requires_grad
    assert seen.names.count(str(DOT)) == 1 and "aten.bmm.default" not in seen.names


# ---------------------------------------------------------------- TF32


@pytest.fixture
def precision() -> Iterator[Callable[[str], None]]:
    """Sets the precision of products of fp32 matrices, as a user would."""
    held = torch.backends.cuda.matmul
    before = held.fp32_precision
    yield lambda value: setattr(held, "fp32_precision", value)
    held.fp32_precision = before


def test_tf32_only_where_it_is_allowed(
    emulated: emulated_gpu.Emulated, precision: Callable[[str], None]
) -> None:
    x = rand(4, 27, 20)
    truth = dot_interaction.reference([x.double()], None, *lower(27), 0)
    errors = []
    for value in ("ieee", "tf32"):
        precision(value)
        errors.append(float((DOT([x], None, *lower(27), 0) - truth).abs().max()))
    assert errors[0] < 1e-5 < errors[1] < 0.02


# ---------------------------------------------------------------- pairs


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry each time that pairs are read back from the device."""
    found: list[int] = []
    read = dot_pairs._read

    def counted(*args: Any) -> Any:
        found.append(1)
        return read(*args)

    monkeypatch.setattr(dot_pairs, "_read", counted)
    return found


def check(x: Tensor, li: Tensor, lj: Tensor) -> None:
    torch.testing.assert_close(
        DOT([x], None, li, lj, 0), dot_interaction.reference([x], None, li, lj, 0)
    )


def test_pairs_are_read_once(emulated: emulated_gpu.Emulated, reads: list[int]) -> None:
    x, (li, lj) = rand(3, 4, 8), lower(4)
    places = torch.tensor([[3, 1, 1], [0, 2, 1]])
    for _ in range(3):
        check(x, li, lj)
        check(x, places[0], places[1])  # views made anew, of one tensor
        with torch.inference_mode():
            check(x, places[0], places[1])
    assert len(reads) == 2


def test_pairs_that_change_are_read_again(
    emulated: emulated_gpu.Emulated, reads: list[int]
) -> None:
    x, places = rand(3, 4, 8), torch.tensor([[3, 1, 1], [0, 2, 1]])
    check(x, *places)
    places[0, 0] = 2
    check(x, *places)
    check(x, places[1], places[0])
    check(rand(3, 5, 8), *places)
    assert len(reads) == 4
    held = nn.Module()
    held.register_buffer("li", torch.tensor([1, 2]))
    held.register_buffer("lj", torch.tensor([0, 0]))
    check(x, held.li, held.lj)
    held.li.data = torch.tensor([3, 3])
    check(x, held.li, held.lj)


def test_forgotten_pairs_leave_nothing(emulated: emulated_gpu.Emulated) -> None:
    before = len(dot_pairs._known)
    x, places = rand(3, 4, 8), torch.tensor([[3, 1, 1], [0, 2, 1]])
    for k in range(3):
        places[0, 0] = k
        check(x, *places)
    assert len(dot_pairs._known) == before + 1
    del places
    assert len(dot_pairs._known) == before


def test_pairs_made_in_inference_mode(emulated: emulated_gpu.Emulated) -> None:
    x = rand(3, 4, 8)
    with torch.inference_mode():
        li, lj = torch.tensor([1, 2]), torch.tensor([0, 1])
        check(x, li, lj)
        li.fill_(3)
        check(x, li, lj)


def test_negative_and_wrong_pairs(emulated: emulated_gpu.Emulated) -> None:
    x = rand(3, 4, 8)
    check(x, torch.tensor([-1, 0]), torch.tensor([0, -2]))
    emulated.launched.clear()
    with pytest.raises(IndexError, match="index 4 is out of bounds"):
        DOT([x], None, torch.tensor([4]), torch.tensor([0]), 0)
    assert not emulated.launched


def test_a_recording_keeps_the_lists(emulated: emulated_gpu.Emulated) -> None:
    x, places = rand(3, 4, 8), torch.tensor([[3, 1, 1], [0, 2, 1]])
    with recording.recording() as recorded:
        DOT([x], None, *places, 0)
    kept = [k for k in recorded._kept if isinstance(k, dot_pairs.Pairs)]
    assert kept and kept[0].lists


# ---------------------------------------------------------------- what it leaves to torch


LEFT: dict[str, Callable[[], tuple[Any, ...]]] = {
    "too many rows": lambda: ([rand(2, 300, 64)], None, *lower(300), 0),
    "rows too long": lambda: ([rand(2, 4, 9000)], None, *lower(4), 0),
    "float64": lambda: ([rand(2, 4, 8, dtype=F64)], None, *lower(4), 0),
    "no columns": lambda: ([rand(2, 4, 0)], None, *lower(4), 0),
    "a dense part in float64": lambda: ([rand(2, 4, 8)], rand(2, 3, dtype=F64), *lower(4), 0),
}


@pytest.mark.parametrize("what", LEFT)
def test_left_to_torch(emulated: emulated_gpu.Emulated, what: str) -> None:
    args = LEFT[what]()
    assert torch.equal(DOT(*args), dot_interaction.reference(*args))
    assert not emulated.launched


def test_features_of_several_dtypes_are_promoted(emulated: emulated_gpu.Emulated) -> None:
    x, y = rand(4, 8).requires_grad_(), rand(4, 8, dtype=BF16, seed=1).requires_grad_()
    out = DOT([x, y, y], x, *lower(3), 0)
    assert out.dtype == F32 and emulated.launched == ["dot_forward"]
    plain = dot_interaction.reference([x, y, y], x, *lower(3), 0)
    torch.testing.assert_close(out, plain)
    for a, b in zip(gradients(out, [x, y]), gradients(plain, [x, y]), strict=True):
        torch.testing.assert_close(a, b)


# ---------------------------------------------------------------- a model in training


class Dlrm(nn.Module):
    """Three one-hot tables and a bottom network, all pairs, a top network."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleList(nn.EmbeddingBag(20 + t, 16, mode="sum") for t in range(3))
        self.bot = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(22, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bot(dense)
        t = torch.stack([x, *(e(ids[:, k : k + 1]) for k, e in enumerate(self.emb))], 1)
        z = torch.bmm(t, t.transpose(1, 2))
        li, lj = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, z[:, li, lj]], 1))


def batch(seed: int, rows: int = 9) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, generator=g), torch.randint(0, 20, (rows, 3), generator=g)


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, cast: torch.dtype | None, wide: bool
) -> list[Tensor]:
    for step in range(4):
        dense, ids = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", cast, enabled=cast is not None):
            out = model(dense.double() if wide else dense, ids)
        out.backward(rand(*out.shape, seed=step).to(out.dtype))
        optimizer.step()
    return [p.detach() for p in model.parameters()]


EVERYWHERE = "default,narrow-lookups{everywhere=true},overlap-lookups{everywhere=true}"


@pytest.mark.parametrize("passes", [None, EVERYWHERE], ids=["default", "everywhere"])
@pytest.mark.parametrize("cast", [None, BF16])
def test_training_steps(
    emulated: emulated_gpu.Emulated, cast: torch.dtype | None, passes: str | None
) -> None:
    torch.manual_seed(0)
    model = Dlrm()
    plain, judge = copy.deepcopy(model), copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    examples = [batch(0), batch(1, 7)]
    fast, optimizer = recast.optimize(model, optimizer, example=examples, passes=passes)
    emulated.launched.clear()  # optimize() has tried the model
    ours = trained(fast, optimizer, cast, False)
    assert emulated.launched.count("dot_forward") == emulated.launched.count("dot_backward") == 4
    near = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1), cast, False)
    truth = trained(judge, torch.optim.SGD(judge.parameters(), lr=0.1), None, True)
    for a, b, c in zip(ours, near, truth, strict=True):
        if cast is None:
            assert excess(a, b, c) <= 1
        else:  # parameters are fp32, what moved them was not
            assert excess(a.to(cast), b.to(cast), c) <= 1
