"""Gradients of what every rank holds: averaged by torch's own ``DistributedDataParallel``.

It is hidden around the call, holds the dense parameters (with the tables that are on every rank)
and none of the spread ones, and starts its bucketed all-reduces while the backward pass goes on.
Parameters that cannot reach an output of the graph are left out: they get no gradient on any rank,
as in one process.

It would wait for its all-reduces in C++, where one that fails cannot say which rank is missing. So
a hook of it issues them, and at the end of the backward pass each is waited for before it does: by
name, so that a rank that died or hangs is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from recast.runtime.ranks import collectives, faults, shards

WHAT = "all_reduce of dense gradients"


class _Call(nn.Module):
    """A call that DistributedDataParallel can be put around."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        for k, parameter in enumerate(parameters):
            self.register_parameter(f"p{k}", parameter)

    def forward(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return call(args, kwargs)


class DenseReduce:
    """Averages over ranks the gradients of the parameters of ``root`` named ``names``."""

    def __init__(self, root: nn.Module, names: Iterable[str]) -> None:
        self.root, self.names = root, tuple(names)
        self.made: tuple[Any, DistributedDataParallel | None] | None = None

    @partial(_disable_dynamo, recursive=False)  # what it calls may be compiled; hooks and waits not
    def __call__(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``call(args, kwargs)``, whose backward reduces."""
        wrapped = self._wrapped()
        if wrapped is None:
            return call(args, kwargs)
        if torch.is_grad_enabled():
            with faults.collective("order of dense gradients"):
                wrapped.reducer._rebuild_buckets()  # once, before the second call: a broadcast
        return wrapped(call, args, kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, gradients add up on each rank and nothing is sent."""
        wrapped = self._wrapped()
        return nullcontext() if wrapped is None else wrapped.no_sync()

    def _wrapped(self) -> DistributedDataParallel | None:
        """Made anew when parameters were exchanged, frozen or thawed: on all ranks alike."""
        held = [self.root.get_parameter(name) for name in self.names]
        key = tuple((id(p), p.requires_grad) for p in held)
        if self.made is None or self.made[0] != key:
            trained = [p for p in held if p.requires_grad]
            wrapped = None
            if trained:
                # It sees no buffers, and so never exchanges any.
                wrapped = DistributedDataParallel(_Call(trained), init_sync=False)
                share = 1.0 / dist.get_world_size()
                # It reads annotations as they are, and ours are text.
                wrapped.register_comm_hook(share, lambda share, bucket: _reduced(share, bucket))
            self.made = key, wrapped
        return self.made[1]

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "names": self.names, "made": None}


def _reduced(share: float, bucket: Any) -> torch.futures.Future[Tensor]:
    """The mean of ``bucket`` over ranks: issued now, done when this backward pass is."""
    buffer = bucket.buffer().mul_(share)
    with faults.collective(WHAT):
        work = dist.all_reduce(buffer, async_op=True)
    # Such calls are made in order, and DistributedDataParallel asks for its own after the last.
    Variable._execution_engine.queue_callback(partial(_wait, work))
    done: torch.futures.Future[Tensor] = work.get_future().then(lambda f: f.value()[0])
    return done


def _wait(work: Any) -> None:
    with faults.collective(WHAT):
        work.wait()


def broadcast(root: nn.Module) -> None:
    """Parameters and buffers of ``root`` become those of rank 0, but parts of tables."""
    all_of_them = (*root.parameters(), *root.buffers())
    held = {id(t): t for t in all_of_them if shards.of(t) is None}
    collectives.broadcast(list(held.values()))
