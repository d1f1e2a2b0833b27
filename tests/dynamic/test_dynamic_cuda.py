"""``recast.Dynamic`` in the memory of a GPU, on the emulator: lookups, training, recorded steps."""

from __future__ import annotations

import copy
import io
import sys
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
from dynamickit import Model, Stream, Twin, example, train, waiting
from torch import Tensor
from torch.nn import functional as F

import recast
from recast.errors import CheckpointError, InputError, NotBuiltError, UsageError
from recast.runtime import tolerances
from recast.runtime.dynamic.cuda_table import CudaTable, rooms
from recast.runtime.recorded import recording
from recast.runtime.recorded.forward import RecordedForward
from recast.runtime.recorded.training_step import TrainingStep

sys.path.append(str(Path(__file__).parent.parent / "gpu"))
from tape import TapeRecorder

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.2),
    "row-wise-adagrad": lambda p: recast.optim.RowWiseAdagrad(p, lr=0.1),
}
HOW = {
    "user": recast.Dynamic(max_rows=64, seed=5),
    "items": recast.Dynamic(max_rows=64, evict="lru", seed=5),
}


@pytest.fixture
def gpu() -> Any:
    with emulated_gpu.serve() as emulated:
        yield emulated


def made(make: Any = OPTIMIZERS["adagrad"], how: Any = HOW, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(3)
    stream, model = Stream(1), Model()
    opt = make(model.parameters())
    fast, opt = recast.optimize(model, opt, example=example(stream), tables=how, **options)
    return fast, opt, stream


def table(fast: Any, name: str = "user") -> Any:
    found = recast.dynamic.tables(fast)[name]
    assert isinstance(found, CudaTable)
    return found


def twins(fast: Any, make: Any, stream: Stream) -> list[tuple[Any, Any]]:
    """The plain model over ids numbered beforehand, in float32 and as the judge in float64."""
    torch.manual_seed(3)
    model = Model()
    found = []
    for kind in (torch.float32, torch.float64):
        twin = Twin(model, fast, stream).to(kind)
        found.append((twin, make(twin.parameters())))
    return found


def close(got: Tensor, plain: Tensor, judge: Tensor) -> None:
    assert tolerances.excess(got.detach(), plain.detach(), judge.detach()) <= tolerances.CHAIN


def same_as_twins(fast: Any, twins: list[tuple[Any, Any]]) -> None:
    """The dense parameters, and every row that is stored."""
    (plain, _), (judge, _) = twins
    held = dict(fast.named_parameters())
    for (name, p), (_, j) in zip(
        plain.model.named_parameters(), judge.model.named_parameters(), strict=True
    ):
        if name not in ("user.weight", "items.weight"):
            close(held[name], p, j)
    for name in ("user", "items"):
        out = recast.dynamic.export(fast.get_submodule(name))
        assert len(out.ids) > 8
        close(out.rows, plain.rows(name, out.ids), judge.rows(name, out.ids))


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_are_those_of_the_plain_model(name: str, gpu: Any) -> None:
    compare(OPTIMIZERS[name], 50, gpu)


def test_steps_are_those_of_the_plain_model(gpu: Any) -> None:
    compare(OPTIMIZERS["adagrad"], 4, gpu)


def compare(make: Any, steps: int, gpu: Any) -> None:
    fast, opt, stream = made(make)
    both = twins(fast, make, stream)
    batches = [stream.batch(11 if k % 3 else 1) for k in range(steps)]
    gpu.launched.clear()
    got = train(fast, opt, batches)
    assert {"id_probe", "id_insert", "id_advance", "initial_rows"} <= set(gpu.launched)
    wanted = [train(*twin, batches) for twin in both]
    for a, b, c in zip(got, *wanted, strict=True):
        close(a, b, c)
    same_as_twins(fast, both)
    fast.eval(), both[0][0].eval(), both[1][0].eval()
    batch, stored = Stream(1).batch(8), len(table(fast))
    with torch.no_grad():
        close(fast(*batch), both[0][0](*batch), both[1][0](*batch))
    assert len(table(fast)) == stored


@pytest.mark.long
def test_lazy_adam(gpu: Any) -> None:
    """SparseAdam's numbers on the rows, one optimizer for all of the model."""
    torch.manual_seed(3)
    stream = Stream(1)
    model = torch.nn.ModuleDict({"user": torch.nn.Embedding(40, 8)})
    only = torch.nn.Sequential(model["user"])
    opt = torch.optim.Adam(only.parameters(), lr=0.05)
    fast, opt = recast.optimize(
        only, opt, example=[stream.users[:4], stream.users[:6]], sparse_semantics="lazy",
        tables={"0": recast.Dynamic(max_rows=64, seed=5)},
    )  # fmt: skip
    ids = torch.sort(stream.users).values
    first = recast.dynamic.tables(fast)["0"].initial_rows(ids)
    plain = [torch.nn.Embedding.from_pretrained(first.to(d), freeze=False, sparse=True)
             for d in (torch.float32, torch.float64)]  # fmt: skip
    opts = [torch.optim.SparseAdam(p.parameters(), lr=0.05) for p in plain]
    for k in range(8):
        users = stream.batch(9)[0]
        up = torch.randn(9, 8, generator=torch.Generator().manual_seed(k))
        for net, own, x in (
            (fast, opt, users), *((n, o, torch.searchsorted(ids, users))
                                  for n, o in zip(plain, opts, strict=True)),
        ):  # fmt: skip
            own.zero_grad()
            (net(x) * up).sum().backward()
            own.step()
    out = recast.dynamic.export(fast.get_submodule("0"))
    at = torch.searchsorted(ids, out.ids)
    close(out.rows, plain[0].weight[at], plain[1].weight[at])


def test_a_recorded_step_is_replayed(gpu: Any) -> None:
    """New ids wait, are stored, and rows evicted, by replays that run no host code."""
    how = {
        "user": recast.Dynamic(max_rows=10, evict="lru", seed=5),
        "items": recast.Dynamic(max_rows=64, evict="lru", seed=5, admit=recast.MinCount(2)),
    }
    make = OPTIMIZERS["adagrad"]
    data = []
    stream = Stream(1)
    for k in range(6):  # of one form: every sample with two items
        users, items = stream.batch(6)[0], stream.things[torch.randint(30, (12,))]
        label = torch.rand(6, generator=torch.Generator().manual_seed(k)).round()
        data.append(((users, items, torch.arange(0, 12, 2), torch.arange(6)), label))
    loss = F.binary_cross_entropy_with_logits
    eager, eager_opt, _ = made(make, how)
    recorded, recorded_opt, _ = made(make, how)
    recorder = TapeRecorder(recorded_opt)
    step = TrainingStep(recorded, loss, recorded_opt, recorder=recorder, warmup=1)
    for inputs, label in data:
        eager_opt.zero_grad()
        want = loss(eager(*inputs), label)
        want.backward()
        eager_opt.step()
        assert torch.equal(step(inputs, label), want.detach())
    assert (recorder.recordings, recorder.replays) == (1, 4)
    for name in ("user", "items"):
        mine, theirs = (recast.dynamic.export(m.get_submodule(name)) for m in (recorded, eager))
        assert torch.equal(mine.ids, theirs.ids) and torch.equal(mine.rows, theirs.rows)
        assert table(recorded, name).counters() == table(eager, name).counters()
    assert table(eager).counters()["evicted"] > 5
    assert waiting(table(recorded, "items")) == waiting(table(eager, "items")) != {}


def test_a_recording_that_fails_leaves_no_rows_behind(gpu: Any) -> None:
    fast, _, stream = made()
    own = table(fast)
    fast(*stream.batch(3))
    with recording.recording():
        fast(*stream.batch(4))
        assert len(own._fresh) == 2
    assert len(own.take_fresh()) == 3 and len(own.take_fresh()) == 0


@pytest.mark.long
def test_a_full_table_is_told_by_a_replay_too(gpu: Any) -> None:
    fast = torch.nn.Embedding(9, 4)
    opt = torch.optim.SGD(fast.parameters(), lr=0.1)
    net = torch.nn.Sequential(fast)
    ids = torch.arange(40)
    both, opt = recast.optimize(
        net, opt, example=[ids, ids[:7]], tables={"0": recast.Dynamic(max_rows=1)}
    )
    table_ = recast.dynamic.tables(both)["0"]
    step = TrainingStep(
        both, lambda out: out.square().sum(), opt, recorder=TapeRecorder(opt), warmup=1
    )
    for k in range(3):
        step(ids + 40 * k)
    with pytest.raises(UsageError, match=r"new ids found no row: their buckets of 128 rows"):
        for k in range(3, 8):
            step(ids + 40 * k)
    assert len(table_) == 128 and table_.counters()["refused"] > 0


def test_reading_stores_nothing_and_answers_first_values(gpu: Any) -> None:
    fast, opt, stream = made(how={**HOW, "user": recast.Dynamic(max_rows=64, seed=5)})
    train(fast, opt, [stream.batch(9) for _ in range(3)])
    module, own = fast.user, table(fast)
    known, new = own.ids()[:4], torch.tensor([10**12, 10**13])
    mixed = torch.stack([new[0], known[1], known[1], new[1]]).view(2, 2)
    rows = recast.dynamic.export(module)
    stored = rows.rows[torch.searchsorted(rows.ids, known[1])]
    fast.eval()
    out = module(mixed)  # with gradients, in eval mode
    assert torch.equal(out[0, 0], own.initial_rows(new)[0])
    assert torch.equal(out[1, 1], own.initial_rows(new)[1])
    assert torch.equal(out[0, 1], stored) and torch.equal(out[1, 0], stored)
    opt.zero_grad()
    (out * torch.ones(2, 2, 8)).sum().backward()
    opt.step()
    with torch.no_grad():
        after = module(mixed)
    assert torch.equal(after[0, 0], out[0, 0]) and (after[0, 1] != stored).all()
    assert not torch.isin(new, own.ids()).any()


def test_padding_and_bags(gpu: Any) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.EmbeddingBag(9, 4, mode="sum", padding_idx=3))
    opt = torch.optim.Adagrad(net.parameters(), lr=0.1)
    ids = torch.tensor([[3, 10**9, 3], [5, 5, 3], [3, 3, 3]])
    fast, opt = recast.optimize(
        net, opt, example=[ids, ids[:2]], tables={"0": recast.Dynamic(max_rows=20)}
    )
    own = recast.dynamic.tables(fast)["0"]
    first = own.initial_rows(torch.tensor([10**9, 5]))
    out = fast(ids)
    torch.testing.assert_close(out, torch.stack([first[0], 2 * first[1], 0 * first[0]]))
    out.square().sum().backward()
    opt.step()
    assert sorted(own.ids().tolist()) == [5, 10**9]
    assert own.counters()["hits"] + own.counters()["misses"] == 3  # padding is no lookup
    with torch.no_grad():
        assert torch.equal(fast(ids)[2], torch.zeros(4))


