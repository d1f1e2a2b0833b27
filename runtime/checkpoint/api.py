"""Checkpoints for any number of ranks: ``save`` on W ranks, ``load`` on W', or in a plain model.

Tensors are written by torch.distributed.checkpoint under their names in ``state_dict()``, those of
the optimizer under the name of their parameter; see ``files`` for the folder. Every rank calls both
functions with the same arguments, and if one rank fails, all raise.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recast.errors import CheckpointError, UsageError
from recast.runtime.checkpoint import files
from recast.runtime.checkpoint.ranks import Ranks
from recast.runtime.dynamic import step as dynamic_step
from recast.runtime.ranks import faults, late_optimizers, shards


@dataclass(frozen=True, slots=True)
class Metadata:
    """What ``load`` returns about the checkpoint.

    Attributes:
        path: the folder that was read.
        step, extra: the arguments of ``save``; ``extra`` is that of rank 0.
        world_size: the number of ranks that saved it.
    """

    path: Path
    step: int | None
    extra: Any
    world_size: int


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int | None = None,
    extra: Any = None,
    keep: int | None = None,
) -> Path:
    """Write weights, buffers and optimizer state, of a plain model or of one on many ranks.

    If it crashes at any moment, the previous checkpoint is still there. It needs the memory of one
    block of 64 MiB. If there is a process group, every rank calls it.

    Args:
        path: a folder that all ranks see. A checkpoint that is there is replaced.
        model: a plain module, or the result of ``optimize``.
        optimizer: its state is saved too, under the names of the model's parameters.
        step: number of steps done; ``load`` returns it.
        extra: tensors and plain values in lists, tuples and dicts (epoch, a scheduler's
            ``state_dict()``, random state ...), taken from rank 0; ``load`` returns it.
        keep: write to ``path/step-<step>`` and keep the last ``keep`` of these folders;
            ``load(path)`` then reads the last.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: something else is at ``path``; it cannot be written; another save wrote it
            at the same time, and was done first: that one is there, whole.
        UsageError: ``path`` is not a path; ``model`` is no module; ``keep`` without ``step``;
            ``optimizer`` is none, or has a parameter that is not ``model``'s; an ``extra`` with
            values of another kind; ranks that were given different paths, steps or kinds of
            optimizer; the process group of a spread model is gone.
        RankError: another rank failed, or does not save.
    """
    from recast.runtime.checkpoint import blocks, content, dynamic

    _check_model("save", model)
    ranks = _ranks(model)
    ranks.check_same(
        "checkpoint.save", path=_text(path), optimizer=_kind(optimizer), step=str(step),
        keep=str(keep),
    )  # fmt: skip
    _prepare(optimizer)
    place = ranks.first(lambda: files.target(_path("save", path), step, keep))
    found = ranks.gather(ranks.together(lambda: dynamic.counts(model)))
    parts = dynamic.parts(found, ranks.rank)
    kept = ranks.together(lambda: content.collect(model, optimizer, parts))
    values = {"extra": extra, **content.merge(ranks.gather(kept.values))}
    facts = content.merge(ranks.gather(kept.facts))
    rest = ranks.together(lambda: content.serialise(values) if ranks.rank == 0 else b"")
    folder, standing = ranks.first(lambda: files.begin(place))
    try:
        ranks.together(lambda: _check_seen(folder, ranks.rank))
        with _named("written", folder), faults.collective("checkpoint"):
            blocks.write(folder, kept.tensors, ranks.group)
        own = ranks.together(lambda: _own_files(folder, ranks.rank, rest))
        manifest = {
            **facts,
            "step": step,
            "world_size": ranks.world,
            "torch": torch.__version__,
            "files": content.merge(ranks.gather(own)),
        }
        ranks.first(lambda: files.commit(folder, place, manifest, standing))
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if keep is not None:
        ranks.first(lambda: files.prune(Path(path), keep))
    return place


def load(path: str | Path, model: nn.Module, optimizer: Optimizer | None = None) -> Metadata:
    """Read a checkpoint into ``model``, and ``optimizer``, on any number of ranks.

    Before anything is written to, every file is verified by size and checksum, and names and shapes
    are compared. Values are read straight into the tensors, block by block: besides its own rows, a
    rank holds only one block in memory. If there is a process group, every rank calls it.

    Args:
        path: the ``path`` that was passed to ``save``.
        model: plain or on many ranks; names and whole shapes as in the one saved.
        optimizer: of the kind that was saved, with the same parameter groups.

    Returns:
        The path that was read, ``step``, ``extra`` and the number of ranks that saved it.

    Raises:
        CheckpointError: there is no checkpoint; a file is damaged or foreign; it belongs to another
            model or optimizer. The message names what is wrong.
        UsageError: ``path`` is not a path, or ``model`` no module; ranks that were given different
            paths or kinds of optimizer; the process group of a spread model is gone.
        RankError: another rank failed, or does not load.
    """
    from recast.runtime.checkpoint import blocks, content, dynamic

    _check_model("load", model)
    ranks = _ranks(model)
    ranks.check_same("checkpoint.load", path=_text(path), optimizer=_kind(optimizer))
    _prepare(optimizer)
    folder = ranks.first(lambda: files.find(_path("load", path)))
    manifest = ranks.together(lambda: files.manifest(folder))
    ranks.together(lambda: files.prove(folder, manifest, ranks.rank, ranks.world))
    values = ranks.together(lambda: _read_rest(folder))
    aim = ranks.together(lambda: content.aim(model, optimizer, manifest, values))
    with _named("read", folder), faults.collective("checkpoint"):
        blocks.read(folder, aim.tensors, ranks.group)
        for turn in dynamic.rounds(aim.wanted):
            blocks.read(folder, turn, ranks.group)
    ranks.together(lambda: [then() for then in aim.finish])
    return Metadata(folder, manifest["step"], values["extra"], manifest["world_size"])


def _text(path: object) -> str:
    return str(path) if isinstance(path, (str, os.PathLike)) else f"a {type(path).__name__}"


def _kind(optimizer: Optimizer | None) -> str:
    return "None" if optimizer is None else type(optimizer).__name__


def _path(call: str, given: object) -> Path:
    if not isinstance(given, (str, os.PathLike)):
        tries = (f'{call}("last", model)',)
        raise UsageError(f"checkpoint.{call}: {given!r} is no path", tries=tries)
    return Path(given)


def _check_model(call: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"checkpoint.{call}: the model is of type {type(model).__name__}, not an nn.Module",
            why="tensors are saved under the names that they have in a module",
            tries=(f'{call}("last", model)',),
        )


def _ranks(model: nn.Module) -> Ranks:
    """The ranks that ``model`` is spread over; those of the default group if it is on each of them.

    Raises UsageError if the process group of the former is gone: this process by itself would write
    and read its parts of tables as if they were all.
    """
    placed = (shards.of(p) for p in model.parameters())
    own = next((table for table in placed if table is not None), None)
    ranks = Ranks(None if own is None else own.group)
    if ranks.alone and own is not None and own.world_size > 1:
        raise UsageError(
            f"checkpoint: {own.table.name} is spread over {own.world_size} ranks, and there is no"
            " process group",
            why="each of them writes and reads its own part of the table",
            tries=("recast.checkpoint before dist.destroy_process_group()",),
        )
    return ranks


def _prepare(optimizer: Optimizer | None) -> None:
    """Prepare an optimizer that was made after ``optimize`` and may not have stepped yet. Raises
    UsageError for what is none, as a list of several.
    """
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise UsageError(
            f"checkpoint: optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer",
            why="a checkpoint holds the state of one optimizer under the names of the parameters",
            tries=(
                "of several optimizers, the model and one in each checkpoint, by a path each",
                "extra=scheduler.state_dict()",
            ),
        )
    if optimizer is not None:
        late_optimizers.prepare(optimizer)
        dynamic_step.hook_state(optimizer)


def _check_seen(folder: Path, rank: int) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"rank {rank} does not see {folder}",
            why="rank 0 made it: the ranks do not share this file system",
            tries=("a path on a file system that all hosts share",),
        )


def _own_files(folder: Path, rank: int, rest: bytes) -> dict[str, dict[str, Any]]:
    """Sizes and checksums of the files that this rank wrote. Rank 0 also writes ``rest`` here."""
    names = [p.name for p in folder.glob(f"__{rank}_*")]
    if rank == 0:
        with open(folder / files.REST, "wb") as file:
            file.write(rest)
            file.flush()
            os.fsync(file.fileno())
        names += [files.REST, ".metadata"]
    return {name: files.facts(folder / name) for name in names}


def _read_rest(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = torch.load(folder / files.REST, weights_only=True)
    return values


@contextmanager
def _named(what: str, folder: Path) -> Iterator[None]:
    """Turn torch's errors, of any rank, into one CheckpointError."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(
            f"{folder} cannot be {what}: {type(cause).__name__}: {cause}",
            where=f"rank {rank}",
            why=files.room(folder) if what == "written" else "",
        ) from error
