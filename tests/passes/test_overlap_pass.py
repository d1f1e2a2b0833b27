"""overlap-lookups: where it moves lookups, where it joins, each Miss; and the resulting order.

The device here has a second stream that is as late as it may be: it runs its work only when it is
joined, so rows that are read too early are garbage.
"""

from __future__ import annotations

import contextlib
import copy
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import emulated_gpu
import models
import pytest
import torch
from passkit import calls, journal, misses, optimized, same
from torch import Tensor, nn

import recast
from recast.passes import REGISTRY
from recast.passes.overlap import OverlapLookups
from recast.rewriter.report import dump
from recast.runtime.gpu import gpu
from recast.runtime.gpu.cuda_launch import Argument, Dims, Kernel

OVERLAP = "default,overlap-lookups{everywhere=true}"
WIDTH = 8


class Model(nn.Module):
    """``forward(ids, dense) = read(self, ids, dense)``: two tables, a bottom and a top network."""

    def __init__(self, read: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read
        self.emb = nn.ModuleList(nn.Embedding(9, WIDTH) for _ in range(2))
        self.bot = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, WIDTH), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(3 * WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))
        self.single = nn.Linear(5, WIDTH)

    def rows(self, ids: Tensor) -> list[Tensor]:
        return [e(ids[:, k]) for k, e in enumerate(self.emb)]

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        return self.read(self, ids, dense)


def batch(rows: int, seed: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 8, (rows, 2), generator=g)
    return ids, torch.randn(rows, 5, generator=g, dtype=torch.float64)


BATCHES = [batch(5, 0), batch(8, 1)]


def dense_first(m: Any, ids: Tensor, dense: Tensor) -> Tensor:
    x = m.bot(dense)
    return m.top(torch.cat([x, *m.rows(ids)], 1))


def rows_first(m: Any, ids: Tensor, dense: Tensor) -> Tensor:
    rows = m.rows(ids)
    x = m.bot(dense)
    return m.top(torch.cat([x, *rows], 1))


def ids_computed(m: Any, ids: Tensor, dense: Tensor) -> Tensor:
    x = m.single(dense)
    return m.top(torch.cat([x, *m.rows((ids + 1) % 9)], 1))


TAKEN = {"dense first": dense_first, "rows first": rows_first, "ids computed": ids_computed}


def place(fast: Any) -> Callable[[str], int]:
    names = [n.name for n in fast.graph.nodes]
    return lambda start: next(k for k, name in enumerate(names) if name.startswith(start))


@pytest.mark.parametrize("form", TAKEN)
def test_lookups_go_first_and_are_joined_before_their_reader(form: str) -> None:
    fast = same(Model(TAKEN[form]), BATCHES, OVERLAP)
    assert not calls(fast, "embedding_bags"), misses(fast, "overlap-lookups")
    (call,), (join,) = calls(fast, "embedding_bags_beside"), calls(fast, "join")
    assert list(call.users) == [join]
    at = place(fast)
    long = at("single" if form == "ids computed" else "mlp")
    assert at("embedding_bags_beside") < long < at("join") < at("cat")
    (said,) = [e.what for e in journal(fast).fired if e.rule == "overlap-lookups"]
    assert said == f"2 lookups beside {'single' if form == 'ids computed' else 'mlp'}"


def no_other_work(m: Any, ids: Tensor, dense: Tensor) -> Tensor:
    return m.top(torch.cat([*m.rows(ids), *m.rows(ids)[:1]], 1))


def work_behind_the_reader(m: Any, ids: Tensor, dense: Tensor) -> Tensor:
    first, second = m.rows(ids)
    rows = first * second
    return m.top(torch.cat([m.bot(dense), rows, rows], 1))


def ids_from_the_work(m: Any, ids: Tensor, dense: Tensor) -> Tensor:
    x = m.bot(dense)
    ids = ids + (x[:, :1] > 0).long() % 2
    return m.top(torch.cat([x, *m.rows(ids)], 1))


def ids_written_meanwhile(m: Any, ids: Tensor, dense: Tensor) -> Tensor:
    rows = m.rows(ids)
    x = m.bot(dense)
    ids.clamp_(max=3)
    return m.top(torch.cat([x, *rows], 1)) + ids.sum()


