"""What surrounds a model in practice: trainers, wrappers, the profiler, saving, a time budget.

Each is compared with the plain model in the same surroundings. The library itself is used if it is
installed, otherwise code that calls a model in the same way.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import dlrm
import pytest
import torch
from torch import Tensor, nn

import recast

STEPS = 3
Pair = tuple[nn.Module, torch.optim.Optimizer]
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adagrad(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """It starts from 0.1: from 0, its first step is the sign of a gradient, even of noise."""
    return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1)


def plain(make: Make = adagrad, rows: int = 50, **options: Any) -> tuple[Pair, Any]:
    model, example, _ = dlrm.model(tables=4, rows=rows, dim=8, batch=16, **options)
    return (model, make(model.parameters())), example


def both(**options: Any) -> tuple[Pair, Pair, Any]:
    """A plain model and optimizer, the optimised twins of equal ones, and a batch."""
    one, example = plain(**options)
    (model, optimizer), _ = plain(**options)
    return one, recast.optimize(model, optimizer, example=example), example


def same(plain: nn.Module, fast: nn.Module) -> None:
    ours = dict(fast.named_parameters())
    for name, p in plain.named_parameters():
        far = (ours[name] - p).abs().max()
        assert torch.allclose(ours[name], p, rtol=1e-5, atol=1e-6), f"{name} is {far:.1e} off"


def weighted(out: Tensor) -> Tensor:
    g = torch.Generator().manual_seed(5)
    return (out * torch.randn(out.shape, generator=g)).sum()


def moved(pair: Pair, example: Any, how: Callable[[Pair, Any], None]) -> nn.Module:
    before = copy.deepcopy(pair[0].state_dict())
    how(pair, example)
    after = pair[0].state_dict()
    assert any(not torch.equal(before[k], after[k]) for k in before), "nothing was trained"
    return pair[0]


# ---------------------------------------------------------------- ways of calling


def lightning(pair: Pair, example: Any) -> None:
    """Automatic optimisation: forward, zero_grad and backward all happen inside step(closure)."""
    model, optimizer = pair
    seen = []

    def closure() -> Tensor:
        loss = weighted(model(*example))
        optimizer.zero_grad()
        loss.backward()
        seen.append(loss.detach())
        return loss

    for _ in range(STEPS):
        returned = optimizer.step(closure)
        assert torch.equal(torch.as_tensor(returned).detach(), seen[-1])
    assert len(seen) == STEPS


class Wrapped(torch.optim.Optimizer):
    """As Accelerate wraps an optimizer: a subclass that owns nothing and passes everything on."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        state = optimizer.state_dict()  # it does the same, to move the state to its device
        optimizer.load_state_dict(state)

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)


