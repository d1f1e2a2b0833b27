"""What a training step costs the host, with a device that does nothing: launches are prepared and
not made, replays launch nothing.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import addressof, c_void_p
from typing import Any, TypeVar

import torch
from mlperf_dlrm import DLRM
from mlperf_dlrm import ROWS as SIZES
from torch import Tensor, nn

import recast
from gpu.bench import synthetic_models
from gpu.bench.variants import LOSS
from recast.runtime.gpu import gpu
from recast.runtime.gpu.cuda_launch import Argument, Dims, Kernel
from recast.runtime.recorded.forward import RecordedForward
from recast.runtime.recorded.training_step import TrainingStep

T = TypeVar("T")
ROWS, BATCH = 60, 8
WAYS = ("default", "graph", "step")


class Idle:
    """A GPU that packs the parameters of a launch as the driver wants them, and drops them."""

    device = torch.device("cpu")
    multiprocessors = 132

    def __init__(self) -> None:
        self.launches = 0

    def launch(
        self, kernel: Kernel, grid: Dims, block: Dims, shared: int, arguments: Sequence[Argument]
    ) -> None:
        self.launches += 1
        (c_void_p * len(arguments))(*map(addressof, arguments))

    def warm(self, kernel: Kernel) -> None:
        pass

    def upload(self, words: array[int]) -> Tensor:
        made = torch.empty(len(words), dtype=torch.int64)
        made.numpy()[:] = words
        return made

    def counters(self, n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.int64)

    def in_parallel(self, inputs: Iterable[Tensor]) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self, outputs: Iterable[Tensor]) -> None:
        pass

    def from_start(self) -> AbstractContextManager[None]:
        return nullcontext()


class IdleAside:
    """Does nothing beside others."""

    def start(self) -> None:
        pass

    def join(self) -> None:
        pass


class IdleRecorder:
    """Records by running once; a replay does nothing."""

    def eagerly(self, run: Callable[[], T]) -> T:
        return run()

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        return run(), lambda: None

    def record_parallel(self, run: Callable[[], T]) -> tuple[T, IdleAside]:
        return run(), IdleAside()

    def drain(self) -> None:
        pass

    def free(self) -> None:
        pass


@contextmanager
def idle() -> Iterator[Idle]:
    """Let an idle GPU serve tensors of the CPU."""
    device = Idle()
    with gpu.emulate(device):
        yield device


# ---------------------------------------------------------------- the models


Model = tuple[nn.Module, torch.optim.Optimizer, Any, Tensor]  # inputs and labels


def tiny() -> Model:
    """Synthetic Tiny: 55 tables, 58 lookups, Adagrad."""
    config = synthetic_models.TINY.scaled(ROWS)
    torch.manual_seed(0)
    model = synthetic_models.Synthetic(config)
    inputs, labels = synthetic_models.batch(
        config, BATCH, 0, torch.device("cpu"), alpha=1.05, shuffle=True
    )
    optimizer = torch.optim.Adagrad(
        model.parameters(), lr=0.001, initial_accumulator_value=0.1, eps=1e-7
    )
    return model, optimizer, inputs, labels


def dlrm() -> Model:
    """MLPerf's DLRM: 26 tables, SGD."""
    torch.manual_seed(0)
    sizes = [min(n, ROWS) for n in SIZES]
    model = DLRM(sizes, (16, 16, 8), (16, 16, 16, 16, 1))
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(n, (BATCH,), generator=g) for n in sizes]
    inputs = torch.rand(BATCH, 13, generator=g), ids, [torch.arange(BATCH)] * len(sizes)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), inputs, torch.ones(BATCH)


MODELS: dict[str, Callable[[], Model]] = {"tiny": tiny, "dlrm": dlrm}


def step_of(make: Callable[[], Model], way: str) -> Callable[[], object]:
    """One step of training, of the way ``way`` of running it, to be called inside :func:`idle`.

    It is made outside, where the rewritten graph can be seen to compute the same.
    """
    model, optimizer, inputs, labels = make()
    fast, optimizer = recast.optimize(model, optimizer, example=inputs)
    if way == "step":
        recorded = TrainingStep(fast, LOSS, optimizer, recorder=IdleRecorder())
        return lambda: recorded(inputs, labels)
    if way == "graph":
        vars(fast)["_replays"] = RecordedForward(fast, IdleRecorder(), IdleRecorder())

    def step() -> None:
        loss = LOSS(fast(*inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# ---------------------------------------------------------------- the command


def milliseconds(step: Callable[[], object], rounds: int, steps: int) -> float:
    """CPU time of one step: the least of ``rounds``, as others on the machine only add to it."""
    found = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(steps):
            step()
        found.append((time.thread_time() - start) / steps * 1e3)
    return min(found)


def main(about: str) -> int:
    """``about``: what the command is for, in its first line."""
    p = argparse.ArgumentParser(description=about.splitlines()[0])
    p.add_argument("--models", nargs="*", choices=MODELS, default=[*MODELS])
    p.add_argument("--profile", choices=WAYS, help="print where the time of one way goes")
    p.add_argument("--rounds", type=int, default=30)
    p.add_argument("--steps", type=int, default=5)
    o = p.parse_args()
    torch.set_num_threads(1)
    for name in o.models:
        for way in (o.profile,) if o.profile else WAYS:
            step = step_of(MODELS[name], way)
            with idle() as device:
                for _ in range(8):
                    step()
                if o.profile:
                    _profile(step)
                    continue
                before = device.launches
                step()
                launches = device.launches - before
                took = milliseconds(step, o.rounds, o.steps)
            print(f"{name:5} {way:8} {took:7.3f} ms a step, {launches} launches")
    return 0


def _profile(step: Callable[[], object]) -> None:
    # One thread does it all, so that backward is seen as well.
    with torch.autograd.set_multithreading_enabled(False):
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(50):
            step()
        profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(60)
