"""The backward of a replayed forward in the thread that calls it.

Torch's engine does the work of a GPU in a thread of its own. There a pass over the ends of 61
weights takes three times as long as in the thread that calls backward (measured: 0.63 ms and 0.22),
and what one replay does leaves nothing to share among threads. So from a replayed forward on, until
an optimizer steps (without a closure) or the model is called again,
``torch.autograd.set_multithreading_enabled`` is off in the thread of the forward. Who has turned it
off before finds it off; who turns it off for a backward alone is to do so before the forward.
"""

from __future__ import annotations

import threading

import torch


class _Here(threading.local):
    off = False  # by us


_here = _Here()


def begin() -> None:
    """A forward has been replayed in this thread."""
    if torch._C._is_multithreading_enabled():
        torch._C._set_multithreading_enabled(False)
        _here.off = True


def end() -> None:
    """Its backward is over, or will not come. (The end of a pass cannot tell: torch puts back what
    is set there.)
    """
    # Inside a pass, of an optimizer that steps in a hook, torch would put back that it is off.
    if _here.off and torch._C._current_graph_task_id() == -1:
        _here.off = False
        torch._C._set_multithreading_enabled(True)
