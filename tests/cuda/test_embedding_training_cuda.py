"""Gradients, outputs under autocast and training of ``embedding_bags`` on the emulated GPU."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import emulated_gpu
import pytest
import torch
from emulated_bags import (
    BAGS,
    BF16,
    F16,
    F32,
    FORWARD,
    WEIGHT_GRAD,
    arguments,
    call,
    generator,
    ids_of,
    mixed,
    widened,
)
from models import CASES, build
from torch import Tensor

import recast
from recast.runtime import checked
from recast.runtime.gpu import gpu
from recast.runtime.op import Sample
from recast.runtime.rows.grad import RowGrad
from recast.runtime.tolerances import excess


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
def test_narrow_outputs_are_rounded_once_and_their_gradients_taken(
    emulated: emulated_gpu.Emulated, dtype: torch.dtype
) -> None:
    g = generator(7)
    tables = [torch.randn(9, 16, generator=g), torch.randn(9, 8, generator=g).bfloat16()]
    tables = [t.requires_grad_() for t in tables]
    weights = torch.randn(5, 4, generator=g, requires_grad=True)
    lookups = [
        {"table": tables[0], "ids": ids_of(9, 5, 4), "weights": weights},
        {"table": tables[0], "ids": ids_of(9, 5, 4, seed=2), "mode": "max"},
        {"table": tables[1], "ids": ids_of(9, 5, 4), "mode": "mean"},
    ]
    with torch.autocast("cpu", dtype):
        wide, narrow = call(lookups), call(lookups, True)
    assert [o.dtype for o in wide] == [F32, F32, BF16]
    assert [o.dtype for o in narrow] == [dtype, dtype, BF16]
    assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(wide, narrow, strict=True))
    upstream = [torch.randn(o.shape, generator=g).to(o.dtype) for o in narrow]
    leaves = (*tables, weights)
    got = torch.autograd.grad(narrow, leaves, upstream)
    cast = [o.to(n.dtype) for o, n in zip(wide, narrow, strict=True)]
    wanted = torch.autograd.grad(cast, leaves, upstream)
    for a, b, leaf in zip(got, wanted, leaves, strict=True):
        assert a.dtype == leaf.dtype
        torch.testing.assert_close(a + 0, b + 0)
    assert isinstance(got[0], RowGrad) and got[0].cell.full is None


def test_narrow_changes_nothing_without_autocast_and_on_a_cpu(
    emulated: emulated_gpu.Emulated,
) -> None:
    lookups = [{"table": torch.randn(9, 16), "ids": ids_of(9, 5, 4)}]
    assert call(lookups, True)[0].dtype is F32
    with torch.autocast("cpu", BF16), gpu.emulate(None):  # type: ignore[arg-type]
        assert call(lookups, True)[0].dtype is F32


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dim", [1, 20, 70])
def test_gradient_of_sample_weights(
    emulated: emulated_gpu.Emulated, dim: int, dtype: torch.dtype
) -> None:
    """One launch a lookup; ids behind the last end and padding get none."""
    g = generator(8)
    table = torch.randn(9, dim, generator=g).to(dtype)
    weights = [torch.randn(14, generator=g).to(dtype).requires_grad_() for _ in range(3)]
    ends = torch.tensor([0, 0, 5, 12], dtype=torch.int32)
    lookups = [
        {"table": table, "ids": ids_of(9, 14), "offsets": ends, "weights": weights[0],
         "padding": 2, "last": True},
        {"table": table, "ids": ids_of(9, 14, dtype=torch.int32), "weights": weights[1],
         "offsets": ends},
        {"table": table, "ids": ids_of(9, 7, 2), "weights": weights[2].reshape(7, 2)},
    ]  # fmt: skip
    outs = call(lookups)
    upstream = [torch.randn(o.shape, generator=g).to(dtype) for o in outs]
    emulated.launched.clear()
    got = torch.autograd.grad(outs, weights, upstream)
    assert emulated.launched == [WEIGHT_GRAD] * 3
    for x, up, a in zip(lookups, upstream, got, strict=True):
        ids, offsets = x["ids"].reshape(-1), x.get("offsets")
        bag = torch.arange(14) // 2
        if offsets is not None:
            bag = torch.searchsorted(offsets.long(), torch.arange(14), right=True) - 1
        dead = (bag >= len(up)) | (ids == x.get("padding", -1))
        rows, grads = x["table"][ids.long()], up[bag.clamp(max=len(up) - 1)]
        plain = (rows * grads).sum(1).masked_fill(dead, 0)
        truth = (rows.double() * grads.double()).sum(1).masked_fill(dead, 0)
        assert excess(a, plain, truth, scale=float((rows * grads).abs().max())) <= 1


def test_maxima_give_gradients_to_winners_only(emulated: emulated_gpu.Emulated) -> None:
    """Rows that won nothing are not touched; an id that is twice in a bag counts once."""
    table = torch.randn(20, 6, generator=generator(9), requires_grad=True)
    ids = torch.tensor([[3, 3, 5], [7, 7, 7], [19, 0, 4]])
    (out,) = call([{"table": table, "ids": ids, "mode": "max"}])
    upstream = torch.randn(out.shape, generator=generator(1))
    (grad,) = torch.autograd.grad(out, table, upstream)
    winners = table.detach()[ids].argmax(1)  # (bags, dim)
    assert isinstance(grad, RowGrad)
    assert set(grad.merged()[0].tolist()) == set(ids.gather(1, winners).reshape(-1).tolist())
    expected = torch.zeros(20, 6)
    for b, c in itertools.product(range(3), range(6)):
        expected[ids[b, winners[b, c]], c] += upstream[b, c]
    assert torch.equal(grad + 0, expected)


def test_gradients_are_added_up_over_passes(emulated: emulated_gpu.Emulated) -> None:
    g = generator(10)
    table = torch.randn(9, 8, generator=g, requires_grad=True)
    total = torch.zeros(9, 8)
    for seed in range(3):
        lookups = [
            {"table": table, "ids": ids_of(9, 4, 2, seed=seed), "mode": mode}
            for mode in ("sum", "max", "mean")
        ]
        outs = call(lookups)
        upstream = [torch.randn(o.shape, generator=g) for o in outs]
        torch.autograd.backward(outs, upstream)
        plain = BAGS.reference(*arguments(lookups))
        total += torch.autograd.grad(plain, table, upstream, allow_unused=True)[0]
    assert isinstance(table.grad, RowGrad) and table.grad.cell.full is None
    torch.testing.assert_close(table.grad + 0, total)


@pytest.mark.parametrize("sample", BAGS.samples(), ids=lambda sample: sample.label)
def test_forms_of_the_gradient(emulated: emulated_gpu.Emulated, sample: Sample) -> None:
    """Rows, differentiable dense and sparse matrices are one gradient; padding stays out of all."""
    *tensors, table, mode, padding, last, _ = copy.deepcopy(sample.args)
    leaves = [t.requires_grad_() for t in (*tensors[0], *tensors[3]) if t is not None]
    layouts = [
        [*tensors, table, mode, padding, last, [sparse and kind != "max" for kind in mode]]
        for sparse in (False, True)
    ]
    outs = BAGS.target(*layouts[0])
    upstream = [torch.randn(o.shape, generator=generator(2)) for o in outs]
    given: Any = {"allow_unused": True}
    rows = torch.autograd.grad(outs, leaves, upstream, **given)
    graphed = torch.autograd.grad(
        BAGS.target(*layouts[0]), leaves, upstream, create_graph=True, **given
    )
    sparse = torch.autograd.grad(BAGS.target(*layouts[1]), leaves, upstream, **given)
    for a, b, c in zip(rows, graphed, sparse, strict=True):
        c = c.to_dense() if c.is_sparse else c
        torch.testing.assert_close(b, a + 0)
        torch.testing.assert_close(c + 0, a + 0)


def test_the_batch_is_the_users_again_after_backward(emulated: emulated_gpu.Emulated) -> None:
    """Ids, offsets and weights are copied, all at once, those that lookups share once."""
    g = generator(12)
    tables = [torch.randn(9, dim, generator=g, requires_grad=True) for dim in (8, 4)]
    ids, starts = ids_of(9, 12, dtype=torch.int32), torch.tensor([0, 2, 2, 9])
    weights = torch.randn(12, generator=g)
    lookups = [
        {"table": tables[0], "ids": ids, "offsets": starts, "weights": weights},
        {"table": tables[1], "ids": ids, "offsets": starts, "mode": "mean"},
    ]
    outs = call(lookups)
    upstream = [torch.randn(o.shape, generator=g) for o in outs]
    wanted = torch.autograd.grad(BAGS.reference(*arguments(lookups)), tables, upstream)
    got = torch.autograd.grad(outs, tables, upstream)
    for tensor in (ids, starts, weights):
        tensor.zero_()
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a + 0, b)


WAITS = {
    f"aten::{name}"
    for name in (
        "item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select",
        "_unique2", "unique_consecutive",
    )
}  # fmt: skip


@pytest.mark.parametrize("graphed", [False, True], ids=["rows", "create_graph"])
def test_nothing_waits_for_the_device(emulated: emulated_gpu.Emulated, graphed: bool) -> None:
    """None of torch's calls that read a value or a count is made, forward or backward."""
    g = generator(11)
    lookups = [x for x in mixed() if x["table"].dtype is F32]
    weights = torch.randn(9, generator=g, requires_grad=True)
    starts = torch.tensor([0, 2, 2, 7])
    lookups.append({"table": torch.randn(11, 16), "ids": ids_of(11, 9), "weights": weights,
                    "offsets": starts, "padding": 1})  # fmt: skip
    tables = [x["table"].requires_grad_() for x in lookups]
    leaves = [*{id(t): t for t in tables}.values(), weights]
    upstream = [torch.randn(o.shape, generator=g) for o in call(lookups)]
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as seen:
        torch.autograd.grad(call(lookups), leaves, upstream, create_graph=graphed)
    names = {event.name for event in seen.events()}
    assert any(name.startswith("EmbeddingBagsBackward") for name in names)
    assert not names & WAITS