def test_eviction_and_ttl(gpu: Any) -> None:
    """The least recently used ids go, and those unused for two steps; a mark records them."""
    fast, opt, stream = made(how={
        "user": recast.Dynamic(max_rows=12, evict="lru", seed=5),
        "items": recast.Dynamic(max_rows=64, evict="lfu", ttl=2, seed=5),
    })  # fmt: skip
    since = recast.dynamic.mark(fast.user)
    batches = [stream.batch(7) for _ in range(8)]
    train(fast, opt, batches[:4])
    before = set(table(fast).ids().tolist())
    recast.dynamic.changed(fast.user, since)
    train(fast, opt, batches[4:])
    now = set(table(fast).ids().tolist())
    assert set(batches[-1][0].tolist()) <= now and len(now) == 12
    assert set(recast.dynamic.changed(fast.user, since).gone.tolist()) == before - now != set()
    recent = torch.cat([b[1] for b in batches[-2:]])
    assert set(table(fast, "items").ids().tolist()) == set(recent.tolist())
    c = table(fast, "items").counters()
    assert c["expired"] > 0 and c["inserted"] > len(recent.unique())
    assert table(fast).erase(torch.tensor([next(iter(now)), 77])) == 1 and len(table(fast)) == 11
    assert "12 of 12 rows" not in str(fast.report) and "lookups hit" in str(fast.report)


