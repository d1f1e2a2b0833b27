"""What the tests of guards share: a model, its batches, and a call compared with the plain one."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recast.errors import RecastWarning
from recast.rewriter.capture.capture_model import Captured, capture
from recast.rewriter.compiled.module import Compiled


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 4)
        self.a = nn.Linear(4, 4)


def ids(rows: int, width: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(rows + seed)
    return torch.randint(1, 10, (rows, width), generator=generator)


def check(plain: nn.Module, fast: nn.Module, *args: Any, warns: str | None = None) -> None:
    torch.manual_seed(0)
    wanted = plain(*args)
    torch.manual_seed(0)
    if warns is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = fast(*args)
    else:
        with pytest.warns(RecastWarning, match=warns):
            got = fast(*args)
    torch.testing.assert_close(got, wanted)


def both(model: nn.Module, *example: Any) -> tuple[nn.Module, Compiled, Captured]:
    it = capture(model, example)
    return copy.deepcopy(model), Compiled(it), it