REFUSED: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], str]] = {
    "no other work": (no_other_work, "no product that could run beside it"),
    "work behind the reader": (work_behind_the_reader, "no product that could run beside it"),
    "ids from the work": (ids_from_the_work, "no product that could run beside it"),
    "ids written meanwhile": (ids_written_meanwhile, "it writes in place"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_every_miss_says_why(form: str) -> None:
    read, why = REFUSED[form]
    model = Model(read)
    model.emb.requires_grad_(form != "ids written meanwhile")  # else torch itself refuses
    fast = same(model, BATCHES, OVERLAP, steps=False)
    assert not calls(fast, "join") and calls(fast, "embedding_bags")
    assert any(why in text for text in misses(fast, "overlap-lookups"))


def test_tables_on_a_cpu_are_left_alone() -> None:
    fast = optimized(Model(dense_first).double(), BATCHES)
    assert not calls(fast, "join") and not misses(fast, "overlap-lookups")


def test_the_dump(golden: Callable[[str, str], None]) -> None:
    model, batches, _ = models.build("dlrm")
    fast = optimized(model, batches, OVERLAP)
    golden("passes/overlap/dlrm.txt", dump.text(fast.graph, fast, "Dlrm"))


def test_it_is_registered() -> None:
    assert REGISTRY["overlap-lookups"] is OverlapLookups


def test_tables_to_be_stored_in_less_are_found_first() -> None:
    model = Model(dense_first).eval()
    batches = [(ids, dense.float()) for ids, dense in BATCHES]
    fast = recast.optimize(model, example=batches, passes=OVERLAP, precision="int8")
    assert calls(fast, "quantised_embedding_bags") and not calls(fast, "embedding_bags_beside")


# ---------------------------------------------------------------- on two streams


@contextlib.contextmanager
def keeping(kept: list[object]) -> Iterator[None]:
    """Keeps copies alive: a stream's memory is not reused before it is joined."""

    def patched(copying: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def copied(*args: Any, **kwargs: Any) -> Tensor:
            made = copying(*args, **kwargs)
            kept.append(made)
            return made

        return copied

    with contextlib.ExitStack() as stack:
        for name in ("contiguous", "reshape", "to"):
            made = patched(getattr(Tensor, name))
            stack.enter_context(mock.patch.object(Tensor, name, made))
        yield


class Late(emulated_gpu.Emulated):
    """A second stream whose launches wait until it is joined, as late as a device could be."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self._waiting: list[Callable[[], None]] = []
        self._kept: list[object] = []  # what the allocator would not give to anyone else
        self._on_second = False

    def launch(
        self, kernel: Kernel, grid: Dims, block: Dims, shared: int, arguments: Sequence[Argument]
    ) -> None:
        run = super().launch
        if not self._on_second:
            self.order.append(kernel.name)
            run(kernel, grid, block, shared, arguments)
            return
        self.order.append(f"beside: {kernel.name}")
        self._waiting.append(lambda: run(kernel, grid, block, shared, arguments))

    def upload(self, words: array[int]) -> Tensor:
        made = super().upload(words)
        if self._on_second:
            self._kept.append(made)
        return made

    @contextlib.contextmanager
    def in_parallel(self, inputs: Iterable[Tensor]) -> Iterator[None]:
        self._kept.extend(inputs)
        self._on_second = True
        self.order.append("fork")
        try:
            with keeping(self._kept):
                yield
        finally:
            self._on_second = False

    def join(self, outputs: Iterable[Tensor]) -> None:
        self.order.append("join")
        for run in self._waiting:
            run()
        self._waiting.clear()
        self._kept.clear()


def interacting(m: Any, ids: Tensor, dense: Tensor) -> Tensor:
    t = torch.stack([m.bot(dense), *m.rows(ids)], 1)
    li, lj = torch.tril_indices(3, 3, -1)
    return torch.bmm(t, t.transpose(1, 2))[:, li, lj]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("read", [interacting, ids_computed])
def test_the_order_on_the_device(read: Callable[..., Tensor], grad: bool) -> None:
    torch.manual_seed(3)
    model = Model(read)
    batches = [(ids, dense.float()) for ids, dense in BATCHES]
    fast = optimized(copy.deepcopy(model), batches, OVERLAP)
    late = Late()
    with gpu.emulate(late), torch.set_grad_enabled(grad):
        out = fast(*batches[1])
        forks = [w for w in late.order if not w.startswith("mlp") and "relu" not in w]
        assert forks[:3] == ["fork", "beside: embedding_forward", "join"], late.order
        assert "dot_forward" not in late.order[: late.order.index("join")]
        wanted = model(*batches[1])
        torch.testing.assert_close(out, wanted)
        if grad:
            up = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
            out.backward(up)
            wanted.backward(up)
    assert not late._waiting, "all that was forked is joined"
    if grad:
        for a, b in zip(fast.parameters(), model.parameters(), strict=True):
            if b.grad is not None:
                assert a.grad is not None
                torch.testing.assert_close(a.grad + 0, b.grad)


def test_rows_that_are_not_joined_are_rubbish() -> None:
    """The device above does detect rows that are read too early."""
    table, ids = torch.randn(9, WIDTH), torch.tensor([[1], [2]])
    none = [None]
    with gpu.emulate(Late()), torch.no_grad():
        rows = torch.ops.recast.embedding_bags_beside(
            [table], [ids], none, none, [0], ["sum"], none, [False], [False]
        )
        rows[0].fill_(float("nan"))
        early = rows[0].clone()
        (late,) = torch.ops.recast.join(rows)
    assert early.isnan().all() and torch.equal(late, table[1:3])


def test_they_are_nothing_to_compilers_and_transforms() -> None:
    table, ids = torch.randn(9, WIDTH, requires_grad=True), torch.tensor([1, 2])
    none = [None]

    def call(ids: Tensor) -> Tensor:
        rows = torch.ops.recast.embedding_bags_beside(
            [table], [ids], none, none, [0], ["none"], none, [False], [False]
        )
        return torch.ops.recast.join(rows)[0] * 2

    torch._dynamo.reset()
    compiled: Any = torch.compile(call, backend="aot_eager", fullgraph=True)
    for made in (call(ids), compiled(ids), torch.vmap(call)(ids[None])[0]):
        assert torch.equal(made, table[ids] * 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(ids).dtype == torch.float32
    with torch.inference_mode():
        assert torch.equal(call(ids), table[ids] * 2)