@pytest.mark.long
def test_an_evict_function(gpu: Any) -> None:
    how = {**HOW, "user": recast.Dynamic(max_rows=8, evict=lambda ids: ids >> 40, seed=5)}
    fast, opt, stream = made(how=how)
    batches = [stream.batch(5) for _ in range(10)]
    train(fast, opt, batches)
    seen = torch.cat([b[0] for b in batches]).unique()
    kept = torch.sort(seen >> 40).values[-8:]  # one bucket: the best of all
    assert torch.equal(torch.sort(table(fast).ids() >> 40).values, kept)


@pytest.mark.long
def test_checkpoints_between_gpu_and_host(tmp_path: Path) -> None:
    """Saved on a GPU, loaded on the host and back; training goes on alike."""
    with emulated_gpu.serve():
        fast, opt, stream = made()
        train(fast, opt, [stream.batch(7) for _ in range(6)])
        recast.checkpoint.save(tmp_path / "saved", fast, opt)
        model, state = copy.deepcopy((fast.state_dict(), opt.state_dict()))
        again, again_opt, _ = made()
        train(again, again_opt, [Stream(2).batch(9) for _ in range(2)])  # what it had is gone
        recast.checkpoint.load(tmp_path / "saved", again, again_opt)
    host, host_opt, _ = made()
    host.load_state_dict(model), host_opt.load_state_dict(state)
    batches = [stream.batch(9) for _ in range(5)]
    want = train(host, host_opt, batches)
    with emulated_gpu.serve():
        got = train(again, again_opt, batches)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        back, back_opt, _ = made()
        back.load_state_dict(host.state_dict()), back_opt.load_state_dict(host_opt.state_dict())
        mine, theirs = (recast.dynamic.export(m.user) for m in (back, host))
        assert torch.equal(mine.ids, theirs.ids) and torch.equal(mine.rows, theirs.rows)
        sums = [back_opt.state_dict()["state"][0]["sum"], host_opt.state_dict()["state"][0]["sum"]]
        order = [table(back).ids().argsort(), recast.dynamic.tables(host)["user"].ids().argsort()]
        assert torch.equal(sums[0][order[0]], sums[1][order[1]])
        with pytest.raises(RuntimeError, match="an id is there twice"):
            torn = {**model, "user.ids": model["user.ids"][:1].expand(len(model["user.ids"]))}
            back.load_state_dict(torn)
        small, _, _ = made(how={**HOW, "user": recast.Dynamic(max_rows=9, evict="lru")})
        with pytest.raises((RuntimeError, CheckpointError), match="ids for a table of 9 rows"):
            small.load_state_dict(model)


