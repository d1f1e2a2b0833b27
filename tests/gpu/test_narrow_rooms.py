"""Ids and offsets that only lookups read are int32 in the memory of a recording, whatever is given:
the numbers are the same, and no code can observe it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recast
from recast.runtime import tolerances
from recast.runtime.recorded.forward import RecordedForward
from recast.runtime.recorded.training_step import TrainingStep

sys.path.insert(0, str(Path(__file__).parent))
from tape import Pairs, TapeRecorder

B, ROWS = 6, (20, 9, 30)
LOSS = F.binary_cross_entropy_with_logits
Read = Callable[[Tensor, Tensor], Tensor]  # of all rows and ids: what the model makes of them


def nothing(rows: Tensor, ids: Tensor) -> Tensor:
    return rows


class Net(nn.Module):
    """Bags of offsets, bags of fixed size with padding, and single rows."""

    def __init__(self, read: Read = nothing, sparse: bool = False) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(ROWS[0], 8, mode="sum", include_last_offset=True)
        self.fixed = nn.EmbeddingBag(ROWS[1], 8, mode="mean", padding_idx=2)
        self.rows = nn.Embedding(ROWS[2], 8, padding_idx=0, sparse=sparse)
        self.top = nn.Linear(24, 1)
        self.read = read

    def forward(self, many: Tensor, offsets: Tensor, few: Tensor, one: Tensor) -> Tensor:
        rows = torch.cat([self.bags(many, offsets), self.fixed(few), self.rows(one)], 1)
        return self.top(self.read(rows, one)).squeeze(1)


def batch(seed: int, size: int = B, ids: type[torch.dtype] | torch.dtype = torch.int64) -> Any:
    """(many, offsets, few, one), labels; with an empty bag."""
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 4, (size,), generator=g)
    counts[size // 2] = 0
    offsets = F.pad(counts.cumsum(0), (1, 0))
    many = torch.randint(ROWS[0], (int(offsets[-1]),), generator=g)
    few = torch.randint(ROWS[1], (size, 3), generator=g)
    one = torch.randint(ROWS[2], (size,), generator=g)
    few[0], one[1] = 2, 0  # a bag of padding alone
    inputs = tuple(t.to(ids) for t in (many, offsets, few, one))
    return inputs, torch.rand(size, generator=g).round()


def graph(model: nn.Module, optimizer: Any, **options: Any) -> tuple[Any, Any]:
    """A function that runs a step under mode="graph", and its recordings."""
    example = options.pop("example", [batch(0)[0], batch(1, 4)[0]])
    fast, _ = recast.optimize(model, optimizer, example=example, **options)
    forward = RecordedForward(fast, TapeRecorder(), Pairs(optimizer))
    vars(fast)["_replays"] = forward

    def step(inputs: Any, label: Tensor) -> None:
        optimizer.zero_grad()
        LOSS(fast(*inputs), label).backward()
        optimizer.step()

    assert forward._training is not None
    return step, forward._training._recordings


def whole(model: nn.Module, optimizer: Any, **options: Any) -> tuple[Any, Any]:
    """The same for TrainingStep."""
    example = options.pop("example", [batch(0)[0], batch(1, 4)[0]])
    fast, _ = recast.optimize(model, optimizer, example=example, **options)
    step = TrainingStep(fast, LOSS, optimizer, recorder=TapeRecorder(optimizer))
    return step, step._recordings


def dtypes(recordings: Any) -> list[torch.dtype]:
    """The dtypes of the tensors in the memory of the only recording."""
    (found,) = recordings._recorded.values()
    return [t.dtype for t in found.inputs.tensors]


def train(
    ways: Any, data: list[Any], make: Callable[[], Net] = Net, plain: list[Any] | None = None,
    **options: Any,
) -> list[torch.dtype]:  # fmt: skip
    """Compare recorded steps with plain torch's, float64 being the judge; returns the dtypes in the
    recording's memory. ``plain``: what plain torch is given instead of ``data``.
    """
    torch.manual_seed(0)
    first = make()
    nets = [copy.deepcopy(first), first, copy.deepcopy(first).double()]
    opts = [torch.optim.Adagrad(net.parameters(), lr=0.1) for net in nets]
    with emulated_gpu.serve():
        step, recordings = ways(nets[0], opts[0], **options)
        for inputs, label in data:
            step(inputs, label)
        found = dtypes(recordings)
    for net, opt in zip(nets[1:], opts[1:], strict=True):
        for inputs, label in plain or data:
            opt.zero_grad()
            LOSS(net(*inputs), label.to(net.top.weight.dtype)).backward()
            opt.step()
    for a, b, c in zip(*(net.parameters() for net in nets), strict=True):
        assert tolerances.excess(a, b, c) <= tolerances.CHAIN
    return found


WAYS = pytest.mark.parametrize("ways", [graph, whole])
NARROW, WIDE = torch.int32, torch.int64
ALL = [NARROW] * 4


@WAYS
def test_ids_and_offsets_of_lookups(ways: Any) -> None:
    assert train(ways, [batch(k) for k in range(7)])[:4] == ALL


@WAYS
def test_with_lookups_in_the_columns_of_a_matrix(ways: Any) -> None:
    passes = "default,join-lookups{everywhere=true},align-rows{everywhere=true}"
    assert train(ways, [batch(k) for k in range(6)], passes=passes)[:4] == ALL


class Dots(Net):
    """Dot products of the rows, which the interaction may look up itself."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(3, 1)

    def forward(self, many: Tensor, offsets: Tensor, few: Tensor, one: Tensor) -> Tensor:
        rows = torch.stack([self.bags(many, offsets), self.fixed(few), self.rows(one)], 1)
        li, lj = torch.tril_indices(3, 3, -1)
        return self.top(torch.bmm(rows, rows.transpose(1, 2))[:, li, lj]).squeeze(1)


