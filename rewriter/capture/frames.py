"""Whose code runs in a frame: ours, torch's or the user's; and the user's line, ``model.py:41``."""

from __future__ import annotations

import contextlib
import dis
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType

import numpy
import torch
import torch.utils.checkpoint

import recast
from recast.rewriter.compiled import code_names

_TORCH, _NUMPY = (str(Path(str(m.__file__)).parent) + os.sep for m in (torch, numpy))
# under both names that a checkout has: of the folder, and of the link to it in recast/
_FOLDERS = Path(__file__).resolve().parents[1], Path(str(recast.__file__)).parent / "rewriter"
_OURS = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)
_TRANSFORMS = tuple(
    os.path.join(_TORCH, "_functorch", name) for name in ("apis.py", "eager_transforms.py")
)
_CHECKPOINT = torch.utils.checkpoint.__file__
LIBRARIES = sys.stdlib_module_names | {"numpy", "recast", "torch"}
_NOT_THE_USERS = *_OURS, _TORCH, _NUMPY, str(contextlib.__file__), "<frozen"


def ours(frame: FrameType) -> bool:
    """Whether the code of ``frame`` is in ``rewriter/``."""
    return frame.f_code.co_filename.startswith(_OURS)


def checkpointed() -> bool:
    """Whether what runs is called by activation checkpointing.

    Torch 2.11 puts its hooks around nothing whose input knows of no gradient, as a Value: so hooks
    alone do not tell.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (ours(frame) and frame.f_code.co_name == "trace"):
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False


def transform(frame: FrameType | None, error: BaseException | None = None) -> FrameType | None:
    """The frame of the outermost running ``torch.vmap`` or other ``torch.func`` transform, or of
    the one that ``error`` passed through; None without one. ``frame.f_back`` is its caller.
    """
    found = None
    while frame is not None and not (ours(frame) and frame.f_code.co_name == "trace"):
        if frame.f_code.co_filename in _TRANSFORMS:
            found = frame
        frame = frame.f_back
    step = error.__traceback__ if error is not None and found is None else None
    while step is not None and found is None:
        if step.tb_frame.f_code.co_filename in _TRANSFORMS:
            found = step.tb_frame
        step = step.tb_next
    return found


def transform_name(frame: FrameType) -> str:
    """What the transform of :func:`transform` is called: ``torch.vmap``, ``torch.func.jvp``."""
    name = frame.f_code.co_qualname.partition(".")[0].strip("_").partition("_")[0]
    return "torch.vmap" if name == "vmap" else f"torch.func.{name}"


def users(frame: FrameType) -> bool:
    """Whether ``frame`` runs user code: see :func:`is_users`."""
    return is_users(frame.f_code.co_filename)


def names_bounds() -> bool:
    """Whether the user's code that is running names ``min`` or ``max``, which compare numbers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not users(frame):
        frame = frame.f_back
    return frame is not None and not {"min", "max"}.isdisjoint(frame.f_code.co_names)


def users_level() -> int:
    """The ``stacklevel`` with which a warning of the caller names the user's line."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and not users(frame):
        frame, level = frame.f_back, level + 1
    return level


def of_model(frame: FrameType) -> bool:
    """Whether the code of ``frame`` is the user's, or of a library of models."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in LIBRARIES


def is_users(file: str) -> bool:
    """Whether ``file`` holds user code: not ours, torch's or numpy's, not frozen into Python."""
    return not file.startswith(_NOT_THE_USERS)


def line(code: CodeType, number: int | None) -> str:
    """A line of ``code`` in the form that reports use."""
    return f"{os.path.basename(code.co_filename)}:{number}"


def raised_at(error: BaseException) -> str | None:
    """The user's innermost line that ``error`` passed through."""
    found = None
    step = error.__traceback__
    while step is not None:
        if users(step.tb_frame):
            found = line(step.tb_frame.f_code, step.tb_lineno)
        step = step.tb_next
    return found


def passed_torch(error: BaseException, part: str) -> bool:
    """Whether ``error`` passed through torch's code in its folder ``part``."""
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename.startswith(_TORCH + part):
            return True
        step = step.tb_next
    return False


def by_torch(part: str = "") -> bool:
    """Whether we were called by torch's code, in the folder ``part`` of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and ours(frame):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH + part)


def catch_errors() -> bool:
    """Whether a user's function that runs under the trace catches errors."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (ours(frame) and frame.f_code.co_name == "trace"):
        if users(frame) and code_names.catches(frame.f_code):
            return True
        frame = frame.f_back
    return False


def line_of_write(codes: Iterable[CodeType], name: str) -> str | None:
    """The user's line that sets an attribute or a global called ``name``, or that names it first,
    as one that appends to it does.
    """
    named: str | None = None
    for code in codes:
        for step in dis.get_instructions(code):
            if step.argval != name or step.positions is None or step.positions.lineno is None:
                continue
            if step.opname in ("STORE_ATTR", "STORE_GLOBAL"):
                return line(code, step.positions.lineno)
            named = named or line(code, step.positions.lineno)
    return named
