"""The disk under a table fails: named errors, and nothing that was stored is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dynamickit import train
from test_tiers import made

import recast
from recast.errors import NotBuiltError, TierError, UsageError
from recast.runtime.tiers.store import Store, rows_in

SIZE, BUFFER = 256, 1 << 16


def store(path: Path, budget: int = 4 << 20) -> Store:
    return Store(path, "emb", SIZE, budget, BUFFER)


def some(ids: Any, mark: int = 0) -> tuple[Any, Any]:
    """Records that contain their own ids."""
    ids = np.asarray(ids, np.int64)
    records = np.zeros((len(ids), SIZE), np.uint8)
    records[:, :8] = ids.view(np.uint8).reshape(-1, 8)
    records[:, 8] = mark
    return ids, records


def holds(one: Store, ids: Any, mark: int = 0) -> bool:
    want_ids, want = some(ids, mark)
    found, got = one.read(want_ids)
    return bool(found.all()) and bool((got == want).all())


def test_what_is_written_is_read_whether_ahead_or_not(tmp_path: Path) -> None:
    one = store(tmp_path / "t")
    one.write(*some(range(1000)))
    one.ahead(np.arange(500, 1500))
    one.write(*some(range(900, 950), mark=1))  # what was read ahead of these is of no use now
    one.delete(np.arange(950, 960))
    found, _ = one.read(np.arange(2000))
    assert found.tolist() == [k < 1000 and not 950 <= k < 960 for k in range(2000)]
    assert holds(one, range(900)) and holds(one, range(900, 950), mark=1)
    assert one.traffic.ahead >= 450
    ids = np.concatenate([ids for ids, _ in one.scan()])
    assert sorted(ids.tolist()) == [k for k in range(1000) if not 950 <= k < 960]
    one.close()
    assert not (tmp_path / "t").exists()


def test_files_stay_within_their_budget(tmp_path: Path) -> None:
    """Two hundred thousand writes of two thousand rows: what was replaced is compacted away."""
    budget = 1 << 20
    rows = rows_in(budget, SIZE)
    one, largest, random = store(tmp_path, budget), 0, np.random.default_rng(0)
    for turn in range(125):
        ids = np.sort(random.choice(rows, rows * 3 // 4, replace=False))
        one.write(*some(ids, turn))
        one.settle()
        largest = max(largest, one.files())
        if turn % 25 == 24:
            one.compact()
            assert one.files() < budget
    written = one.traffic.written * SIZE
    assert written > 40 * budget
    # A compaction writes its result before it removes what it read: of so few files, all of them.
    assert largest <= 2 * budget, largest
    one.compact()
    assert one.files() < rows * (SIZE + 24) + 200_000  # and what RocksDB says of itself
    assert holds(one, ids, turn)
    one.close()


def test_folders_that_are_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("ten years")
    with pytest.raises(UsageError, match=r"holds thesis\.tex") as caught:
        store(tmp_path)
    assert "these files are of no tier" in str(caught.value)
    assert (tmp_path / "thesis.tex").read_text() == "ten years"
    rows = tmp_path / "other" / "rows"
    rows.mkdir(parents=True)
    (rows / "CURRENT").write_text("a database of somebody else")
    with pytest.raises(UsageError, match="these files are of no tier"):
        store(tmp_path / "other")
    assert (rows / "CURRENT").exists()
    with pytest.raises(UsageError, match="which is no folder"):
        store(tmp_path / "thesis.tex")
    with pytest.raises(UsageError, match=r"thesis\.tex is no folder"):
        store(tmp_path / "thesis.tex" / "below")


def test_a_folder_in_use_and_one_that_was_left(tmp_path: Path) -> None:
    one = store(tmp_path)
    one.write(*some(range(50)))
    with pytest.raises(UsageError, match="another table uses it"):
        store(tmp_path)
    assert holds(one, range(50))
    left = tmp_path.with_name("left")
    shutil.copytree(tmp_path, left)  # what is there when the process dies
    one.close()
    two = store(left)
    found, _ = two.read(np.arange(50))
    assert not found.any()  # of no use to another process, and gone
    two.close()


def test_a_folder_that_is_read_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    nobody, me = 65534, os.geteuid()
    if me == 0:
        os.seteuid(nobody)
    else:
        tmp_path.chmod(0o555)
    try:
        with pytest.raises(TierError, match="cannot be written to"):
            store(tmp_path / "t")
        with pytest.raises(TierError, match="cannot be written to"):
            store(tmp_path)
    finally:
        os.seteuid(me)
        tmp_path.chmod(0o755)


def test_a_full_disk_keeps_what_it_could_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table says so at its next use, holds all rows, and goes on when there is room again."""
    fast, opt, stream = made(tmp_path / "a")
    plain, plain_opt, _ = made(None)
    batches = [stream.batch(60) for _ in range(30)]
    train(fast, opt, batches[:10]), train(plain, plain_opt, batches[:10])
    real, done = os.statvfs, 10
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096) + (0,) * 8))
    with pytest.raises(TierError, match="is full") as caught:
        for k in range(10, 30):
            train(fast, opt, [batches[k]])
            train(plain, plain_opt, [batches[k]])
            done = k + 1
    assert "rows are all still there" in str(caught.value) and done < 29
    for name in ("user", "items"):
        mine, theirs = (recast.dynamic.export(m.get_submodule(name)) for m in (fast, plain))
        there = torch.isin(mine.ids, theirs.ids)  # a batch that failed may have begun its rows
        assert int(there.sum()) == len(theirs.ids) and torch.equal(mine.rows[there], theirs.rows)
    monkeypatch.setattr(os, "statvfs", real)
    got, want = train(fast, opt, batches[done:]), train(plain, plain_opt, batches[done:])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    one = store(tmp_path)
    one.write(*some(range(5000)))
    one.compact()
    tables = sorted((tmp_path / "rows").glob("*.sst"), key=lambda p: p.stat().st_size)
    raw = bytearray(tables[-1].read_bytes())
    raw[len(raw) // 3] ^= 0xFF
    tables[-1].write_bytes(bytes(raw))
    with pytest.raises(TierError, match="damaged") as caught:
        holds(one, range(5000))
    assert "checksum" in str(caught.value) and "recast.checkpoint.load" in str(caught.value)
    os.truncate(tables[-1], len(raw) // 4)
    with pytest.raises(TierError, match="damaged"):
        list(one.scan())
    one.close()


LIMITED = """
import json, resource, sys
import numpy as np
from recast.errors import TierError
sys.path.insert(0, {tests!r})
from test_tier_files import some, store
from pathlib import Path
one = store(Path({path!r}), 64 << 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # files larger than that fail
done, told = 0, ""
try:
    for turn in range(200):
        one.write(*some(range(1000 * turn, 1000 * turn + 1000)))
        done = turn + 1
        one.settle()
except TierError as error:
    told = str(error)
ids = np.concatenate([ids for ids, _ in one.scan()])
print(json.dumps([done, told, sorted(ids.tolist()) == list(range(1000 * done))]))
"""


def test_writes_that_the_system_refuses(tmp_path: Path) -> None:
    """A real error of the file system under RocksDB: named, and every row is still to be read."""
    code = LIMITED.format(tests=str(Path(__file__).parent), path=str(tmp_path))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    done, told, whole = json.loads(ran.stdout.splitlines()[-1])
    assert 0 < done < 200 and "does not work" in told and "File too large" in told, told
    assert whole


def test_without_rocksdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    with pytest.raises(NotBuiltError, match="needs RocksDB") as caught:
        made(tmp_path)
    assert "pip install 'torch-recast[tiers]'" in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_what_fails_in_optimize_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "items").mkdir()
    (tmp_path / "items" / "mine").write_text("")
    model = made(None)[0]
    del model
    with pytest.raises(UsageError, match="holds mine"):
        made(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["items"]
