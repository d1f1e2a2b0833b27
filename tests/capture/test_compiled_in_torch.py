"""A Compiled is trained, cast, compiled and wrapped by torch as the user's model is."""

from __future__ import annotations

import gc
import pickle
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compiledkit import batch, pair, same, twins
from torch import Tensor, nn
from torch.utils import checkpoint

import recast
from recast.errors import RecastWarning, UsageError


def test_training_steps_equal_the_plain_ones() -> None:
    plain, fast = twins()
    optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (plain, fast)]
    for step in range(3):
        for model, optimizer in zip((plain, fast), optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            out = model(*batch(11))
            out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(step)))
            optimizer.step()
    for (n, a), (_, b) in zip(plain.state_dict().items(), fast.state_dict().items(), strict=True):
        torch.testing.assert_close(b, a, msg=n)


def test_autocast() -> None:
    plain, fast = twins()
    plain.eval(), fast.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fast(*batch(5)).dtype is torch.bfloat16
        same(plain, fast)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    plain, fast = twins()
    dense, ids = batch(6)
    got = []
    for model in (plain, fast):
        x = dense.clone().requires_grad_()
        torch.manual_seed(1)
        out = checkpoint.checkpoint(model, x, ids, use_reentrant=reentrant)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
        got.append((out.detach(), x.grad, model.top[0].weight.grad))
    for a, b in zip(*got, strict=True):
        torch.testing.assert_close(b, a)


def test_functional_call_and_vmap_of_gradients() -> None:
    plain, fast = pair()
    plain.eval(), fast.eval()
    changed = {k: v * 2 if v.is_floating_point() else v for k, v in plain.state_dict().items()}
    torch.testing.assert_close(
        torch.func.functional_call(fast, changed, batch(4)),
        torch.func.functional_call(plain, changed, batch(4)),
    )


def test_torch_compile() -> None:
    plain, fast = twins()
    compiled = torch.compile(fast, backend="aot_eager")
    for mode in (False, True):
        plain.train(mode), fast.train(mode)
        for model in (plain, fast):
            model.top[3].p = 0.0
        same(plain, compiled)
        same(plain, compiled, batch(9))
    got = []
    for model in (plain, compiled):
        out = model(*batch(6))
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
    for (n, a), (_, b) in zip(plain.named_parameters(), fast.named_parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=n)
    assert got == []


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")  # torch's own
def test_what_leaves_python_is_the_plain_model() -> None:
    """A trace or an exported program runs where nobody knows our operations."""
    plain, fast = twins()
    plain.eval(), fast.eval()
    traced = torch.jit.trace(fast, batch(5))
    assert "recast::" not in str(traced.inlined_graph)
    exported = torch.export.export(fast, batch(5))
    assert "recast." not in str(exported.graph)
    wanted = plain(*batch(5))
    torch.testing.assert_close(traced(*batch(5)), wanted)
    torch.testing.assert_close(exported.module()(*batch(5)), wanted)
    torch.testing.assert_close(fast(*batch(5)), wanted)


