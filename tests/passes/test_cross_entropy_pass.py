"""fuse-cross-entropy: every way to write the loss and the layer before it; what is none stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from passkit import calls, fired, misses, same
from torch import Tensor, nn
from torch.nn import functional as F

import recast

CLASSES, WIDTH, LENGTH = 130, 5, 3


class Parts(nn.Module):
    """What the forms below use."""

    def __init__(self, form: Callable[[Parts, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.form = form
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.layer = nn.Linear(WIDTH, CLASSES)
        self.matrix = nn.Parameter(torch.randn(WIDTH, CLASSES))
        self.bias = nn.Parameter(torch.randn(CLASSES))
        self.heat = nn.Parameter(torch.tensor(1.5))
        self.few = nn.Linear(WIDTH, 7)
        self.loss = nn.CrossEntropyLoss()
        self.ignoring = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)
        self.each = nn.CrossEntropyLoss(reduction="none")
        self.weighing = nn.CrossEntropyLoss(weight=torch.rand(CLASSES) + 0.5)
        self.log_softmax = nn.LogSoftmax(dim=1)
        self.likelihood = nn.NLLLoss(reduction="sum")

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        return self.form(self, self.inner(self.table(ids)), y)


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids, y = (torch.randint(0, CLASSES, (rows, LENGTH), generator=g) for _ in range(2))
    y[::2, 0] = 0
    return ids, y


BATCHES = [batch(6, 0), batch(9, 1)]
Form = Callable[[Parts, Tensor, Tensor], Tensor]  # x: (B, L, D), y: (B, L)


def _batchwise(m: Parts, x: Tensor, y: Tensor) -> Tensor:
    """In-batch softmax, with the learned temperature of CLIP and corrected frequencies."""
    logits = m.heat.exp() * x[:, 0] @ x[:, 1].t()
    own = torch.arange(x.shape[0], device=x.device)
    return F.cross_entropy(logits - x[:, 2, 0], own)


LAYERS: dict[str, Form] = {
    "a table": lambda m, x, y: m.loss(x[:, 0] @ m.table.weight.t(), y[:, 0]),
    "T": lambda m, x, y: F.cross_entropy(torch.matmul(x[:, 0], m.table.weight.T), y[:, 0]),
    "a matrix": lambda m, x, y: m.loss(torch.mm(x[:, 0], m.matrix), y[:, 0]),
    "a Linear": lambda m, x, y: m.ignoring(m.layer(x[:, 0]), y[:, 0]),
    "F.linear": lambda m, x, y: m.loss(F.linear(x[:, 0], m.table.weight, m.bias), y[:, 0]),
    "a bias added": lambda m, x, y: m.loss(x[:, 0] @ m.matrix + m.bias, y[:, 0]),
    "in front": lambda m, x, y: m.loss(m.bias + x[:, 0] @ m.matrix, y[:, 0]),
    "taken away": lambda m, x, y: m.each(x[:, 0] @ m.matrix - m.bias, y[:, 0]),
    "scaled": lambda m, x, y: m.loss((x[:, 0] @ m.matrix) / 0.07 * 0.5, y[:, 0]),
    "scaled, then a bias": lambda m, x, y: m.loss(2 * (x[:, 0] @ m.matrix) + m.bias, y[:, 0]),
    "a learned scale": lambda m, x, y: m.loss((x[:, 0] @ m.matrix) / m.heat, y[:, 0]),
    "a sequence": lambda m, x, y: m.ignoring(m.layer(x).view(-1, CLASSES), y.view(-1)),
    "flattened": lambda m, x, y: m.loss((x @ m.table.weight.t()).flatten(0, 1), y.flatten()),
    "turned": lambda m, x, y: m.ignoring(m.layer(x).transpose(1, 2), y),
    "turned, each": lambda m, x, y: m.each(m.layer(x).permute(0, 2, 1), y),
    "likelihood": lambda m, x, y: m.likelihood(m.log_softmax(m.layer(x[:, 0])), y[:, 0]),
    "functions": lambda m, x, y: F.nll_loss(
        F.log_softmax(x[:, 0] @ m.matrix, -1), y[:, 0], ignore_index=0
    ),
    "a method": lambda m, x, y: F.nll_loss((x[:, 0] @ m.matrix).log_softmax(1), y[:, 0]),
    "the batch's own": _batchwise,
}


@pytest.mark.parametrize("form", LAYERS)
def test_the_layer_is_part_of_the_call(form: str) -> None:
    torch.manual_seed(2)
    fast = same(Parts(LAYERS[form]), BATCHES, steps=form == "a table")
    assert fired(fast)["fuse-cross-entropy"] == 1
    assert len(calls(fast, "linear_cross_entropy")) == 1 and not calls(fast, "cross_entropy")


def _read_elsewhere(m: Parts, x: Tensor, y: Tensor) -> Tensor:
    logits = m.layer(x[:, 0])
    return m.loss(logits, y[:, 0]) + logits.max()


def _written_to(m: Parts, x: Tensor, y: Tensor) -> Tensor:
    logits = m.layer(x[:, 0])
    logits[:, 1] = -1e9
    return m.loss(logits, y[:, 0])


def _scaled_with_bias(m: Parts, x: Tensor, y: Tensor) -> Tensor:
    return m.loss((x[:, 0] @ m.matrix + m.bias) / 0.07, y[:, 0])


def _widened(m: Parts, x: Tensor, y: Tensor) -> Tensor:
    logits = x[:, 0].float() @ m.matrix.float()
    return m.loss(logits / m.heat.unsqueeze(0) + m.bias, y[:, 0])


LOSSES: dict[str, Form] = {
    "wider numbers": _widened,
    "few classes": lambda m, x, y: m.loss(m.few(x[:, 0]), y[:, 0] % 7),
    "read elsewhere": _read_elsewhere,
    "written to": _written_to,
    "a bias, then scaled": _scaled_with_bias,
    "a Linear, scaled": lambda m, x, y: m.loss(m.layer(x[:, 0]) / 0.07, y[:, 0]),
    "no layer": lambda m, x, y: m.loss(torch.tanh(m.layer(x[:, 0])), y[:, 0]),
    "each with its own": lambda m, x, y: m.loss((x[:, :1] * m.table(y)).sum(-1), y[:, 0] % LENGTH),
    "a number a row": lambda m, x, y: m.loss((x[:, 0] @ m.matrix) * x[:, 0, :1], y[:, 0]),
    "turned": lambda m, x, y: m.each(torch.tanh(m.layer(x)).transpose(2, 1), y),
    "likelihood": lambda m, x, y: m.likelihood(m.log_softmax(m.few(x[:, 0])), y[:, 0] % 7),
}


@pytest.mark.parametrize("form", LOSSES)
def test_the_loss_alone(form: str) -> None:
    torch.manual_seed(2)
    fast = same(Parts(LOSSES[form]), BATCHES, steps=False)
    assert fired(fast)["fuse-cross-entropy"] == 1
    assert len(calls(fast, "cross_entropy")) == 1 and not calls(fast, "linear_cross_entropy")


def _softmax_read_twice(m: Parts, x: Tensor, y: Tensor) -> Tensor:
    likely = F.log_softmax(m.few(x[:, 0]), -1)
    return F.nll_loss(likely, y[:, 0] % 7) + likely.exp().max()


OTHERS: dict[str, Form] = {
    "probabilities": lambda m, x, y: m.loss(m.few(x[:, 0]), torch.softmax(m.few(x[:, 1]), -1)),
    "classes in front": lambda m, x, y: m.loss(x, y[:, :1].expand(-1, WIDTH) % LENGTH),
    "one sample": lambda m, x, y: m.loss(m.layer(x[0, 0]), y[0, 0]),
    "over rows": lambda m, x, y: F.nll_loss(F.log_softmax(m.few(x[:, 0]), 0), y[:, 0] % 7),
    "softmax read elsewhere": _softmax_read_twice,
}


@pytest.mark.parametrize("form", OTHERS)
def test_what_is_none_stays(form: str) -> None:
    torch.manual_seed(2)
    fast = same(Parts(OTHERS[form]), BATCHES, steps=False)
    assert "fuse-cross-entropy" not in fired(fast)


def test_weights_of_classes_are_named() -> None:
    torch.manual_seed(2)
    fast = same(Parts(lambda m, x, y: m.weighing(m.layer(x[:, 0]), y[:, 0])), BATCHES, steps=False)
    assert misses(fast, "fuse-cross-entropy") == ["it weighs its classes"]


@pytest.mark.parametrize("deep", [False, True])
def test_a_module_is_read_at_each_call(deep: bool) -> None:
    torch.manual_seed(2)

    def form(m: Parts, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = (
            m.loss(m.layer(x).transpose(1, 2), y) if deep else m.loss(m.layer(x[:, 0]), y[:, 0])
        )
        return found

    model = Parts(form)
    fast = recast.optimize(model, example=BATCHES[0], strict=True)
    assert len(calls(fast, "linear_cross_entropy")) == 1
    for owner in (model, fast):
        owner.loss.reduction, owner.loss.ignore_index, owner.loss.label_smoothing = "none", 0, 0.2
    ours, plain = fast(*BATCHES[1]), model(*BATCHES[1])
    assert ours.shape == plain.shape == ((9, LENGTH) if deep else (9,))
    torch.testing.assert_close(ours, plain)
