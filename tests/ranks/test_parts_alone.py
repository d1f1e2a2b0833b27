"""A module of a sharded model, called by itself, has only a part of its table, and says so."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from harness import run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import recast
from recast.errors import NotBuiltError, UsageError

IDS = torch.randint(22, (5, 3), generator=torch.Generator().manual_seed(1))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.rows = nn.Embedding(25, 4)
        self.bags = nn.EmbeddingBag(25, 4)
        self.out = nn.Linear(8, 3)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g))

    def encode(self, ids: Tensor) -> Tensor:
        encoded: Tensor = self.out(torch.cat([self.rows(ids).sum(1), self.bags(ids)], 1))
        return encoded

    def forward(self, ids: Tensor) -> Tensor:
        return self.encode(ids).sum(1)


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise"])
def test_a_module_or_method_that_reads_a_part_is_refused(kind: str) -> None:
    """Small ids would be found, but on all ranks except one they are rows of other ids."""

    def one(rank: int) -> None:
        fast = recast.optimize(Tower(), example=IDS, sharding=kind)
        with pytest.raises(UsageError, match="rows has only this rank's part of its table"):
            fast.rows(IDS % 3)
        with pytest.raises(UsageError, match="rows has only this rank's part of its table"):
            fast.encode(IDS % 3)
        torch.testing.assert_close(fast(IDS), Tower()(IDS))

    run(2, one)


def test_tables_on_every_rank_answer_by_themselves() -> None:
    def one(rank: int) -> None:
        fast = recast.optimize(Tower(), example=IDS, sharding="data_parallel")
        torch.testing.assert_close(fast.rows(IDS), Tower().rows(IDS))
        torch.testing.assert_close(fast.encode(IDS), Tower().encode(IDS))

    run(2, one)


@pytest.mark.filterwarnings("ignore:a model with tables that are spread over ranks is pickled")
@pytest.mark.parametrize("how", ["copied", "pickled", "in place"])
def test_copies_run_and_refuse_likewise(how: str) -> None:
    def one(rank: int) -> None:
        model = Tower()
        fast = recast.optimize(model, example=IDS, sharding="row_wise", inplace=how == "in place")
        if how == "copied":
            fast = copy.deepcopy(fast)
        elif how == "pickled":
            fast = pickle.loads(pickle.dumps(fast))
        called = model if how == "in place" else fast
        torch.testing.assert_close(called(IDS), Tower()(IDS))
        with pytest.raises(UsageError, match="only this rank's part"):
            called.bags(IDS % 3)

    run(2, one)


def test_parts_are_not_drawn_anew() -> None:
    """After parts of several sizes, dense parameters would be drawn differently on each rank."""

    def one(rank: int) -> None:
        fast = recast.optimize(Tower(), example=IDS, sharding="row_wise")
        with pytest.raises(UsageError, match=r"rows has only this rank's part.*cannot be reset"):
            fast.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
        fast.out.reset_parameters()
        fast.load_state_dict(Tower().state_dict())
        torch.testing.assert_close(fast(IDS), Tower()(IDS))

    run(2, one)


def test_a_batch_of_gradients_is_refused() -> None:
    def one(rank: int) -> None:
        fast = recast.optimize(Tower(), example=IDS, sharding="row_wise")
        out = fast(IDS)
        with pytest.raises(NotBuiltError, match="a batch of gradients through a model"):
            torch.autograd.grad(out, fast.rows.weight, torch.eye(5), is_grads_batched=True)

    run(2, one)


def test_the_first_call_may_only_evaluate() -> None:
    """Under inference_mode, as trainers begin: tensors for training are no inference tensors."""

    def one(rank: int) -> Tensor:
        model = Tower().double()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        fast, opt = recast.optimize(model, opt, example=IDS, sharding="row_wise")
        for step in range(3):
            with torch.inference_mode():
                fast(IDS + step)
            opt.zero_grad()
            fast(IDS + step).square().mean().backward()
            opt.step()
        with torch.no_grad():
            found: Tensor = fast(IDS)
        return found

    plain = Tower().double()
    opt = torch.optim.SGD(plain.parameters(), lr=0.01)
    for step in range(3):
        opt.zero_grad()
        plain(IDS + step).square().mean().backward()
        opt.step()
    for got in run(2, one):
        torch.testing.assert_close(got, plain(IDS).detach())


class Checkpointed(Tower):
    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.encode, ids, use_reentrant=False)
        return out.sum(1)


def test_a_pin_that_capture_rules_out_says_what_is_in_the_way() -> None:
    with pytest.raises(UsageError, match="cannot be row_wise") as caught:
        recast.optimize(
            Checkpointed(), example=IDS, world_size=2, sharding={"rows.weight": "row_wise"}
        )
    assert "not captured whole (" in caught.value.why
    assert "activation checkpointing" in caught.value.why
    assert "at test_parts_alone.py:" in caught.value.why
