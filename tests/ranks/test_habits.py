"""What users do with a model, done on many ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from every import MIXED, TABLES, Every, after, batch, grads, planned, step
from harness import run
from test_training import SIZES
from torch import Tensor, nn

import recast
from recast.errors import IdError, RecastWarning, UsageError
from recast.runtime.ranks import shards

EXAMPLE = batch([5, 4], 0)[0]


def made(model: nn.Module, kinds: Any = MIXED, **words: Any) -> Any:
    """``optimize`` on this rank, of a copy."""
    plan = planned(model, dist.get_world_size(), kinds)
    return recast.optimize(copy.deepcopy(model), example=EXAMPLE, plan=plan, **words)


def gradients(model: Every, sizes: list[int]) -> dict[str, Tensor]:
    """Those of one process."""
    model = copy.deepcopy(model)
    step(model, batch(sizes), sum(sizes), 1)
    return grads(model)


def agree(got: dict[str, Tensor], wanted: dict[str, Tensor], fast: nn.Module) -> None:
    for name, p in fast.named_parameters():
        sharded = shards.of(p)
        if f"grad {name}" in wanted:
            whole = wanted[f"grad {name}"]
            own = whole if sharded is None else sharded.local(whole)
            torch.testing.assert_close(got[f"grad {name}"].to_dense(), own)
        else:
            assert f"grad {name}" not in got


def test_the_graph_says_who_talks_to_whom() -> None:
    """Even without the ranks: it can be read, planned and saved, but not run."""
    fast = recast.optimize(Every(), example=EXAMPLE, world_size=4, sharding=MIXED)
    calls = [line.split(" = ")[1] for line in str(fast).splitlines() if " = " in line]
    names = [call.partition("(")[0].removeprefix("recast.") for call in calls]
    order = ["send_ids", "wait_ids", "embedding_bags", "send_rows", "mlp"]
    assert names[names.index("send_ids") :][: len(order)] == order
    assert names.index("wait_rows") > names.index("mlp"), "the bottom network is in between"
    assert "2×row_wise" in str(fast) and "fixed ragged single weighted" in str(fast).replace(
        ",", ""
    )
    assert "4 ranks" in str(fast.report) and "on the wire a sample" in str(fast.report)
    assert fast.plan.placement("raw").sharding_type == "table_wise"
    pickle.loads(pickle.dumps(fast))
    with pytest.raises(UsageError, match="made for 4 ranks"):
        fast(*EXAMPLE)


def test_accumulation_reduces_once() -> None:
    model, sizes = Every(), SIZES[4]

    def one(rank: int) -> Tensor:
        fast = made(model)
        with fast.no_sync():
            step(fast, batch(sizes, rank, seed=1), sum(sizes), 4)
        inner = fast.top[2].bias.grad.clone()
        step(fast, batch(sizes, rank, seed=2), sum(sizes), 4)
        agree(grads(fast), wanted, fast)
        return inner

    twice = copy.deepcopy(model)
    step(twice, batch(sizes, seed=1), sum(sizes), 1)
    step(twice, batch(sizes, seed=2), sum(sizes), 1)
    wanted = grads(twice)
    assert len({float(bias) for bias in run(4, one)}) == 4, "each rank had its own until then"


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, lr=0.01, eps=0.1, amsgrad=True),
        lambda p: torch.optim.Adam(p, lr=0.01, eps=0.1),
        lambda p: torch.optim.NAdam(p, lr=0.01, eps=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
    ],
)
def test_gradients_that_are_kept_as_zeros_are_clipped_as_a_whole(make: Any) -> None:
    """Some are dense while torch steps; the norm is then asked of all ranks all the same."""
    model, sizes = Every(), SIZES[2]
    kept = {"single.weight": "table_wise", "raw": "table_wise"}  # one rank has no row of them

    def trained(net: Any, optimizer: Any, rank: int | None) -> list[float]:
        norms = []
        for k in range(3):
            optimizer.zero_grad(set_to_none=False)
            step(net, batch(sizes, rank, seed=k), sum(sizes), 1 if rank is None else 2)
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.01)))
            optimizer.step()
        return norms

    def one(rank: int) -> list[float]:
        twin = copy.deepcopy(model)
        plan = planned(twin, 2, MIXED | kept)
        fast, optimizer = recast.optimize(twin, make(twin.parameters()), example=EXAMPLE, plan=plan)
        return trained(fast, optimizer, rank)

    plain = copy.deepcopy(model)
    wanted = trained(plain, make(plain.parameters()), None)
    for found in run(2, one):
        assert found == pytest.approx(wanted, rel=1e-4)


def test_copies_train() -> None:
    model, sizes = Every(), SIZES[2]
    wanted = gradients(model, sizes)

    def one(rank: int) -> None:
        fast = made(model)
        for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            step(twin, batch(sizes, rank), sum(sizes), 2)
            agree(grads(twin), wanted, twin)
        assert not grads(fast)

    said = "a model with tables that are spread over ranks is pickled: .* and of no other"
    with pytest.warns(RecastWarning, match=said) as seen:
        run(2, one)
    parts = sorted(str(w.message).partition("parts of ")[2][:6] for w in seen)
    assert parts == ["rank 0", "rank 1"], "once a file, and not for copies"


def test_the_optimizers_of_copies_save_whole_tables() -> None:
    """Before they have done a step, too."""
    model = Every()

    def one(rank: int) -> None:
        twin = copy.deepcopy(model)
        plan = planned(twin, 2, MIXED)
        adagrad = torch.optim.Adagrad(twin.parameters())
        fast, optimizer = recast.optimize(twin, adagrad, example=EXAMPLE, plan=plan)
        wanted = optimizer.state_dict()["state"]
        _, copied = copy.deepcopy((fast, optimizer))
        found = copied.state_dict()["state"]
        for number, state in wanted.items():
            for name, value in state.items():
                assert type(found[number][name]) is type(value)
                assert found[number][name].shape == value.shape
        copied.load_state_dict(copied.state_dict())

    run(2, one)


def test_frozen_parameters() -> None:
    model, sizes = Every(), SIZES[2]
    frozen = ("ragged.weight", "bottom.0.weight", "raw")
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen)
    wanted = gradients(model, sizes)

    def one(rank: int) -> None:
        fast = made(model)
        step(fast, batch(sizes, rank), sum(sizes), 2)
        agree(grads(fast), wanted, fast)
        fast.zero_grad()
        fast.get_parameter("bottom.0.weight").requires_grad_()  # thawed later
        step(fast, batch(sizes, rank), sum(sizes), 2)
        agree(grads(fast), thawed, fast)

    model.bottom[0].weight.requires_grad_()
    thawed = gradients(model, sizes)
    model.bottom[0].weight.requires_grad_(False)
    run(2, one)


def test_without_gradients() -> None:
    model, sizes = Every().eval(), SIZES[3]
    with torch.no_grad():
        wanted = model(*batch(sizes)[0])

    def one(rank: int) -> Tensor:
        fast = made(model).eval()
        with torch.inference_mode():
            return fast(*batch(sizes, rank)[0])

    torch.testing.assert_close(torch.cat(run(3, one)), wanted)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_a_bad_id_is_an_error_on_all_ranks(kind: str) -> None:
    model = Every()

    def one(rank: int) -> str:
        fast = made(model, kind)
        inputs = list(batch([3, 3, 3], rank)[0])
        if rank == 1:
            inputs[1] = inputs[1].clone()
            inputs[1][2, 0] = 13
        with pytest.raises(IdError) as caught:
            fast(*inputs)
        fast(*batch([3, 3, 3], rank)[0])  # and the next batch goes through
        return str(caught.value)

    told = run(3, one)
    assert "id 13" in told[1] and "fixed.weight" in told[1] and "every.py" in told[1]
    assert "rank 1 was refused" in told[0] and "rank 1 was refused" in told[2]


def test_the_wire_rounds_and_no_more() -> None:
    model, sizes = Every(), SIZES[2]
    wanted = gradients(model, sizes)

    def one(rank: int) -> list[float]:
        fast = made(model, "table_wise", wire={"forward": "fp16", "backward": "int8"})
        step(fast, batch(sizes, rank), sum(sizes), 2)
        held = [(p, shards.of(p), n) for n, p in fast.named_parameters()]
        return [
            float((p.grad.to_dense() - s.local(wanted[f"grad {n}"])).abs().max())
            / float(wanted[f"grad {n}"].abs().max())
            for p, s, n in held
            if s is not None and s.shards
        ]

    off = [error for errors in run(2, one) for error in errors]
    assert 1e-5 < max(off) < 0.03, "of 8 bits, not of 32, and not wrong"


def test_a_table_read_as_a_whole_stays_whole() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items, self.users = nn.Embedding(9, 4), nn.Embedding(8, 4)

        def forward(self, item: Tensor, user: Tensor) -> Tensor:
            return (self.items(item) + self.users(user)) @ self.items.weight.t()

    g = torch.Generator().manual_seed(0)
    inputs = tuple(torch.randint(8, (6,), generator=g) for _ in range(2))
    fast = recast.optimize(Tied(), example=inputs, world_size=2, sharding={"users": "table_wise"})
    assert fast.plan.placement("items.weight").sharding_type == "data_parallel"
    assert fast.plan.placement("users.weight").sharding_type == "table_wise"
    assert "items.weight is on every rank: " in str(fast.report)
    with pytest.raises(UsageError, match=r"items.weight cannot be row_wise"):
        recast.optimize(Tied(), example=inputs, world_size=2, sharding={"items": "row_wise"})


def test_what_would_not_be_the_same_numbers_is_refused() -> None:
    model = Every()
    adagrad = recast.optim.RowWiseAdagrad(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="whole rows"):
        recast.optimize(
            model, adagrad, example=EXAMPLE, world_size=2, sharding={"raw": "column_wise"}
        )
    model = Every(sparse=True)
    with pytest.raises(UsageError, match="must be sparse"):
        recast.optimize(model, example=EXAMPLE, world_size=2, sharding={"single": "data_parallel"})
    bag = nn.EmbeddingBag(8, 4, mode="max")
    ids = torch.randint(8, (5, 3))
    with pytest.raises(UsageError, match="pooled by max"):
        recast.optimize(bag, example=(ids,), world_size=2, sharding={"weight": "row_wise"})
    with pytest.raises(UsageError, match="for 4 ranks, and world_size is 2"):
        plan = recast.optimize(Every(), example=EXAMPLE, world_size=4).plan
        recast.optimize(Every(), example=EXAMPLE, world_size=2, plan=plan)
    with pytest.raises(UsageError, match="no table is named"):
        recast.optimize(Every(), example=EXAMPLE, world_size=2, sharding={"nothing": "row_wise"})


def test_a_plan_from_a_file(tmp_path: Any) -> None:
    """By name, and only for this model."""
    model, sizes = Every(), SIZES[2]
    recast.optimize(model, example=EXAMPLE, world_size=2, sharding=MIXED).plan.save(tmp_path / "p")
    wanted = gradients(model, sizes)

    def one(rank: int) -> None:
        plan = recast.Plan.load(tmp_path / "p")
        fast = recast.optimize(copy.deepcopy(model), example=EXAMPLE, plan=plan)
        assert fast.plan.placement("ragged.weight").sharding_type == "row_wise"
        step(fast, batch(sizes, rank), sum(sizes), 2)
        agree(grads(fast), wanted, fast)

    run(2, one)
    with pytest.raises(UsageError):
        recast.optimize(
            Every(rows=14), example=EXAMPLE, world_size=2, plan=recast.Plan.load(tmp_path / "p")
        )


def test_ranks_that_differ_start_as_rank_0() -> None:
    torch.manual_seed(5)
    models = [Every() for _ in range(2)]
    wanted = gradients(models[0], SIZES[2])

    def one(rank: int) -> None:
        fast = made(models[rank])
        step(fast, batch(SIZES[2], rank), sum(SIZES[2]), 2)
        agree(grads(fast), wanted, fast)

    run(2, one)


def test_sparse_adam_and_lazy_adam() -> None:
    """Plain torch's SparseAdam is the reference for both; dense parameters use SGD here."""
    torch.manual_seed(1)
    sizes = SIZES[3]
    kinds = MIXED | {"single.weight": "table_wise"}

    def pair(model: nn.Module, lazy: bool) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        named = dict(model.named_parameters())
        rows = [named[n] for n in TABLES]
        rest = [p for n, p in named.items() if n not in TABLES]
        kind = torch.optim.Adam if lazy else torch.optim.SparseAdam
        return kind(rows, lr=0.01, eps=1e-3), torch.optim.SGD(rest, lr=0.1)

    def trained(
        model: nn.Module, sparse: Any, dense: Any, given: Any, ranks: int
    ) -> dict[str, Tensor]:
        for k in range(5):
            sparse.zero_grad()
            dense.zero_grad()
            step(model, given(k), sum(sizes), ranks)
            sparse.step()
            dense.step()
        return after(model, sparse)

    plain = Every(sparse=True)
    same = Every()
    same.load_state_dict(plain.state_dict())
    start = copy.deepcopy(plain)

    def one(rank: int, lazy: bool) -> Any:
        model = copy.deepcopy(same if lazy else start)
        sparse, dense = pair(model, lazy)
        words = {"sparse_semantics": "lazy"} if lazy else {}
        plan = planned(model, 3, kinds)
        fast, _ = recast.optimize(model, sparse, example=EXAMPLE, plan=plan, **words)
        found = trained(fast, sparse, dense, lambda k: batch(sizes, rank, seed=k), 3)
        return found, {n: shards.of(p) for n, p in fast.named_parameters()}

    wanted = trained(plain, *pair(plain, False), lambda k: batch(sizes, seed=k), 1)
    for lazy in (False, True):
        for found, parts in run(3, one, lazy):
            for key, value in found.items():
                part = parts[key.partition(" [")[0]]
                own = wanted[key] if part is None or not value.dim() else part.local(wanted[key])
                torch.testing.assert_close(value, own, rtol=1e-4, atol=1e-5, check_dtype=False)