@WAYS
def test_with_lookups_that_an_interaction_does(ways: Any) -> None:
    passes, data = "default,gather-in-dots{everywhere=true}", [batch(k) for k in range(7)]
    fast = recast.optimize(Dots(), example=[data[0][0], batch(1, 4)[0]], passes=passes)
    assert "gathered_dots" in fast.code
    assert train(ways, data, Dots, passes=passes)[:4] == ALL


def test_ids_that_are_int32_already_are_a_form_of_their_own() -> None:
    """Some wide, some not, one after the other."""
    data = [batch(k, ids=(WIDE, NARROW)[k % 2]) for k in range(10)]
    with pytest.raises(ValueError, match="unpack"):
        train(whole, data)  # two rooms: both are narrow
    assert train(whole, data[1::2])[:4] == ALL


def strided(inputs: Any) -> Any:
    """The same numbers, not side by side in memory."""
    return tuple(torch.stack([t, t], -1)[..., 0] for t in inputs)


class Other(Tensor):
    """A subclass, whose memory may be anything."""


@WAYS
@pytest.mark.parametrize("form", [strided, lambda x: tuple(t.as_subclass(Other) for t in x)])
def test_memory_that_the_copy_does_not_take(ways: Any, form: Any) -> None:
    data = [batch(k) for k in range(7)]
    # Ids that are no plain tensors are what plain torch is asked about.
    found = train(ways, [(form(x) if k > 3 else x, y) for k, (x, y) in enumerate(data)], plain=data)
    assert found[:4] == ALL


def compared(rows: Tensor, ids: Tensor) -> Tensor:
    return rows * (ids > 3).unsqueeze(1)


def of_dtype(rows: Tensor, ids: Tensor) -> Tensor:
    return rows * (2.0 if ids.dtype is torch.int64 else 3.0)


@WAYS
def test_an_id_that_somebody_else_reads_stays(ways: Any) -> None:
    found = train(ways, [batch(k) for k in range(7)], lambda: Net(compared))
    assert found[:4] == [NARROW, NARROW, NARROW, WIDE]


