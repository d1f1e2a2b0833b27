"""Big buffers are reused when no tensor uses their memory any more, and never before."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import recast
from recast.runtime import kept_memory
from recast.runtime.interactions.dot_interaction import dot_interaction

SHAPE = (512, 27, 64)  # 3.4 MiB


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    kept_memory.clear()
    yield
    kept_memory.clear()


def made(shape: tuple[int, ...] = SHAPE) -> Tensor:
    return kept_memory.empty(shape, torch.float32)


def test_memory_comes_again() -> None:
    first = made()
    assert first.shape == SHAPE and first.is_contiguous() and first._base is None
    place = first.data_ptr()
    del first
    again = made((27, 512 * 64))  # as many bytes
    assert again.data_ptr() == place
    assert again.shape == (27, 512 * 64) and again.is_contiguous() and not again.requires_grad


@pytest.mark.parametrize("hold", ["view", "detached", "numpy", "saved", "tensor", "storage"])
def test_memory_in_use_does_not_come_again(hold: str) -> None:
    first = made().fill_(1.0)
    place, held = first.data_ptr(), None
    if hold == "view":
        held = first[3]
    elif hold == "detached":
        held = first.detach()
    elif hold == "numpy":
        held = first.numpy()
    elif hold == "saved":
        held = torch.ones(SHAPE, requires_grad=True) * first
    elif hold == "storage":
        held = first.untyped_storage()
    else:
        held = torch.empty(0).set_(first.untyped_storage(), 0, (1,), (1,))
    del first
    assert made().data_ptr() != place
    del held
    assert {made().data_ptr() for _ in range(3)} <= {k.room.data_ptr() for k in kept_memory._kept}


def test_memory_of_several_processes_does_not_come_again() -> None:
    first = made()
    first.share_memory_()
    place = first.data_ptr()
    del first
    assert made().data_ptr() != place


def test_what_is_kept_has_a_limit() -> None:
    for k in range(40):
        made((4 << 20, 1 + k % 3)).fill_(0.0)
    assert sum(k.room.nbytes for k in kept_memory._kept) <= kept_memory.MOST
    made((kept_memory.MOST // 4 + 1,))
    assert all(k.room.nbytes <= kept_memory.MOST // 4 for k in kept_memory._kept)
    kept_memory.clear()
    made((kept_memory.LEAST // 4 - 1,))
    assert not kept_memory._kept


def test_threads_never_share_a_buffer() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(150):
            mine = made((512, 1024)).fill_(number)
            if not bool((mine == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_it_goes_with_the_model_that_it_served() -> None:
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(9, 4), torch.nn.Linear(4, 1))
    fast = recast.optimize(model, example=torch.zeros(3, 2, dtype=torch.long))
    made()
    assert kept_memory._kept
    del fast
    gc.collect()
    assert not kept_memory._kept


def test_two_forwards_before_two_backwards() -> None:
    """Outputs, saved tensors and gradients that the user keeps stay as they were."""
    li, lj = torch.tril_indices(27, 27, -1)
    torch.manual_seed(0)
    given = [[torch.randn(512, 64, requires_grad=True) for _ in range(27)] for _ in range(3)]
    upstream = [torch.randn(512, len(li)) for _ in given]
    outs = [dot_interaction.target(f, None, li, lj, 0) for f in given]
    grads = []
    for features, out, g in zip(given, outs, upstream, strict=True):
        grads.append(torch.autograd.grad(out, features, g, retain_graph=True))
        torch.autograd.grad(out, features, g)  # into memory that the first still holds
    for features, out, g, found in zip(given, outs, upstream, grads, strict=True):
        plain = [f.detach().double().requires_grad_() for f in features]
        z = torch.stack(plain, 1)
        want = torch.bmm(z, z.transpose(1, 2))[:, li, lj]
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)
        for ours, truth in zip(found, torch.autograd.grad(want, plain, g.double()), strict=True):
            torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-4)
