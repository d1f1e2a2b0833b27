"""copy_tensors.cu and its host code: many tensors to fixed places, byte for byte, in one launch."""

from __future__ import annotations

import emulated_gpu
import pytest
import torch
from torch import Tensor

from recast.runtime import device
from recast.runtime.gpu import copies
from recast.runtime.recorded.batch import Batch, Room

BYTES = torch.uint8


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    size = torch.empty(shape, dtype=dtype).numel() * torch.empty((), dtype=dtype).element_size()
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=g).bool()
    return torch.randint(256, (size,), generator=g, dtype=BYTES).view(dtype).reshape(shape)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(BYTES), b.contiguous().view(-1).view(BYTES))


SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((7, 3), torch.int64), ((0,), torch.int64), ((copies.CHUNK // 4 + 5,), torch.int32),
    ((3,), torch.bfloat16), ((13,), torch.bool), ((), torch.float32), ((5, 4), torch.complex64),
    ((copies.CHUNK,), BYTES), ((129,), torch.float16), ((2, 2), torch.float64),
]  # fmt: skip


@pytest.mark.parametrize("skip", [0, 1, 2, 4], ids=lambda n: f"{n}-further")
def test_every_dtype_and_alignment(skip: int) -> None:
    """Sources lie ``skip`` elements further than memory begins."""
    with emulated_gpu.serve() as gpu:
        targets = [torch.zeros(shape, dtype=dtype) for shape, dtype in SHAPES]
        made = copies.to(targets)
        assert made is not None
        for seed in range(2):
            sources = []
            for k, (shape, dtype) in enumerate(SHAPES):
                one = filled(shape, dtype, 10 * seed + k)
                room = torch.zeros(one.numel() + skip, dtype=dtype)
                sources.append(room[skip:].view(shape).copy_(one))
            assert made.takes(sources)
            versions = [t._version for t in targets]
            made.run(sources)
            assert all(map(same, targets, sources))
            assert [t._version for t in targets] == [v + 1 for v in versions]
        assert gpu.launched == ["copy_tensors"] * 2


def test_nothing_to_copy() -> None:
    with emulated_gpu.serve() as gpu:
        made = copies.to([torch.zeros(0, 4)])
        assert made is not None
        made.run([torch.zeros(0, 4)])
        assert gpu.launched == [] and copies.to([]) is None


class Other(Tensor):
    """A subclass, whose memory may be anything."""


def test_what_is_left_to_torch() -> None:
    targets = [torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64)]
    ids = torch.arange(2)
    assert copies.to(targets) is None, "there is no GPU"
    with emulated_gpu.serve():
        assert copies.to([targets[0].t()]) is None
        made = copies.to(targets)
        assert made is not None and made.takes([torch.ones(4, 3), ids])
        wrong = [
            torch.ones(3, 4).t(), torch.ones(4, 3, device="meta"), torch.ones(4, 3).to_sparse(),
            torch._neg_view(torch.ones(4, 3)), torch.ones(4, 3).as_subclass(Other),
        ]  # fmt: skip
        for one in wrong:
            assert not made.takes([one, ids]), one
        with device.use("torch"):
            assert copies.to(targets) is None


def test_a_room_is_filled_in_one_launch_or_by_torch() -> None:
    here = torch.device("cpu")
    with emulated_gpu.serve() as gpu:
        first = [torch.rand(4, 3), torch.arange(5), torch.rand(2).bfloat16()]
        room = Room(Batch(first, here), [None] * 3)
        assert gpu.launched == ["copy_tensors"] and all(map(same, room.tensors, first))
        turned = [torch.rand(3, 4).t(), torch.arange(5) + 1, torch.rand(2).bfloat16()]
        room.fill(Batch(turned, here))
        assert gpu.launched == ["copy_tensors"] and all(map(same, room.tensors, turned))
        negative = [torch._neg_view(torch.rand(4, 3)), *first[1:]]
        room.fill(Batch(negative, here))
        torch.testing.assert_close(room.tensors[0], negative[0].resolve_neg())
        assert float(room.tensors[0].max()) <= 0
        Room(Batch([torch.arange(3)], here), [8])  # of a length that changes
        assert gpu.launched == ["copy_tensors"]