@WAYS
def test_ids_of_a_maximum_stay(ways: Any) -> None:
    """Its gradient makes new ids from them, whose original dtype would be lost."""

    def make() -> Net:
        net = Net()
        net.bags.mode = "max"
        return net

    found = train(ways, [batch(k) for k in range(7)], make)
    assert found[:4] == [WIDE, NARROW, NARROW, NARROW]


@WAYS
def test_where_forward_reads_dtypes_all_stay(ways: Any) -> None:
    found = train(ways, [batch(k) for k in range(7)], lambda: Net(of_dtype))
    assert found[:4] == [WIDE] * 4


class Twice(Net):
    """One tensor may be given in both places."""

    def forward(self, one: Tensor, two: Tensor) -> Tensor:  # type: ignore[override]
        rows = torch.cat([self.rows(one), self.rows(two), self.fixed(one.unsqueeze(1) % 9)], 1)
        return self.top(rows).squeeze(1)


def test_one_tensor_in_two_places_is_asked_about_in_both() -> None:
    """Only lookups read the second argument; the same tensor as the first has other readers."""
    apart = [((batch(k)[0][3], batch(k + 50)[0][3]), batch(k)[1]) for k in range(7)]
    example = [apart[0][0], tuple(t[:4] for t in apart[1][0])]
    assert train(whole, apart, Twice, example=example)[:2] == [WIDE, NARROW]
    both = [((x, x), y) for (x, _), y in apart]
    assert train(whole, both, Twice, example=example)[0] is WIDE


def test_ids_that_the_loss_is_given_too_stay() -> None:
    def loss(out: Tensor, label: Tensor, ids: Tensor) -> Tensor:
        assert ids.dtype is WIDE
        return LOSS(out, label) + (ids.float() / 2**20).mean() * out.mean()

    model = Net()
    data = [batch(k) for k in range(6)]
    with emulated_gpu.serve():
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        fast, _ = recast.optimize(model, opt, example=[data[0][0], batch(1, 4)[0]])
        step = TrainingStep(fast, loss, opt, recorder=TapeRecorder(opt))
        for inputs, label in data:
            step(inputs, label, inputs[3])
    assert dtypes(step._recordings)[:4] == [NARROW, NARROW, NARROW, WIDE]


def test_a_hook_makes_the_plain_forward_run_on_what_was_given() -> None:
    seen = []

    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        seen.append(args[0].dtype)

    hook.__module__ = "torch.nn.utils.of_a_test"  # steps with hooks of others are not recorded
    model, data = Net(), [batch(0)] * 6  # of one length: bags are not cut by our kernels either
    with emulated_gpu.serve():
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        fast, _ = recast.optimize(model, opt, example=[data[0][0], batch(1, 4)[0]])
        step = TrainingStep(fast, LOSS, opt, recorder=TapeRecorder(opt))
        fast.rows.register_forward_hook(hook)
        with pytest.warns(recast.errors.RecastWarning, match="plain forward"):
            for inputs, label in data:
                step(inputs, label)
    assert dtypes(step._recordings)[:4] == [WIDE] * 4 and set(seen) == {WIDE}


def test_a_sparse_gradient_has_ids_of_int64() -> None:
    model, data = Net(sparse=True), [batch(k) for k in range(6)]
    plain = copy.deepcopy(model)
    with emulated_gpu.serve():
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        fast, _ = recast.optimize(model, opt, example=[data[0][0], batch(1, 4)[0]])
        forward = RecordedForward(fast, TapeRecorder(), Pairs(opt))
        vars(fast)["_replays"] = forward
        for inputs, label in data:
            fast.zero_grad(), plain.zero_grad()
            LOSS(fast(*inputs), label).backward(), LOSS(plain(*inputs), label).backward()
            ours, theirs = model.rows.weight.grad, plain.rows.weight.grad
            assert ours is not None and theirs is not None
            assert ours._indices().dtype is WIDE and ours._nnz() == B
            torch.testing.assert_close(ours.to_dense(), theirs.to_dense())
            assert model.fixed.weight.grad.merged()[0].dtype is WIDE
        assert forward._training is not None
        assert dtypes(forward._training._recordings)[:4] == ALL