# ---------------------------------------------------------------- models


class Asked(torch.nn.Linear):
    """Notes whether ids are checked while it runs."""

    seen: list[bool]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(checked.is_checked())
        return super().forward(x)


def test_a_diff_checks_ids() -> None:
    model = Asked(3, 2)
    model.seen = []
    assert recast.diff(model, model, torch.randn(4, 3), steps=1).ok
    assert model.seen and all(model.seen)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name not in ("bags", "dlrm", "packed")))
        for name in CASES
    ],
)
def test_models_train_to_the_same_numbers(emulated: emulated_gpu.Emulated, name: str) -> None:
    """Outputs, gradients, and parameters after three steps; dropout off, whose masks are a GPU's
    own.
    """
    model, batches, loss = build(name)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "p") and isinstance(module.p, float):
            module.p = 0.0
    fast = recast.optimize(model, example=batches)
    report = recast.diff(model, fast, batches, loss=loss)
    assert report.ok, report
    assert FORWARD in emulated.launched


def trained(model: torch.nn.Module, optimizer: Any, batches: list[Any], loss: Any) -> list[Tensor]:
    """The parameters after four steps."""
    for step in range(4):
        optimizer.zero_grad()
        loss(model(*batches[step % len(batches)])).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", ["dlrm", "bags"])
def test_training_with_a_fused_optimizer(
    emulated: emulated_gpu.Emulated, name: str, maker: str
) -> None:
    model, batches, loss = build(name)
    wide = copy.deepcopy(model).double()
    plain = copy.deepcopy(model)
    fast, optimizer = recast.optimize(model, MAKERS[maker](model.parameters()), example=batches)
    ours = trained(fast, optimizer, batches, loss)
    theirs = trained(plain, MAKERS[maker](plain.parameters()), batches, loss)
    doubled = [torch.utils._pytree.tree_map(widened, batch) for batch in batches]
    truth = trained(wide, MAKERS[maker](wide.parameters()), doubled, loss)
    assert {FORWARD, "row_update"} <= set(emulated.launched)
    for a, b, c in zip(ours, theirs, truth, strict=True):
        assert excess(a, b, c, scale=1.0) <= 1
