"""Watches the user's code that runs under a trace, with a profile function for this thread.

What a helper names, as in ``def scale(): return args.scale``, is baked like what forward itself
names. What differs at each call, such as the time or Python's random numbers, cannot be baked.
"""

from __future__ import annotations

import datetime
import logging
import os
import random
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

from . import frames

_CLOCKS = frozenset({
    "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns",
    "process_time", "process_time_ns", "thread_time", "thread_time_ns", "localtime", "gmtime",
    "strftime", "ctime",
})  # fmt: skip


class CodeWatcher:
    """A profile function. ``ran`` is told of the frames of the user's functions as they begin;
    ``refuse`` of a call whose answer no graph can hold; ``environment`` of a variable
    that is read, and of "" when all are looked through; ``autocast_dtype`` of the device of an
    autocast that is made without a dtype, and has that which holds where it is made; ``prints`` of
    the user's lines that print or log, which no graph does.
    """

    def __init__(
        self,
        ran: Callable[[FrameType], None],
        refuse: Callable[[str], None],
        environment: Callable[[str], None],
        autocast_dtype: Callable[[str], None],
        prints: Callable[[str], None],
    ) -> None:
        self.ran, self.refuse, self.environment = ran, refuse, environment
        self.autocast_dtype, self.prints = autocast_dtype, prints
        self.autocast: list[str] = []  # the devices of the blocks that are open
        self.users: dict[CodeType, bool] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            if arg is print and self.user(frame):
                self.prints(frames.line(frame.f_code, frame.f_lineno))
            why = nondeterministic(arg, frame, self.user(frame))
            if why is not None:
                self.refuse(why)
        elif event == "call" and self.user(frame):
            self.ran(frame)
        elif event == "call" and frame.f_code is _LOG:
            self.logs(frame)
        elif event == "call" and frame.f_code is _READ:
            self.environment(str(frame.f_locals["key"]))
        elif event == "call" and frame.f_code is _ALL:
            self.environment("")
        elif event == "call" and frame.f_code is _MADE:
            given = frame.f_locals
            if given["enabled"] and given["dtype"] is None:
                self.autocast_dtype(given["device_type"])
        elif event == "call" and frame.f_code is _ENTER:
            self.autocast.append(str(frame.f_locals["self"].device))
        elif event == "call" and frame.f_code is _EXIT and self.autocast:
            self.autocast.pop()

    def logs(self, frame: FrameType) -> None:
        """Note the line of the user's that is behind this call of ``logging``."""
        caller = frame.f_back
        while caller is not None and caller.f_globals.get("__name__") == "logging":
            caller = caller.f_back
        if caller is not None and self.user(caller):
            self.prints(frames.line(caller.f_code, caller.f_lineno))

    def user(self, frame: FrameType) -> bool:
        """Whether the code of ``frame`` is the user's, or of a library of models."""
        known = self.users.get(frame.f_code)
        if known is None:
            known = self.users[frame.f_code] = frames.of_model(frame)
        return known


_READ = type(os.environ).__getitem__.__code__
_ALL = type(os.environ).__iter__.__code__
_MADE = torch.autocast.__init__.__code__
_ENTER = torch.autocast.__enter__.__code__
_EXIT = torch.autocast.__exit__.__code__
_LOG = logging.Logger._log.__code__


def nondeterministic(called: Any, frame: FrameType, users: bool) -> str | None:
    """Why a builtin gives a different answer at each call, or None."""
    owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    if isinstance(owner, random.Random) and name in ("random", "getrandbits"):
        own = users or frame.f_globals.get("__name__") == "random"
        return "it draws from Python's random numbers" if own else None
    if name == "apply" and isinstance(owner, type) and issubclass(owner, torch._C._FunctionBase):
        return f"applies {owner.__name__}, a torch.autograd.Function that is no global name there"
    if not users:
        return None  # what a library does with the time, as logging does, is not in the result
    if getattr(called, "__module__", None) == "time" and name in _CLOCKS:
        return f"it asks for the time: time.{name}()"
    if isinstance(owner, type) and issubclass(owner, datetime.date) and name in ("now", "today"):
        return f"it asks for the time: {owner.__name__}.{name}()"
    if type(owner).__module__.startswith("numpy.random"):
        return "it draws from numpy's random numbers"
    return "it opens a file" if called is open else None
