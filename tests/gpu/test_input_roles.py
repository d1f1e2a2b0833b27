"""What a model declares about the tensors of its batch applies to these alone, and only as long as
it is true.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning
from recast.runtime.recorded.batches.batch import Batch
from recast.runtime.recorded.batches.input_roles import ModelInputs
from recast.runtime.recorded.training_step import TrainingStep

sys.path.insert(0, str(Path(__file__).parent))
from tape import TapeRecorder
from test_recorded_models import Ragged, batches

HERE = torch.device("cpu")
LOSS = F.binary_cross_entropy_with_logits


class Teller(nn.Module):
    """Looks up ids, and declares so while ``tells`` is set."""

    tells = True

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.top = nn.Embedding(9, 4), nn.Linear(4, 1)
        self.seen: list[torch.dtype] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.seen.append(ids.dtype)
        return self.top(F.embedding(ids, self.rows.weight)).squeeze(1)

    def looked_up_inputs(self, ids: Tensor, *others: Tensor) -> list[Tensor]:
        return [ids] if self.tells else []


def test_a_tensor_that_stands_elsewhere_too_is_not_told_of() -> None:
    places, ids = ModelInputs(Teller()), torch.arange(3)

    def told(*batch: Tensor) -> list[int]:
        made = Batch((batch, ()), HERE)
        places.of(made, batch, {})
        assert made.asked_roles is not None
        return made.asked_roles.roles.looked_up

    assert told(ids, torch.arange(3)) == [0]
    assert told(ids, ids) == []
    labels = Batch(((ids,), ids), HERE)
    places.of(labels, (ids,), {})
    assert labels.asked_roles is not None and labels.asked_roles.roles.looked_up == []


def test_what_was_told_is_asked_again_before_it_is_recorded() -> None:
    """A state that was run before and one form: nothing else would ask."""
    torch.manual_seed(0)
    model = Teller()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids, label = torch.tensor([1, 5, 2, 2]), torch.rand(4).round()
    bias = model.top.bias
    with emulated_gpu.serve():
        step = TrainingStep(model, LOSS, optimizer, recorder=TapeRecorder(optimizer), warmup=1)
        for wanted in (True, True, False, True):
            bias.requires_grad_(wanted)
            step(ids, label)
        assert model.seen == [torch.int64, torch.int32, torch.int64]
        model.tells = False
        bias.requires_grad_(False)
        for _ in range(3):
            step(ids, label)
    assert len(model.seen) == 5 and set(model.seen[3:]) == {torch.int64}


class Beside(Ragged):
    """Its first ids may be given as its numbers too."""

    def forward(self, ids: list[Tensor], offsets: list[Tensor], numbers: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, offsets) + numbers.float().mean()


def test_ids_that_are_numbers_too_do_not_get_more() -> None:
    data = [((i, o, i[0]), y) for (i, o), y in batches(2)]
    with emulated_gpu.serve():
        fast = recast.optimize(Beside(), example=[x for x, _ in data])
        (ids, offsets, _), _ = data[0]
        batch = Batch(((ids, offsets, ids[0]), ()), HERE)
        assert ModelInputs(fast).of(batch, (ids, offsets, ids[0]), {}) == [1]
        numbers = ids[0].clone()
        apart = Batch(((ids, offsets, numbers), ()), HERE)
        assert ModelInputs(fast).of(apart, (ids, offsets, numbers), {}) == [0, 1]


def test_the_plain_forward_gets_no_more_ids() -> None:
    """Torch's last bag would take them in."""
    torch.manual_seed(0)
    plain = Ragged()
    model = Ragged()
    model.load_state_dict(plain.state_dict())
    data = batches(1) * 5
    nets = plain, model
    opts = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    with emulated_gpu.serve():
        fast, _ = recast.optimize(model, opts[1], example=data[0][0])
        assert len(fast.ragged_inputs(*data[0][0])) == 2
        hook = lambda *_: None  # noqa: E731
        hook.__module__ = "torch.nn.utils.of_a_test"  # steps with hooks of others are not recorded
        fast.emb[0].register_forward_hook(hook)
        assert fast.ragged_inputs(*data[0][0]) == fast.looked_up_inputs(*data[0][0]) == []
        step = TrainingStep(fast, LOSS, opts[1], recorder=TapeRecorder(opts[1]))
        with pytest.warns(RecastWarning, match="plain forward"):
            for inputs, label in data:
                step(inputs, label)
        assert step.recorded == 1
    for inputs, label in data:
        opts[0].zero_grad()
        LOSS(plain(*inputs), label).backward()
        opts[0].step()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


class Asking(Ragged):
    """Goes another way for many ids."""

    def forward(self, ids: list[Tensor], offsets: list[Tensor]) -> Tensor:
        found: Any = super().forward(ids, offsets)
        return found * 2 if ids[0].numel() > 12 else found


def test_ids_whose_number_is_asked_for_get_no_more() -> None:
    (inputs, _), *_ = batches(1)
    assert inputs[0][0].numel() <= 12
    with emulated_gpu.serve():
        fast = recast.optimize(Asking(), example=inputs)
        found = fast.ragged_inputs(*inputs)
        assert not any(t is inputs[0][0] for t in found)
