"""Which devices the kernels serve, and the memory that they report to."""

from __future__ import annotations

import collections
import functools
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recast.errors import RecastWarning
from recast.runtime.gpu import cuda_launch, gpu


def test_counters_outlive_their_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that still runs may write to them."""
    plain = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda n, dtype, pin_memory: plain(n, dtype=dtype))
    on: Any = object.__new__(gpu.Cuda)
    on._counters = collections.deque(maxlen=2)
    first = weakref.ref(on.counters(4))
    assert first() is not None
    on.counters(4), on.counters(4)
    assert first() is None


def test_a_device_too_old_for_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's operations run there, with one warning."""
    capability = {3: (7, 5), 4: (8, 0)}
    monkeypatch.setattr(cuda_launch, "why_not", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability.__getitem__)
    monkeypatch.setattr(gpu, "Cuda", lambda index: index)
    monkeypatch.setattr(gpu, "_cuda", functools.cache(gpu._cuda.__wrapped__))
    old, new = (SimpleNamespace(is_cuda=True, get_device=lambda k=k: k) for k in capability)
    with pytest.warns(RecastWarning, match="cuda:3 is sm_75, and the kernels need sm_80"):
        assert gpu.serving(old) is None  # type: ignore[arg-type]
    assert gpu.serving(old) is None  # type: ignore[arg-type]
    assert gpu.serving(new) == 4  # type: ignore[arg-type, comparison-overlap]