class _Two(nn.Module):
    """Two outputs of one dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layer(self.table(ids))
        return x.tanh(), x.sigmoid()


@pytest.mark.parametrize("order", ["0, 1", "1, 0", "calls"])
def test_backward_passes_through_several_outputs(order: str) -> None:
    """One after the other; or through the outputs of two forward passes."""
    model = _Two()
    plain = copy.deepcopy(model)
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(20, (6,), generator=g)
    upstream = torch.randn(2, 6, 3, generator=g)

    def passes(model: nn.Module, ids: Tensor, upstream: Tensor, ranks: int) -> None:
        if order == "calls":
            outs, first, then = (model(ids)[0], model(ids.flip(0))[1]), 0, 1
        else:
            outs, first, then = model(ids), *map(int, order.split(","))
        for k, last in ((first, False), (then, True)):
            (outs[k] * upstream[k]).sum().mul(ranks).backward(retain_graph=not last)

    passes(plain, ids, upstream, 1)
    wanted = plain.layer.weight.grad

    def one(rank: int) -> None:
        example = (ids[:3],)
        fast = recast.optimize(copy.deepcopy(model), example=example, sharding="row_wise")
        own = slice(3 * rank, 3 * rank + 3)
        for _ in range(2):
            fast.zero_grad()
            if order == "calls":  # the second forward sees this rank's part of the flipped ids
                mine = torch.cat([ids[own], ids.flip(0)[own]])
                outs = fast(mine[:3])[0], fast(mine[3:])[1]
                for k in (0, 1):
                    (outs[k] * upstream[k][own]).sum().mul(2).backward()
            else:
                passes(fast, ids[own], upstream[:, own], 2)
            torch.testing.assert_close(fast.layer.weight.grad, wanted, rtol=1e-4, atol=1e-5)

    run(2, one)


def test_two_backward_passes_of_one_forward() -> None:
    """``retain_graph=True``: both reduce, which DistributedDataParallel by itself would not."""
    model, sizes = Every(), SIZES[2]
    plain = copy.deepcopy(model)

    def twice(model: nn.Module, given: Any, ranks: int) -> None:
        out = model(*given[0])
        (out.sum() * (ranks / sum(sizes))).backward(retain_graph=True)
        ((out - given[1]).square().sum() * (ranks / sum(sizes))).backward()

    twice(plain, batch(sizes), 1)
    wanted = grads(plain)

    def one(rank: int) -> None:
        fast = made(model)
        for _ in range(2):  # the first pass of all sorts the dense gradients into buckets
            fast.zero_grad()
            twice(fast, batch(sizes, rank), 2)
            agree(grads(fast), wanted, fast)

    run(2, one)


class _Puts(nn.Module):
    """Returns nothing, but puts its result into the dict that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.EmbeddingBag(9, 4), nn.Linear(4, 2)

    def forward(self, batch: dict[str, Tensor]) -> None:
        batch["out"] = self.layer(self.table(batch["ids"]))