class Shares(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.one = nn.EmbeddingBag(9, 4), nn.Linear(4, 4)
        self.two = self.one

    def forward(self, ids: Tensor) -> Tensor:
        return self.two(self.one(self.emb(ids)).relu())


def test_a_model_with_a_module_of_two_names_is_exported() -> None:
    ids = torch.arange(12).view(4, 3) % 9
    model = Shares().eval()
    fast = recast.optimize(model, example=ids)
    exported = torch.export.export(fast, (ids,))
    assert "recast." not in str(exported.graph)
    torch.testing.assert_close(exported.module()(ids), model(ids))
    torch.testing.assert_close(fast(ids), model(ids))


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("function", [torch.jit.script, torch.fx.symbolic_trace])
def test_what_reads_the_source_of_forward_is_told_of_the_plain_model(function: Any) -> None:
    plain, fast = pair()
    with pytest.raises(UsageError, match="cannot take what optimize returned") as raised:
        function(fast)
    assert f"{function.__name__}(model), the plain model" in raised.value.tries[0]
    assert fast.training == plain.training
    same(plain.eval(), fast.eval())


def test_threads_may_make_the_first_call_of_what_was_loaded() -> None:
    plain, fast = twins()
    plain.eval(), fast.eval()
    saved, wanted, found = pickle.dumps(fast), plain(*batch(6)), []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            loaded = pickle.loads(saved)
            work = partial(lambda model: found.append(model(*batch(6))), loaded)
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(found) == 20
    for output in found:
        torch.testing.assert_close(output, wanted)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        yield
    finally:
        gc.collect()  # else the last to hold the group waits for its threads, with the GIL
        torch.distributed.destroy_process_group()


def test_distributed_data_parallel(alone: None) -> None:
    plain, fast = twins()
    wrapped = nn.parallel.DistributedDataParallel(fast)
    for model in (plain, wrapped):
        torch.manual_seed(0)
        out = model(*batch(6))
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
    for (n, a), (_, b) in zip(plain.named_parameters(), fast.named_parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=n)
    assert list(wrapped.module.state_dict()) == list(plain.state_dict())


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.rows = inner, nn.EmbeddingBag(9, 1)

    def forward(self, *args: Tensor) -> Tensor:
        out: Tensor = self.inner(*args) + self.rows(args[1] % 9).mean()
        return out


def test_what_wraps_a_model_for_ranks_is_not_seen_through(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forward prepares what its backward does, so it has to run."""
    plain, _ = twins()
    within = nn.parallel.DistributedDataParallel(plain)
    with pytest.raises(UsageError, match="is wrapped by DistributedDataParallel already"):
        recast.optimize(within, example=batch(6))
    ran, real = [], nn.parallel.DistributedDataParallel._pre_forward

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(self)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_pre_forward", noted)
    fast = recast.optimize(Around(within), example=batch(6), world_size=1)
    (missed,) = (e for e in fast.report.journal.missed if e.node == "inner")
    why = "DistributedDataParallel prepares the gradients of all ranks in its forward"
    assert missed.why == why
    ran.clear()
    fast(*batch(6)).sum().backward()
    assert len(ran) == 1


class Frozen(nn.Module):
    """Rows of a frozen table beside those of others."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, 4) for _ in range(3))
        self.tables[1].requires_grad_(False)
        self.bag, self.weight = nn.EmbeddingBag(9, 4, mode="sum"), nn.Parameter(torch.rand(6, 3))
        self.bag.requires_grad_(False)

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        rows = [table(ids).tanh() for table in self.tables]
        weight = self.weight[: len(ids)]
        return *rows, self.bag(ids), self.bag(ids, per_sample_weights=weight)


def test_rows_of_frozen_tables_have_no_gradient() -> None:
    """As in the plain model: what is computed of them alone needs no backward."""
    ids = torch.randint(9, (6, 3), generator=torch.Generator().manual_seed(0))
    plain = Frozen()
    fast = recast.optimize(plain, example=[ids, ids[:4]])
    assert "recast.embedding_bags" in str(fast)
    wanted = [out.requires_grad for out in plain(ids)]
    assert wanted == [True, False, True, False, True]
    assert [out.requires_grad for out in fast(ids)] == wanted
    recast.diff(plain, fast, ids, steps=2).check()
    plain.tables[1].requires_grad_(True)
    assert all(out.requires_grad for out in fast(ids)[:3])


def test_functionalize() -> None:
    """Torch refuses our operations there, for their annotations; the plain forward runs."""
    plain = pair()[0].eval()
    fast = recast.optimize(plain, example=batch(16))
    with pytest.warns(RecastWarning, match="functionalize does not take our operations"):
        got = torch.func.functionalize(fast)(*batch(7))
    torch.testing.assert_close(got, plain(*batch(7)))