@pytest.mark.long
def test_copies_and_pickles(gpu: Any) -> None:
    fast, opt, stream = made()
    train(fast, opt, [stream.batch(7) for _ in range(4)])
    copied = copy.deepcopy((fast, opt))
    file = io.BytesIO()
    torch.save((fast, opt), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    batches = [stream.batch(9) for _ in range(3)]
    want = train(fast, opt, batches)
    for other in (copied, loaded):
        got = train(*other, batches)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert table(other[0]) is not table(fast)


@pytest.mark.long
def test_a_recorded_forward(gpu: Any) -> None:
    """Reading can be recorded too."""
    fast, _, stream = made()
    fast.eval()
    recorder = TapeRecorder()
    record = RecordedForward(fast, recorder=recorder)
    batches = []
    for k in range(6):
        batch = stream.batch(6)
        batches.append((*batch[:1], stream.things[torch.arange(12) + k], torch.arange(0, 12, 2),
                        batch[3]))  # fmt: skip
    with torch.no_grad():
        for batch in batches:
            got = record(lambda args, kwargs: fast(*args, **kwargs), batch, {})
            assert torch.equal(got, fast(*batch))
    assert recorder.recordings == 1 and recorder.replays > 1


@pytest.mark.long
def test_imports_and_float16(gpu: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Embedding(40, 8)).half()
    fast = recast.optimize(
        net, example=[torch.arange(5), torch.arange(3)],
        tables={"0": recast.Dynamic(max_rows=500, seed=1)},
    )  # fmt: skip
    ids, rows = torch.arange(100) * 10**15, torch.randn(100, 8).half()
    recast.dynamic.import_(fast.get_submodule("0"), ids, rows)
    back = recast.dynamic.export(fast.get_submodule("0"))
    assert torch.equal(back.ids, ids) and torch.equal(back.rows, rows)
    with torch.no_grad():
        assert torch.equal(fast(ids[3:9]), rows[3:9])


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"tiers": [recast.Host("1MiB"), recast.Disk("/nowhere", "9MiB")]}, "user with tiers"),
    ],
)
def test_what_is_not_built(how: Any, why: str, gpu: Any) -> None:
    with pytest.raises(NotBuiltError, match=why):
        made(how={"user": recast.Dynamic(**how)})
    with pytest.raises(NotBuiltError, match="user with rows of float64"):
        recast.optimize(Model().double(), example=example(Stream(1)), tables=HOW)
    with pytest.raises(UsageError, match="less than three rows"):
        made(how={"user": recast.Dynamic(max_bytes=200)})


def test_ids_elsewhere(gpu: Any) -> None:
    fast, _, _ = made()
    with pytest.raises(InputError, match="ids are not on cpu, where the table is"):
        table(fast).find(fast.user.weight, [torch.zeros(3, device="meta")], True)


def test_rooms_of_a_budget() -> None:
    rows, guests = rooms("t", recast.Dynamic(max_bytes=10**9), 100)
    assert (rows + guests + 1) * 125 <= 10**9 < (rows + guests + 3) * 125
    assert rows // 2 - 2 <= guests <= rows // 2 + 2
    assert rooms("t", recast.Dynamic(max_rows=10**6, evict="lru"), 9) == (10**6, 500_000)
    assert rooms("t", recast.Dynamic(max_rows=10**6), 9)[0] > 1.6e6  # none finds its bucket full