@pytest.mark.parametrize("sharding", ["row_wise", "data_parallel"])
def test_two_backward_passes_of_what_forward_puts_into_a_dict(sharding: str) -> None:
    model, ids = _Puts(), torch.arange(12).view(6, 2) % 9

    def twice(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
        model(given)
        given["out"].square().mean().backward(retain_graph=True)
        given["out"].mean().backward()
        grad: Tensor = model.get_parameter("layer.weight").grad  # type: ignore[assignment]
        return grad

    def one(rank: int) -> None:
        example = {"ids": ids[:3]}
        fast = recast.optimize(copy.deepcopy(model), example=example, sharding=sharding)
        torch.testing.assert_close(twice(fast, {"ids": ids[3 * rank : 3 * rank + 3]}), wanted)

    wanted = twice(copy.deepcopy(model), {"ids": ids})
    run(2, one)


def test_a_model_whose_tables_are_everywhere_may_be_cast() -> None:
    """Dense gradients are reduced in buckets, which have the dtype of their parameters."""
    model = _Two()
    ids = torch.arange(6)

    def train(model: Any, ids: Tensor) -> Tensor:
        model(ids)[0].square().mean().backward()
        model.double().zero_grad()
        model(ids)[0].square().mean().backward()
        grad: Tensor = model.layer.weight.grad
        return grad

    def one(rank: int) -> Tensor:
        fast = recast.optimize(copy.deepcopy(model), example=ids[:3], sharding="data_parallel")
        return train(fast, ids[3 * rank : 3 * rank + 3])

    first, second = run(2, one)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, train(copy.deepcopy(model), ids))