def accelerate(pair: Pair, example: Any) -> None:
    """prepare(), accumulation over two batches, clipping by norm, the wrapped optimizer."""
    model, optimizer = pair[0], Wrapped(pair[1])
    for _ in range(STEPS):
        for _ in range(2):
            (weighted(model(*example)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def ignite(pair: Pair, example: Any) -> None:
    """zero_grad(set_to_none=False): gradients stay and are overwritten by zero."""
    model, optimizer = pair
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        weighted(model(*example)).backward()
        optimizer.step()


@pytest.mark.parametrize("how", [lightning, accelerate, ignite])
@pytest.mark.parametrize("sparse", [False, True])
def test_way_of_calling(how: Callable[[Pair, Any], None], sparse: bool) -> None:
    if sparse and how is accelerate:
        pytest.skip("torch cannot clip sparse gradients by norm")
    one, two, example = both(sparse=sparse)
    same(moved(one, example, how), moved(two, example, how))


# With an eps that no rounding noise is divided by. SparseAdam takes no dense parameters.
STEPPED: dict[str, Make] = {
    "adagrad": adagrad,
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


@pytest.mark.parametrize("rows", [50, 20_000])
@pytest.mark.parametrize("name", STEPPED)
def test_lightning_with_every_optimizer(name: str, rows: int) -> None:
    """Of small tables, which are stepped whole, and of large ones."""
    one, two, example = both(make=STEPPED[name], rows=rows)
    same(moved(one, example, lightning), moved(two, example, lightning))
    wanted, found = one[1].state_dict(), two[1].state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    torch.testing.assert_close(found["state"], wanted["state"], rtol=1e-4, atol=1e-6)


def test_nested_in_a_trainers_module() -> None:
    """As a LightningModule holds it: a child, moved and switched with its parent."""
    (model, _), example = plain()
    fast = recast.optimize(copy.deepcopy(model), example=example)
    for net in (model, fast):
        holder = nn.ModuleDict({"net": net})
        optimizer = torch.optim.Adagrad(holder.parameters(), lr=0.1, initial_accumulator_value=0.1)
        holder.train().to(torch.float32)
        assert next(iter(holder.state_dict())).startswith("net.emb.0")
        weighted(holder["net"](*example)).backward()
        optimizer.step()
        assert not holder.eval()["net"].training
    same(model, fast)


@pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="lightning is not installed")
@pytest.mark.filterwarnings("default")
def test_lightning_itself(tmp_path: Path) -> None:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self, pair: Pair) -> None:
            super().__init__()
            self.net, self.optimizer = pair

        def training_step(self, batch: Any, index: int) -> Tensor:
            return weighted(self.net(*batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

    def fit(pair: Pair, example: Any) -> None:
        trainer = L.Trainer(
            max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(Module(pair), torch.utils.data.DataLoader([example] * STEPS, batch_size=None))

    one, two, example = both()
    same(moved(one, example, fit), moved(two, example, fit))


@pytest.mark.skipif(
    not importlib.util.find_spec("accelerate"), reason="accelerate is not installed"
)
@pytest.mark.filterwarnings("default")
def test_accelerate_itself() -> None:
    from accelerate import Accelerator

    def fit(pair: Pair, example: Any) -> None:
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(*pair)
        for _ in range(STEPS):
            optimizer.zero_grad()
            accelerator.backward(weighted(model(*example)))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    one, two, example = both()
    same(moved(one, example, fit), moved(two, example, fit))


# ---------------------------------------------------------------- wrappers and tools


def ddp(store: str) -> str:
    """In its own process: DDP around both models on gloo, one rank."""
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:

        def train(pair: Pair, example: Any) -> None:
            wrapped = DistributedDataParallel(pair[0])
            for _ in range(STEPS):
                pair[1].zero_grad()
                weighted(wrapped(*example)).backward()
                pair[1].step()

        one, two, example = both()
        same(moved(one, example, train), moved(two, example, train))
        return "equal"
    finally:
        dist.destroy_process_group()


def in_a_new_process(work: Callable[..., str], *args: Any) -> str:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *args).result(timeout=200)


def test_ddp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert in_a_new_process(ddp, str(tmp_path / "store")) == "equal"


def test_profiler_names_the_fused_ops() -> None:
    _, (fast, optimizer), example = both()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profile:
        weighted(fast(*example)).backward()
        optimizer.step()
    names = {event.key for event in profile.key_averages()}
    assert {"recast::embedding_bags", "recast::dot_interaction", "recast::mlp"} <= names
    assert not {n for n in names if "aten::embedding_bag" in n}


def reload(saved: str, inputs: str) -> str:
    """In a process that has only the class of the model: outputs of the reloaded model."""
    fast = torch.load(saved, weights_only=False)
    example = torch.load(inputs, weights_only=True)
    assert fast.report.to_dict()["captured"] == "whole"
    assert "embedding_bags" in str(fast)
    return repr(fast(*example).tolist())


def test_save_and_reload_in_another_process(tmp_path: Path) -> None:
    _, (fast, _), example = both()
    torch.save(fast, tmp_path / "fast.pt")
    torch.save(list(example), tmp_path / "example.pt")
    said = in_a_new_process(reload, str(tmp_path / "fast.pt"), str(tmp_path / "example.pt"))
    there = torch.tensor(eval(said))  # numbers that the function above wrote
    torch.testing.assert_close(there, fast(*example).detach(), rtol=1e-5, atol=1e-6)


def test_training_goes_on_after_reload() -> None:
    """Model and optimizer saved together, as objects: training goes on the same."""
    one, two, example = both()
    lightning(one, example)
    lightning(two, example)
    held = io.BytesIO()
    torch.save(two, held)
    held.seek(0)
    again: Pair = torch.load(held, weights_only=False)
    assert again[0] is not two[0]
    lightning(one, example)
    same(one[0], moved(again, example, lightning))


def test_checkpoint_crosses_over() -> None:
    """state_dicts of model and optimizer load into the plain ones; training goes on."""
    one, two, example = both()
    lightning(two, example)
    one[0].load_state_dict(two[0].state_dict())
    one[1].load_state_dict(copy.deepcopy(two[1].state_dict()))  # or torch shares the tensors
    same(moved(one, example, lightning), moved(two, example, lightning))
    assert list(one[0].state_dict()) == list(two[0].state_dict())


# ---------------------------------------------------------------- the canonical model


@pytest.mark.parametrize("sparse", [False, True])
def test_canonical_dlrm(sparse: bool) -> None:
    """All 26 bags in one call, the interaction in one, both MLPs in one each."""
    model, example, _ = dlrm.model(sparse=sparse)
    fast = recast.optimize(model, example=example)
    report = fast.report.to_dict()
    assert report["captured"] == "whole" and not report["raised"]
    assert report["lookups"] == {"found": 26, "fused": 26}
    calls = [str(n.target) for n in fast.graph.nodes if n.op == "call_function"]
    count = {name: calls.count(f"recast.{name}.default") for name in ("embedding_bags", "mlp")}
    assert count == {"embedding_bags": 1, "mlp": 2}
    assert calls.count("recast.dot_interaction.default") == 1


@pytest.mark.parametrize(("tables", "seconds"), [(26, 5.0), (200, 20.0)])
def test_time_budget(tables: int, seconds: float) -> None:
    """optimize() takes seconds, in processor time: other work on this machine does not count."""
    model, example, _ = dlrm.model(tables=tables, rows=20, batch=8)
    start = time.process_time()
    fast = recast.optimize(model, example=example)
    assert time.process_time() - start < seconds
    assert fast.report.to_dict()["lookups"] == {"found": tables, "fused": tables}
    assert set(fast.report.seconds) >= {"capture", "passes", "total"}, "it says where they went"


def test_import_is_light() -> None:
    """Importing torch's compiler alone would take a second and a half."""
    heavy = "('torch._dynamo', 'pygraphviz')"
    code = f"import sys, recast; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
