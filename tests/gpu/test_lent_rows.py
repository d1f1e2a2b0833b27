"""Row gradients of a replay are reused if nobody else holds them, and only then."""

from __future__ import annotations

import copy
import random
import sys
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
from test_recorded_models import Ragged, batches
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from test_recorded_training import LOSS, recorded

from recast.runtime.recorded import optimizer_step
from recast.runtime.recorded.gradients import lent_row_grads
from recast.runtime.recorded.gradients.lent_row_grads import LentRowGrads
from recast.runtime.rows import cuda_step_cache
from recast.runtime.rows import optimizer as row_optimizer

HABITS = (
    "plain", "plain", "plain", "plain", "clip", "keep", "alias", "cell", "own", "accumulate",
    "zeros", "scale", "dense", "again",
)  # fmt: skip


def train(seed: int, steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """A loop with a habit drawn for every step; parameters, and what was kept, as it was kept."""
    draw = random.Random(seed)
    data = batches(steps)
    torch.manual_seed(0)
    model = Ragged()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    kept: list[Any] = []
    with emulated_gpu.serve():
        fast, _ = recorded(model, data[0][0], optimizer)
        tables = [e.weight for e in model.emb]
        for k, (inputs, label) in enumerate(data):
            habit = draw.choice(HABITS)
            LOSS(fast(*inputs), label).backward()
            if habit == "accumulate":
                continue
            if habit == "clip":
                nn.utils.clip_grad_norm_(fast.parameters(), 0.02)
            if habit == "keep":
                kept.append(tables[k % 2].grad)
            if habit == "alias":
                kept.append(tables[k % 2].grad.detach())  # type: ignore[union-attr]
            if habit == "cell":
                kept.append(tables[0].grad.cell.pieces[0].rows)  # type: ignore[union-attr]
            if habit == "own":
                tables[0].grad.of_mine = k  # type: ignore[union-attr]
            if habit == "scale":
                tables[1].grad.mul_(0.5)  # type: ignore[union-attr]
            if habit == "dense":
                tables[0].grad.clamp_(-1, 1)  # type: ignore[union-attr]
            if habit == "again":
                optimizer.step()
            optimizer.step()
            assert not hasattr(tables[1].grad, "of_mine")
            optimizer.zero_grad(set_to_none=habit != "zeros")
        found = [t + 0 for t in kept]
    return [p.detach().clone() for p in model.parameters()], found


@pytest.mark.parametrize(
    ("seed", "steps"),
    [(4, 14), *(pytest.param(k, 60, marks=pytest.mark.long) for k in (1, 2, 3))],
)
def test_whatever_is_done_with_them(seed: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit what gradients made anew at every replay give if steps run eagerly; and close to
    it if they are replayed, with the rates of dense parameters on the device.
    """
    made, stepped = [0, 0], 0
    make = LentRowGrads._made

    def counted(self: LentRowGrads, *looks: Any) -> Any:
        made[0] += 1
        return make(self, *looks)

    def replayed(optimizer: torch.optim.Optimizer) -> bool:
        nonlocal stepped
        done = optimizer_step.step_by_replay(optimizer)
        stepped += done
        return done

    monkeypatch.setattr(LentRowGrads, "_made", counted)
    monkeypatch.setattr(row_optimizer, "instead", [replayed])
    by_replays = train(seed, steps)
    often = made[0]
    monkeypatch.setattr(row_optimizer, "instead", [])
    made[0] = 0
    ours = train(seed, steps)
    again = made[0]
    monkeypatch.setattr(cuda_step_cache, "cached_for_lent", lambda *given: None)
    monkeypatch.setattr(lent_row_grads.LentGrads, "are_alone", lambda self: False)
    made[0] = 0
    theirs = train(seed, steps)
    assert often < made[0] - 2 and again <= made[0], "hardly any was given out again"
    assert stepped > 1, "hardly any step was replayed"
    for a, b in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
        assert torch.equal(a, b)
    for a, b in zip([*by_replays[0], *by_replays[1]], [*theirs[0], *theirs[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_a_moved_table_or_another_state_is_seen() -> None:
    """What a known step assumes about tables is still checked."""
    data = batches(12)
    results = []
    for known in (True, False):
        torch.manual_seed(0)
        model = Ragged()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        with emulated_gpu.serve(), pytest.MonkeyPatch.context() as patch:
            if not known:
                patch.setattr(cuda_step_cache, "cached_for_lent", lambda *given: None)
            fast, _ = recorded(model, data[0][0], optimizer)
            for k, (inputs, label) in enumerate(data):
                LOSS(fast(*inputs), label).backward()
                if k == 6:
                    held = optimizer.state[model.emb[0].weight]
                    held["sum"] = held["sum"].clone()
                if k == 9:
                    optimizer.load_state_dict(optimizer.state_dict())
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + k)
                optimizer.step()
                optimizer.zero_grad()
            state = [s["sum"].clone() for s in optimizer.state.values()]
            results.append([*(p.detach().clone() for p in model.parameters()), *state])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_who_is_kept_over_a_backward_is_stepped_with_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is given memory of its own then, of which a step known by now knows nothing."""
    monkeypatch.setattr(row_optimizer, "instead", [])
    data = batches(12)
    torch.manual_seed(0)
    models = [Ragged()]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.1) for m in models]
    with emulated_gpu.serve():
        fast, _ = recorded(models[0], data[0][0], optimizers[0])
        for k, (inputs, label) in enumerate(data):
            for model, optimizer in zip((fast, models[1]), optimizers, strict=True):
                LOSS(model(*inputs), label).backward()
                if k == 9:
                    kept = [p.grad for p in model.parameters()]
                    optimizer.zero_grad()
                    LOSS(model(*data[0][0]), data[0][1]).backward()
                    for p, grad in zip(model.parameters(), kept, strict=True):
                        p.grad = grad
                optimizer.step()
                optimizer.zero_grad()
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(a, b)


def test_what_was_done_to_one_is_not_given_out_again() -> None:
    data = batches(12)
    torch.manual_seed(0)
    model = Ragged()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    known: list[int] = []
    with emulated_gpu.serve():
        fast, _ = recorded(model, data[0][0], optimizer)
        tables = [e.weight for e in model.emb]
        for k, (inputs, label) in enumerate(data):
            LOSS(fast(*inputs), label).backward()
            grads: list[Any] = [table.grad for table in tables]
            assert not hasattr(grads[0], "own") and grads[0].cell is not grads[1].cell
            known.append(id(grads[0]))
            if k == 7:
                assert known[-1] == known[-2], "the same is given out where nothing is done"
                grads[0].own = 1
            if k == 9:
                grads[0].cell = grads[1].cell
            del grads
            optimizer.zero_grad()