def test_gradients_that_autograd_hands_out_are_told_to_be_of_one_rank() -> None:
    model = _Two()
    ids, factor = torch.arange(6), torch.ones(3, 1)

    def one(rank: int) -> None:
        fast = recast.optimize(copy.deepcopy(model), example=ids[:3], sharding="row_wise")
        out = (fast(ids[3 * rank : 3 * rank + 3])[0] * factor.clone().requires_grad_()).sum()
        torch.autograd.grad(out, fast.layer.bias)

    with pytest.warns(RecastWarning, match="gives the gradients of this rank's own batch"):
        run(2, one)

    def inputs_only(rank: int) -> None:
        fast = recast.optimize(copy.deepcopy(model), example=ids[:3], sharding="row_wise")
        given = factor.clone().requires_grad_()
        torch.autograd.grad((fast(ids[:3])[0] * given).sum(), given)
        fast(ids[:3])[0].sum().backward(inputs=[fast.layer.bias])

    run(2, inputs_only)


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(30, 4)

    def forward(self, ids: Tensor, label: Tensor | None = None) -> Tensor:
        out = self.rows(ids).sum(1)
        return out if label is None else (out - label).square().mean()


def test_a_call_of_another_form_says_what_to_do() -> None:
    """The plain forward, which takes it on one rank, reads whole tables."""

    def rank(r: int) -> str:
        ids = torch.arange(12).view(4, 3)
        fast = recast.optimize(Labelled(), example=(ids, torch.ones(4)), sharding="row_wise")
        with pytest.raises(UsageError) as raised:
            fast(ids)
        return str(raised.value)

    for said in run(2, rank):
        assert "(label is None)" in said
        assert "arguments of the example's form in every call" in said
        assert "example=[a, b]" in said


class Chosen(nn.Module):
    """A loss over the rows that a mask chooses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 4)

    def forward(self, ids: Tensor, counts: Tensor) -> Tensor:
        return self.table(ids).square().sum(1)[counts].mean()


def test_a_mask_may_choose_all_rows_of_one_rank_and_none_of_another() -> None:
    ids = torch.arange(8).view(2, 4)
    counts = torch.tensor([[True] * 4, [False] * 4])
    plain = Chosen()
    plain(ids.flatten(), counts.flatten()).backward()

    def one(rank: int) -> tuple[Tensor, Tensor]:
        batch = ids[rank], counts[rank]
        fast = recast.optimize(Chosen(), example=batch, sharding="row_wise")
        fast(*batch).backward()
        (weight,) = fast.parameters()
        assert weight.grad is not None and plain.table.weight.grad is not None
        return weight.grad.to_dense(), shards.of(weight).local(plain.table.weight.grad)  # type: ignore[union-attr]

    for got, wanted in run(2, one):
        torch.testing.assert_close(got, wanted)
