"""CUDA graphs launched through the driver on a side stream, beside torch's current one.

Four driver calls start one and one joins it, at some 2 us each; through torch's streams and events
it would take the host 40 us.
"""

from __future__ import annotations

import contextlib
from typing import Any

from recast.runtime.gpu import cuda_launch

_PLAIN_EVENT = 2  # CU_EVENT_DISABLE_TIMING
_OWN_PRIORITIES = 8  # CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY


class SideGraph:
    """The executable of a captured ``graph``, to be launched on ``stream``; both are addresses.

    The stream belongs to ``device``, the current one, and must stay alive. Only :meth:`join` waits
    for what is launched here. Raises KernelError if the driver refuses.
    """

    def __init__(self, graph: int, stream: int, device: int) -> None:
        self._stream, self._device, self._begun = stream, device, False
        self._graph: Any = None
        self._fork: Any = cuda_launch.call("cuEventCreate", "making an event", _PLAIN_EVENT)
        self._done: Any = cuda_launch.call("cuEventCreate", "making an event", _PLAIN_EVENT)
        doing = "making a graph ready"
        self._graph = cuda_launch.call("cuGraphInstantiate", doing, graph, _OWN_PRIORITIES)

    def start(self, current: int) -> None:
        """Launch after the work on stream ``current``, and beside what follows on it."""
        call, doing, side = cuda_launch.call, "launching a graph beside others", self._stream
        call("cuEventRecord", doing, self._fork, current)
        call("cuStreamWaitEvent", doing, side, self._fork, 0)
        self._begun = True
        call("cuGraphLaunch", doing, self._graph, side)
        call("cuEventRecord", doing, self._done, side)

    def join(self, current: int) -> None:
        """Make what follows on stream ``current`` wait for the last :meth:`start`."""
        cuda_launch.call("cuStreamWaitEvent", "joining a graph", current, self._done, 0)

    def __del__(self) -> None:
        # The graph's memory goes too, so no launch may be running. Garbage is collected in whatever
        # thread, which need not have a context. At exit the driver may be gone.
        if self._graph is None:  # the driver refused
            return
        last = [("cuStreamSynchronize", self._stream)] if self._begun else []
        last += [("cuGraphExecDestroy", self._graph)]
        last += [("cuEventDestroy", event) for event in (self._fork, self._done)]
        with contextlib.suppress(Exception), cuda_launch.context(self._device):
            for name, what in last:
                with contextlib.suppress(Exception):
                    cuda_launch.call(name, "leaving a graph", what)
