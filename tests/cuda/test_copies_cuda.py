"""copy_tensors.cu and its host code: many tensors to fixed places in one launch."""

from __future__ import annotations

from array import array

import emulated_gpu
import pytest
import torch
from torch import Tensor, nn

from recast.runtime import device
from recast.runtime.gpu import copies
from recast.runtime.recorded.batches.batch import Batch
from recast.runtime.recorded.batches.static_inputs import StaticInputs

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
    """Sources start ``skip`` elements into their memory."""
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


def test_sources_that_stay_where_they_are() -> None:
    with emulated_gpu.serve() as gpu:
        targets = [torch.zeros(shape, dtype=dtype) for shape, dtype in SHAPES]
        sources = [torch.zeros_like(t) for t in targets]
        made = copies.to(targets)
        assert made is not None
        copy = made.from_fixed(sources)
        for seed in range(2):
            for k, ((shape, dtype), source) in enumerate(zip(SHAPES, sources, strict=True)):
                source.copy_(filled(shape, dtype, 10 * seed + k))
            versions = [t._version for t in targets]
            copy()
            assert all(map(same, targets, sources))
            assert [t._version for t in targets] == [v + 1 for v in versions]
        assert gpu.launched == ["copy_tensors"] * 2


def test_a_shorter_source_that_stays_where_it_is() -> None:
    with emulated_gpu.serve():
        target, memory = torch.full((8,), -1.0), torch.arange(8.0)
        made = copies.to([target], ragged=[0])
        assert made is not None
        made.from_fixed([memory[:5]])()
        assert target.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


def test_nothing_to_copy() -> None:
    with emulated_gpu.serve() as gpu:
        made = copies.to([torch.zeros(0, 4)])
        assert made is not None
        made.run([torch.zeros(0, 4)])
        made.from_fixed([torch.zeros(0, 4)])()
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
        room = StaticInputs(Batch(first, here), [None] * 3)
        assert gpu.launched == ["copy_tensors"] and all(map(same, room.tensors, first))
        turned = [torch.rand(3, 4).t(), torch.arange(5) + 1, torch.rand(2).bfloat16()]
        room.fill(Batch(turned, here))
        assert gpu.launched == ["copy_tensors"] and all(map(same, room.tensors, turned))
        negative = [torch._neg_view(torch.rand(4, 3)), *first[1:]]
        room.fill(Batch(negative, here))
        torch.testing.assert_close(room.tensors[0], negative[0].resolve_neg())
        assert float(room.tensors[0].max()) <= 0


def test_a_tensor_of_any_length_leaves_what_lies_behind_it() -> None:
    with emulated_gpu.serve() as gpu:
        long, short = torch.arange(1, 6), torch.arange(11, 14)
        room = StaticInputs(Batch([long, long.float()], torch.device("cpu")), [8, None])
        assert room.tensors[0].tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
        room.fill(Batch([short, -long.float()], torch.device("cpu")))
        assert room.tensors[0].tolist() == [11, 12, 13, 4, 5, 0, 0, 0]
        assert same(room.tensors[1], -long.float()) and gpu.launched == ["copy_tensors"] * 2


def test_the_first_beyond_of_each_stretch_is_known() -> None:
    per = copies.CHUNK // 8
    with emulated_gpu.serve():
        ids, other = torch.arange(3 * per + 5), torch.zeros(4)
        room = [torch.zeros(len(ids), dtype=torch.int32), torch.zeros(4), torch.zeros(7).int()]
        made = copies.to(room, [0, 2])
        assert made is not None
        few = torch.arange(7)
        made.run([ids, other, few])
        assert copies.original_id(room[0], per + 3) == per + 3
        places = [0, per - 1, per, 2 * per + 9, 3 * per + 4]
        values = [2**33, -(2**40), 2**31 - 1, -(2**31), 2**31]
        ids[places], few[6] = torch.tensor(values), 2**50
        ids[2 * per + 200] = 2**45  # not the first of its stretch
        made.run([ids, other, few])
        assert [copies.original_id(room[0], at) for at in places] == [
            values[0],
            copies.LEAST,
            *values[2:],
        ]
        assert copies.original_id(room[0], 2 * per + 200) == copies.MOST
        assert copies.original_id(room[2], 6) == 2**50
        # Of a number that fits nothing that was there before is told.
        ids[0], few[6] = 2**31 - 1, 4
        made.run([ids, other, few])
        assert copies.original_id(room[0], 0) == 2**31 - 1 and copies.original_id(room[2], 6) == 4


@pytest.mark.parametrize("start", [1, 2])
def test_sources_that_lie_anywhere(start: int) -> None:
    room = torch.zeros(1000, dtype=torch.int32)
    with emulated_gpu.serve():
        made = copies.to([room], [0])
        assert made is not None
        ids = (torch.arange(1003) * 2**23)[start : 1000 + start]
        made.run([ids])
        assert torch.equal(room.long(), ids.clamp(copies.LEAST, copies.MOST))
        raw = bytearray(8003)
        odd = torch.frombuffer(raw, dtype=torch.int64, count=1000, offset=3)
        odd.copy_(-ids)
        assert odd.data_ptr() % 8
        made.run([odd])
        assert torch.equal(room.long(), odd.clamp(copies.LEAST, copies.MOST))
        assert copies.original_id(room, 0) == -int(ids[0])


def test_addresses_of_many_tensors_at_once() -> None:
    extension = device.extension()
    if extension is None:
        pytest.skip("there is no extension")
    whole = torch.arange(24.0)
    some = [whole[3:], whole.view(4, 6).t(), nn.Parameter(torch.ones(2)), torch.ones(2).bfloat16()]
    words = array("q", [7] * 8)
    assert extension.put_addresses(some, words, 2)
    assert words[::2].tolist() == [t.data_ptr() for t in some] and set(words[1::2]) == {7}
    assert not extension.put_addresses([whole, whole.as_subclass(Other)], words, 1)
    with pytest.raises(ValueError, match="more tensors than words"):
        extension.put_addresses([*some, whole], words, 2)
    assert extension.put_addresses([], array("q"), 1)
