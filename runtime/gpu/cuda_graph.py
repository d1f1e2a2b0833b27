"""CUDA graphs launched by the driver on a stream of their own, beside torch's current one.

Four calls of the driver begin one and one joins it, some 2 us each; by way of torch's streams and
events it would take the host 40 us.
"""

from __future__ import annotations

import contextlib
from typing import Any

from recast.runtime.gpu import cuda_launch

_PLAIN_EVENT = 2  # CU_EVENT_DISABLE_TIMING
_OWN_PRIORITIES = 8  # CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY


class SideGraph:
    """What can be launched of a captured ``graph``, on ``stream``, both by their addresses.

    The stream is a live one of the current device, and nobody waits for what is launched here but
    by :meth:`join`. Raises KernelError where the driver refuses.
    """

    def __init__(self, graph: int, stream: int) -> None:
        self._stream, self._begun = stream, False
        self._graph: Any = None
        self._fork: Any = cuda_launch.call("cuEventCreate", "making an event", _PLAIN_EVENT)
        self._done: Any = cuda_launch.call("cuEventCreate", "making an event", _PLAIN_EVENT)
        doing = "making a graph ready"
        self._graph = cuda_launch.call("cuGraphInstantiate", doing, graph, _OWN_PRIORITIES)

    def start(self, current: int) -> None:
        """Begin behind what is on the stream ``current``, beside what follows there."""
        call, doing, side = cuda_launch.call, "launching a graph beside others", self._stream
        call("cuEventRecord", doing, self._fork, current)
        call("cuStreamWaitEvent", doing, side, self._fork, 0)
        self._begun = True
        call("cuGraphLaunch", doing, self._graph, side)
        call("cuEventRecord", doing, self._done, side)

    def join(self, current: int) -> None:
        """What follows on the stream ``current`` comes behind the last :meth:`start`."""
        cuda_launch.call("cuStreamWaitEvent", "joining a graph", current, self._done, 0)

    def __del__(self) -> None:
        # Whose memory goes with it: nothing may be under way. A process that ends has no driver.
        if self._graph is None:  # the driver refused
            return
        last = [("cuStreamSynchronize", self._stream)] if self._begun else []
        last += [("cuGraphExecDestroy", self._graph)]
        last += [("cuEventDestroy", event) for event in (self._fork, self._done)]
        for name, what in last:
            with contextlib.suppress(Exception):
                cuda_launch.call(name, "leaving a graph", what)
