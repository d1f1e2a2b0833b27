"""What forward does that no graph may contain, and what is rewritten around it all the same."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from seen_ops import SeenOps
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import recast
from recast.errors import UsageError
from recast.rewriter import memory


def ids(rows: int) -> Tensor:
    return torch.randint(0, 20, (rows, 3), generator=torch.Generator().manual_seed(rows))


class Encoder(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 4)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.table(x)).sum(1)


class AsksInside(nn.Module):
    """Not captured whole; a table of a captured part is also read from outside that part."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(70_000)

    def forward(self, x: Tensor) -> Tensor:
        y = self.encoder(x)
        for _ in range(y.shape[0]):
            pass
        return y * self.encoder.table(x[:, 0])


@pytest.mark.parametrize(
    "again", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_table_of_a_part_is_fused_outside_of_it_too(again: Any) -> None:
    torch.manual_seed(0)
    model = AsksInside()
    plain = copy.deepcopy(model)
    fast = again(recast.optimize(model, example=(ids(8),)))
    assert fast.report.to_dict()["captured"] == "partial"
    with torch.no_grad(), SeenOps() as seen:
        fast(ids(11))
    assert not seen.of_torch("embedding")
    upstream = torch.randn(11, 4, generator=torch.Generator().manual_seed(1))
    for m in (plain, fast):
        m(ids(11)).backward(upstream)
    torch.testing.assert_close(fast(ids(5)), plain(ids(5)))
    ours = dict(fast.named_parameters())
    for name, p in plain.named_parameters():
        torch.testing.assert_close(ours[name].grad.to_dense(), p.grad, msg=name)


class Checkpointed(nn.Module):
    """Runs its layers again in backward: a batch norm then counts twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)
        self.top = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.top, self.table(x).sum(1), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_stays_what_it_is(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Checkpointed(reentrant)
    plain = copy.deepcopy(model)
    fast = recast.optimize(model, example=(ids(8),))
    upstream = torch.randn(11, 4, generator=torch.Generator().manual_seed(1))
    for m in (plain, fast):
        m.train()(ids(11)).backward(upstream)
    theirs = dict(plain.named_buffers())
    assert theirs["top.1.num_batches_tracked"] == 2
    for name, b in fast.named_buffers():
        torch.testing.assert_close(b, theirs[name], msg=name)


class OwnStart(nn.Embedding):
    def __init__(self, rows: int, width: int, scale: float) -> None:
        self.scale = scale
        super().__init__(rows, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, 0, self.scale)


class OwnCheck(nn.Linear):
    def extra_repr(self) -> str:
        return "mine"


def test_a_layer_that_only_starts_or_prints_its_own_way_is_rewritten() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OwnStart(20, 4, 0.1), nn.Flatten(), OwnCheck(12, 4), nn.ReLU())
    report = recast.optimize(model, example=(ids(8),)).report.to_dict()
    assert report["raised"] == []
    assert report["lookups"] == {"found": 1, "fused": 1}


class Counts(nn.Module):
    """Every call depends on the one before, which no graph can express."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.table(x).sum(1) * self.steps


class AsksFirst(Counts):
    def forward(self, x: Tensor) -> Tensor:
        self.known = 2 if hasattr(self, "known") else 1
        return self.table(x).sum(1) * self.known


class CountsInItsLoss(Counts):
    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).sum(1)

    def loss(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.forward(x) * min(1.0, self.steps / 10)


class Trained(nn.Module):
    """Calls a method of a submodule that is no forward, so that it cannot be left as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.model = CountsInItsLoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.model.loss(x)


@pytest.mark.parametrize("kind", [Counts, AsksFirst, Trained])
def test_attributes_that_carry_over_from_call_to_call(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = recast.optimize(model, example=(ids(8),))
        for rows in (8, 5, 3):
            torch.testing.assert_close(fast(ids(rows)), plain(ids(rows)))


class LeavesALength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)
        self.fields = 0

    def forward(self, x: Tensor) -> Tensor:
        self.fields = x.shape[1]
        return self.table(x).sum(1)


def test_constants_that_forward_leaves_behind_are_there_after_each_call() -> None:
    model = LeavesALength()
    fast = recast.optimize(model, example=(ids(8),))
    assert fast.report.to_dict()["captured"] == "whole"
    assert (model.fields, fast.fields) == (0, 0)
    for _ in range(2):
        fast(ids(5))
        assert fast.fields == 3
        fast.fields = 0


class SamePadding(nn.Conv2d):
    """A convolution that pads by the size of its input, like deepctr's."""

    def forward(self, x: Tensor) -> Tensor:
        missing = max(self.kernel_size[0] - 1, 0)
        x = nn.functional.pad(x, [0, 0, missing // 2, missing - missing // 2])
        return nn.functional.conv2d(x, self.weight, self.bias, self.stride, self.padding)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)
        self.conv = SamePadding(1, 3, (2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.table(x).unsqueeze(1)).tanh().sum((1, 2, 3))


def test_a_convolution_that_pads_its_own_way_is_followed() -> None:
    torch.manual_seed(0)
    model = Padded()
    plain = copy.deepcopy(model)
    fast = recast.optimize(model, example=(ids(8),), strict=True)
    assert "multiply-windows" in fast.report.to_dict()["fired"]
    for rows in (8, 5):
        torch.testing.assert_close(fast(ids(rows)), plain(ids(rows)))
        assert list(fast.state_dict()) == list(plain.state_dict())


class Counting(nn.Linear):
    calls = 0  # of the class, until the first call

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (2 if self.calls > 3 else 1)


def test_a_counter_that_begins_in_its_class() -> None:
    plain = nn.Sequential(nn.Embedding(9, 8), Counting(8, 2))
    ids = torch.randint(9, (6,))
    fast = recast.optimize(copy.deepcopy(plain), example=ids)
    for _ in range(6):
        torch.testing.assert_close(fast(ids), plain(ids))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_table_that_is_computed_is_not_computed_by_optimize(kind: Any) -> None:
    """In train mode, each read of its weight is a step of the power method, and writes buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.spectral_norm(kind(20, 4)), nn.Linear(4, 1))
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters())  # its report counts the tables
    fast, _ = recast.optimize(model, optimizer, example=ids(6))
    for name, now in model.state_dict().items():
        torch.testing.assert_close(now, before[name], rtol=0, atol=0)
    memory.hint(fast)  # what an error of memory would say
    for name, now in model.state_dict().items():
        torch.testing.assert_close(now, before[name], rtol=0, atol=0)


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def scripted(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises against it
        made: nn.Module = torch.jit.script(module)
    return made


def traced(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = torch.jit.trace(module, torch.rand(3, 4))
    return made


@pytest.mark.parametrize("made", [scripted, traced])
def test_a_module_of_torchscript_is_one_call(made: Any) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.EmbeddingBag(20, 4), made(Inside()), nn.ReLU(), nn.Linear(4, 2))

    plain, fast = model(), recast.optimize(model(), example=ids(8))
    assert fast.report.captured == "whole"
    assert [e.why for e in fast.report.journal.missed] == ["a TorchScript module"]
    for rows in (8, 5):
        for m in (plain, fast):
            m.zero_grad()
            m(ids(rows)).square().sum().backward()
        torch.testing.assert_close(fast(ids(rows)), plain(ids(rows)))
        for (n, a), (_, b) in zip(fast.named_parameters(), plain.named_parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, msg=n)
    with pytest.raises(UsageError, match="the model is a TorchScript module"):
        recast.optimize(made(Inside()), example=torch.rand(3, 4))
