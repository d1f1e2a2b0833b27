"""A parameter written to between a replayed forward and its backward: refused if the backward reads
it, and only then, as in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import emulated_gpu
import pytest
import torch
from tape import Pairs, TapeRecorder
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import recast
from recast.runtime.recorded.forward import RecordedForward
from recast.runtime.recorded.state.saved_parameters import SavedParameters

MODIFIED = "modified by an inplace operation"


class Looked(nn.Module):
    """Lookups into a small network with all kinds of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(20, 6, mode="sum")
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.PReLU(), nn.LayerNorm(5),
            nn.Linear(5, 2),
        )  # fmt: skip
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.net(self.bags(ids)) * self.scale
        return made


def ids(seed: int = 0) -> Tensor:
    return torch.randint(20, (7, 3), generator=torch.Generator().manual_seed(seed))


def dense() -> tuple[nn.Module, Tensor]:
    """Its input needs no gradient."""
    net = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.Linear(5, 1)
    )
    return net, torch.randn(7, 4)


def frozen() -> tuple[nn.Module, Tensor]:
    """A weight that gets no gradient but passes one on; and one with nothing trained before it."""
    net, x = dense()
    for layer in (0, 3):
        net[layer].requires_grad_(False)  # type: ignore[index]
    net[0].bias.requires_grad_()  # type: ignore[index]
    return net, x


def tied() -> tuple[nn.Module, Tensor]:
    """One weight in two layers, and a view of one."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.a(self.a(x)) @ self.b.weight[1:].t()
            return made

    return Tied(), torch.randn(7, 4)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "looked up": lambda: (Looked(), ids()), "dense": dense, "frozen": frozen, "tied": tied,
}  # fmt: skip


def refused(call: Callable[[], object], loss: Callable[[], Tensor], written: Tensor) -> bool:
    """Whether autograd refuses a backward before which ``written`` is written to."""
    made = loss()
    with torch.no_grad():
        written.mul_(1.0)
    try:
        made.backward()
    except RuntimeError as error:
        assert MODIFIED in str(error)
        return True
    finally:
        call()
    return False


@pytest.mark.parametrize("cast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_parameters_as_autograd_s(name: str, cast: bool) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]()

    def out() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            found: Tensor = model(x)
        return found

    wanted = [p for p in model.parameters()
              if refused(model.zero_grad, lambda: out().float().sum(), p)]  # fmt: skip
    found = SavedParameters([out()], model.parameters()).parameters
    assert [id(p) for p in found] == [id(p) for p in wanted]
    assert cast or 0 < len(found) < len([*model.parameters()])


def test_what_hooks_save_is_not_computed_again() -> None:
    """As checkpoints do: while a recording is made, memory holds nothing yet."""
    computed = []
    net, x = dense()
    net[0].register_forward_hook(lambda *given: computed.append(given))  # type: ignore[index]
    last = nn.Linear(1, 1)
    out = last(checkpoint(net, x.requires_grad_(), use_reentrant=False))
    found = SavedParameters([out], [*net.parameters(), *last.parameters()])
    assert [id(p) for p in found.parameters] == [id(last.weight)] and len(computed) == 1
    found.begin()
    out.sum().backward()
    assert len(computed) == 2 and net[0].weight.grad is not None  # type: ignore[index]
    found.check()


def recorded(model: nn.Module, example: Any) -> tuple[Any, TapeRecorder]:
    """The optimised model under mode="graph", past its first calls."""
    fast, training = recast.optimize(model, example=example), Pairs()
    vars(fast)["_replays"] = RecordedForward(fast, TapeRecorder(), training)
    for k in range(6):
        fast(ids(k)).sum().backward()
        model.zero_grad()
    assert training.recordings == 2 and training.replays
    return fast, training


def test_a_replayed_backward_is_refused_as_a_plain_one() -> None:
    """For the same parameters; of all others the gradients are those of plain torch; and the next
    step goes on.
    """
    torch.manual_seed(0)
    plain = Looked()
    wanted = [n for n, p in plain.named_parameters()
              if refused(plain.zero_grad, lambda: plain(ids()).sum(), p)]  # fmt: skip
    with emulated_gpu.serve():
        twin = Looked()
        twin.load_state_dict(plain.state_dict())
        fast, training = recorded(twin, (ids(),))
        found, upstream = [], torch.randn(7, 2)
        for name, parameter in twin.named_parameters():
            before = training.replays
            loss = fast(ids(9)).sum()
            with torch.no_grad():
                parameter.mul_(1.0)
            try:
                loss.backward()
            except RuntimeError as error:
                assert MODIFIED in str(error)
                found.append(name)
            assert training.replays == before + (1 if name in found else 2)
            del loss
            twin.zero_grad()
            fast(ids(8)).backward(upstream)
            gradients = [p.grad for p in twin.parameters()]
            twin.zero_grad()
            plain.load_state_dict(twin.state_dict())
            plain(ids(8)).backward(upstream)
            for a, p in zip(gradients, plain.parameters(), strict=True):
                torch.testing.assert_close(a + 0, p.grad)
            plain.zero_grad()
    assert found == wanted
