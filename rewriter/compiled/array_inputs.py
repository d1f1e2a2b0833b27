"""Arguments of forward that are arrays of numpy: the graph gets tensors over the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def arrays_in(ordered: tuple[Any, ...]) -> tuple[int, ...]:
    """The positions of the arguments that are arrays of a dtype that torch has."""
    return tuple(k for k, v in enumerate(ordered) if tensor_of(v) is not v)


def tensor_of(value: Any) -> Any:
    """``value``, or the tensor that shares its memory if it is an array of a dtype that torch has;
    over a copy if torch cannot write there.
    """
    if type(value) is not np.ndarray:
        return value
    shared = value.flags.writeable and all(stride >= 0 for stride in value.strides)
    try:
        return torch.from_numpy(value if shared else value.copy())
    except TypeError:  # texts, objects
        return value


def array_of(value: Any) -> Any:
    """The array that :func:`tensor_of` made a tensor of; a value of a trace as it is."""
    return value.numpy() if type(value) is torch.Tensor else value
