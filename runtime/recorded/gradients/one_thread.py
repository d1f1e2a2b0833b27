"""Runs the backward of a replayed forward in the calling thread.

Torch's engine does GPU work in a thread of its own. There a pass over the ends of 61 weights takes
three times as long as in the thread that calls backward (measured: 0.63 ms and 0.22), and a
backward that is one replay has no work to share among threads. So from a replayed forward until an
optimizer steps (without a closure) or the model is called again,
``torch.autograd.set_multithreading_enabled`` is off in the forward's thread. If the user had turned
it off before, it stays off; to turn it off only for a backward, do so before the forward.
"""

from __future__ import annotations

import threading

import torch


class _Here(threading.local):
    off = False  # turned off by us


_here = _Here()


def begin() -> None:
    """Called after a forward has been replayed in this thread."""
    if torch._C._is_multithreading_enabled():
        torch._C._set_multithreading_enabled(False)
        _here.off = True


def end() -> None:
    """Called when its backward is over, or will not come. (Not at the end of a pass: torch would
    restore the setting there.)
    """
    # Inside a pass (an optimizer that steps in a hook), torch would turn it off again.
    if _here.off and torch._C._current_graph_task_id() == -1:
        _here.off = False
        torch._C._set_multithreading_enabled(True)
