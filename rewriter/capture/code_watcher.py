"""Watches the user's code that runs under a trace, with a profile function for this thread.

What a helper names, as in ``def scale(): return args.scale``, is baked like what forward itself
names. What differs at each call, such as the time or Python's random numbers, cannot be baked.
"""

from __future__ import annotations

import ctypes
import datetime
import logging
import os
import random
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch.utils import checkpoint

from . import frames

_CLOCKS = frozenset({
    "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns",
    "process_time", "process_time_ns", "thread_time", "thread_time_ns", "localtime", "gmtime",
    "strftime", "ctime",
})  # fmt: skip
# of a torch.Generator: each call of forward draws anew from where these put it, or puts it back
_SEEDS = frozenset({
    "manual_seed", "seed", "get_state", "set_state", "clone_state", "graphsafe_get_state",
    "graphsafe_set_state",
})  # fmt: skip


class CodeWatcher:
    """A profile function. ``ran`` is told of the frames of the user's functions as they begin;
    ``refuse`` of a call whose answer no graph can hold; ``environment`` of a variable
    that is read, and of "" when all are looked through; ``autocast_dtype`` of the device of an
    autocast that is made without a dtype, and has that which holds where it is made; ``prints`` of
    the user's lines that print or log, which no graph does; ``enables_grad`` is called where
    gradients are switched on, also for a caller that has switched them off.
    """

    def __init__(
        self,
        ran: Callable[[FrameType], None],
        refuse: Callable[[str], None],
        environment: Callable[[str], None],
        autocast_dtype: Callable[[str], None],
        prints: Callable[[str], None],
        enables_grad: Callable[[], None],
    ) -> None:
        self.ran, self.refuse, self.environment = ran, refuse, environment
        self.autocast_dtype, self.prints = autocast_dtype, prints
        self.enables_grad = enables_grad
        _no_second_normal()
        self.resume()
        self.autocast: list[str] = []  # the devices of the blocks that are open
        self.users: dict[CodeType, bool] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            if arg is print and self.user(frame):
                self.prints(frames.line(frame.f_code, frame.f_lineno))
            why = nondeterministic(arg, frame, self.user(frame))
            if why is None and arg is os.urandom and self.user(_beyond(frame, *_OF_PYTHON)):
                why = "it makes a generator of random numbers, which nobody has seeded"
            if why is not None:
                self.refuse(why)
        elif event == "call" and self.user(frame):
            self.ran(frame)
        elif event == "return" and self.user(frame):
            self.pause()
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
        elif event == "call" and frame.f_code in _GRAD and _switches_on(frame):
            self.enables_grad()
        elif event == "call" and frame.f_code is _ENTER:
            self.autocast.append(str(frame.f_locals["self"].device))
        elif event == "call" and frame.f_code is _EXIT and self.autocast:
            self.autocast.pop()

    def pause(self) -> None:
        """Refuse numbers that the user's code has drawn by numpy, whose functions are no builtins
        that a profile function is told of. Called when this is not to watch for a while.
        """
        if _numpy_state() != self.numpys:
            self.refuse("it draws from numpy's random numbers")

    def resume(self) -> None:
        """Called before this goes on watching: what was drawn meanwhile does not count."""
        self.numpys = _numpy_state()

    def logs(self, frame: FrameType) -> None:
        """Note the line of the user's that is behind this call of ``logging``."""
        caller = _beyond(frame.f_back, "logging")
        if caller is not None and self.user(caller):
            self.prints(frames.line(caller.f_code, caller.f_lineno))

    def user(self, frame: FrameType | None) -> bool:
        """Whether the code of ``frame`` is the user's, or of a library of models."""
        if frame is None:
            return False
        known = self.users.get(frame.f_code)
        if known is None:
            known = self.users[frame.f_code] = frames.of_model(frame)
        return known


def _beyond(frame: FrameType | None, *modules: str) -> FrameType | None:
    """The first frame, from ``frame`` outwards, that is not of these Python ``modules``."""
    while frame is not None and frame.f_globals.get("__name__") in modules:
        frame = frame.f_back
    return frame


def _no_second_normal() -> None:
    """Forget the normal number that numpy keeps of each pair: every draw then changes its state."""
    state = _shared.get_state()
    if type(state) is tuple and state[3]:
        _shared.set_state((*state[:3], 0, 0.0))


def _numpy_state() -> object:
    """The state of the generator that numpy's functions share; comparable."""
    held = _shared.get_bit_generator()
    if type(held) is np.random.MT19937:  # unless the user has set another: 0.5 us, not 30
        return ctypes.string_at(held.ctypes.state_address, _TWISTER)
    return repr(held.state)


_shared: Any = np.random  # whose types leave out some of it
_TWISTER = 4 * 625  # bytes: 624 words, and the place of the next
_OF_PYTHON = ("random", "secrets")  # by which numpy asks the system for a seed
_READ = type(os.environ).__getitem__.__code__
_ALL = type(os.environ).__iter__.__code__
_MADE = torch.autocast.__init__.__code__
_ENTER = torch.autocast.__enter__.__code__
_EXIT = torch.autocast.__exit__.__code__
_LOG = logging.Logger._log.__code__
_GRAD = frozenset({
    torch.enable_grad.__enter__.__code__, torch.set_grad_enabled.__init__.__code__,
    torch.inference_mode.__enter__.__code__,
})  # fmt: skip


def _switches_on(frame: FrameType) -> bool:
    """Whether this call, of one of ``_GRAD``, switches gradients on, and not back to what they
    were, as the end of a ``with torch.no_grad()`` does.
    """
    if frame.f_code is torch.set_grad_enabled.__init__.__code__:
        back = frame.f_back is not None and frame.f_back.f_code.co_name == "__exit__"
        return bool(frame.f_locals["mode"]) and not back
    return not getattr(frame.f_locals["self"], "mode", False)


def nondeterministic(called: Any, frame: FrameType, users: bool) -> str | None:
    """Why a builtin gives a different answer at each call, or None."""
    owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    if isinstance(owner, random.Random) and name in ("random", "getrandbits"):
        own = users or frame.f_globals.get("__name__") == "random"
        return "it draws from Python's random numbers" if own else None
    if isinstance(owner, torch.Generator) and name in _SEEDS:  # also by torch.random.fork_rng
        caller = _beyond(frame, "torch.random")
        if caller is not None and caller.f_globals is vars(checkpoint):
            return None  # which is refused for what it is
        return f"it seeds random numbers, or keeps where they are: Generator.{name}()"
    if name == "apply" and isinstance(owner, type) and issubclass(owner, torch._C._FunctionBase):
        return f"applies {owner.__name__}, a torch.autograd.Function that is no global name there"
    if not users:
        return None  # what a library does with the time, as logging does, is not in the result
    if getattr(called, "__module__", None) == "time" and name in _CLOCKS:
        return f"it asks for the time: time.{name}()"
    if isinstance(owner, type) and issubclass(owner, datetime.date) and name in ("now", "today"):
        return f"it asks for the time: {owner.__name__}.{name}()"
    return "it opens a file" if called is open else None
