"""Two saves to one path at the same time: one is there, whole, and the other is told so."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from placed import filled

import recast.checkpoint
from recast.errors import CheckpointError
from recast.runtime.checkpoint import files

_STEPS = ({}, {"step": 4, "keep": 2})


def _saved(path: Path) -> float:
    recast.checkpoint.load(path, made := filled(0.0))
    value = made.top.bias.item()
    assert all(p.eq(value).all() for p in made.parameters())
    return float(value)


def _once_before(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, then: Callable[[], object]
) -> None:
    """Call ``then`` before the ``at``-th call of ``owner.name``."""
    real, calls = getattr(owner, name), [0]

    def first(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            then()
        return real(*args)

    monkeypatch.setattr(owner, name, first)


@pytest.mark.parametrize("options", _STEPS)
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("moment", [("write", 1), ("rename", 1), ("rename", 2)])
def test_the_second_to_finish_is_told(
    moment: tuple[str, int], there: bool, options: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Overtaken while it writes, and before each of the two renames of its end."""
    path = tmp_path / "c"
    if there:
        recast.checkpoint.save(path, filled(1.0), **options)
    what, at = moment
    owner = (files, "commit") if what == "write" else (os, "rename")
    overtake = lambda: recast.checkpoint.save(path, filled(2.0), **options)  # noqa: E731
    _once_before(monkeypatch, *owner, at, overtake)
    place = path / "step-0000000004" if options else path
    with pytest.raises(CheckpointError, match="another save was writing there") as caught:
        recast.checkpoint.save(path, filled(3.0), **options)
    assert str(caught.value).startswith(f"{place} is not saved")
    assert "try  one save at a time, or a path for each" in str(caught.value)
    assert _saved(path) == 2.0
    assert [p.name for p in place.parent.iterdir()] == [place.name]


def test_threads_that_save_at_once(tmp_path: Path) -> None:
    path, together = tmp_path / "c", Barrier(4)
    recast.checkpoint.save(path, filled(9.0))

    def save(value: float) -> float | None:
        made = filled(value)
        together.wait()
        try:
            recast.checkpoint.save(path, made)
        except CheckpointError as error:
            assert "another save was writing there" in str(error)
            return None
        return value

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            done = set(pool.map(save, (1.0, 2.0, 3.0, 4.0)))
            assert _saved(path) in done
            assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_second_save_that_also_removes_old_steps(tmp_path: Path) -> None:
    """Both find the same old step to remove; neither minds that it is gone."""
    path = tmp_path / "c"
    for step in (1, 2):
        recast.checkpoint.save(path, filled(step), step=step, keep=2)
    with pytest.MonkeyPatch.context() as patch:
        listed = files._steps(path)
        files.prune(path, 1)
        patch.setattr(files, "_steps", lambda _: listed)
        files.prune(path, 1)
    assert _saved(path) == 2.0
