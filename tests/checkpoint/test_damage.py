"""After a crash, a full disk or tampering: the last good checkpoint, or an error that says why."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from placed import filled, model, trained

import recast.checkpoint
from recast.errors import CheckpointError
from recast.runtime.checkpoint import files as checkpoint_files

_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")

pytestmark = pytest.mark.long


def _die_at(event: int, path: Path, options: dict[str, Any]) -> None:
    """Save, and be killed by SIGKILL at the ``event``-th operation on the folder."""
    seen = 0

    def audit(name: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if name in _EVENTS and args and str(path.parent) in str(args[0]):
            seen += 1
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)

    made = filled(2.0)
    sys.addaudithook(audit)
    recast.checkpoint.save(path, made, **options)
    os._exit(17)


@pytest.mark.parametrize(
    "options,stride", [({}, 1), ({"step": 2, "keep": 1}, 3)], ids=["replaced", "kept"]
)
def test_killed_at_every_moment(options: dict[str, Any], stride: int, tmp_path: Path) -> None:
    """At each file opened, made, renamed or removed: a whole checkpoint is left, old or new."""
    fork = multiprocessing.get_context("fork")
    old = {**options, "step": 1} if options else {}
    recast.checkpoint.save(tmp_path / "warm", filled(0.0))  # imports, which open files too
    found: list[float] = []
    for event in range(1, 100, stride):
        path = tmp_path / f"{event}" / "c"
        recast.checkpoint.save(path, filled(1.0), **old)
        child = fork.Process(target=_die_at, args=(event, path, options))
        child.start()
        child.join(60)
        made = filled(0.0)
        recast.checkpoint.load(path, made)
        value = made.top.bias.item()
        assert value in (1.0, 2.0) and all(p.eq(value).all() for p in made.parameters())
        found.append(value)
        # and the next save finds its way, and clears up
        recast.checkpoint.save(path, filled(3.0), **({**options, "step": 3} if options else {}))
        recast.checkpoint.load(path, made)
        assert made.top.bias == 3.0
        left = [p.name for p in (path if options else path.parent).iterdir()]
        assert left == (["step-0000000003"] if options else ["c"])
        shutil.rmtree(path.parent)
        if child.exitcode == 17:
            break
        assert child.exitcode == -signal.SIGKILL
    assert len(found) > 12 // stride and found == sorted(found) and {*found} == {1.0, 2.0}


def test_killed_while_a_step_is_saved_again(tmp_path: Path) -> None:
    """Between its two renames too, where only the old folder is there, under another name."""
    fork = multiprocessing.get_context("fork")
    found: set[float] = set()
    for event in range(1, 100):
        path = tmp_path / f"{event}" / "c"
        recast.checkpoint.save(path, filled(1.0), step=7, keep=1)
        child = fork.Process(target=_die_at, args=(event, path, {"step": 7, "keep": 1}))
        child.start()
        child.join(60)
        recast.checkpoint.load(path, made := filled(0.0))
        found.add(made.top.bias.item())
        recast.checkpoint.save(path, filled(3.0), step=8, keep=1)
        assert [p.name for p in path.iterdir()] == ["step-0000000008"]
        if child.exitcode == 17:
            break
    assert found == {1.0, 2.0}


def test_an_error_while_saving_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recast.checkpoint.save(tmp_path / "c", filled(1.0))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(torch.distributed.checkpoint.filesystem.torch, "save", full)
    serialise = "recast.runtime.checkpoint.content.serialise"
    monkeypatch.setattr(serialise, lambda value: b"")
    with pytest.raises(CheckpointError, match=r"cannot be written: OSError.*No space left"):
        recast.checkpoint.save(tmp_path / "c", filled(2.0))
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    recast.checkpoint.load(tmp_path / "c", made := filled(0.0))
    assert made.top.bias == 1.0


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_every_damaged_file_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    made, optimizer = trained(0, torch.optim.Adagrad, lr=0.1)
    recast.checkpoint.save(tmp_path / "c", made, optimizer, extra={"epoch": 1})
    names = _names(tmp_path / "c")
    assert names == [".metadata", "__0_0.distcp", "manifest.json", "rest.pt"]
    for name in names:
        for damage in ("cut", "flip", "gone", "empty"):
            folder = tmp_path / f"{damage}-{name}"
            shutil.copytree(tmp_path / "c", folder)
            data = bytearray((folder / name).read_bytes())
            if damage == "flip":
                data[len(data) // 2] ^= 1
            size = {"cut": len(data) * 2 // 3, "flip": len(data)}.get(damage, 0)
            (folder / name).write_bytes(data[:size])
            if damage == "gone":
                (folder / name).unlink()
            blank = model(3)
            before = blank.top.weight.clone()
            with pytest.raises(CheckpointError) as raised:
                recast.checkpoint.load(folder, blank)
            assert name in str(raised.value), (name, damage, raised.value)
            assert torch.equal(blank.top.weight, before)


def test_an_older_one_is_offered(tmp_path: Path) -> None:
    for step in (1, 2):
        recast.checkpoint.save(tmp_path, model(), step=step, keep=3)
    (tmp_path / "step-0000000002" / "rest.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"rest.pt has 0 bytes(.|\n)*step-0000000001"):
        recast.checkpoint.load(tmp_path, model())


def test_strangers(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    torch.save(model().state_dict(), tmp_path / "file.pt")
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.save(
            {"a": torch.zeros(2)}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True
        )
    for name, why in [
        ("none", "there is no such folder"),
        ("empty", r"it has no manifest\.json"),
        ("file.pt", "is a file, not the folder"),
        ("dcp", r"torch\.distributed\.checkpoint wrote it"),
    ]:
        with pytest.raises(CheckpointError, match=why):
            recast.checkpoint.load(tmp_path / name, model())
    recast.checkpoint.save(tmp_path / "c", model())
    at = tmp_path / "c" / "manifest.json"
    data = json.loads(at.read_text())
    for change, why in [
        ({"format": "other"}, "is not of a checkpoint of recast"),
        ({"version": 99}, "has version 99 of the format"),
    ]:
        at.write_text(json.dumps({**data, **change}))
        with pytest.raises(CheckpointError, match=why):
            recast.checkpoint.load(tmp_path / "c", model())
    assert data["version"] == checkpoint_files.VERSION


def test_a_file_in_the_way_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("my notes")
    with pytest.raises(CheckpointError, match="is no checkpoint: it is not overwritten"):
        recast.checkpoint.save(tmp_path / "c", model())
    assert (tmp_path / "c").read_text() == "my notes"
