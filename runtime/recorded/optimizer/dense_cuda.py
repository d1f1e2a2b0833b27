"""Dense optimizer steps on a GPU: all parameters of a group in one launch, read and written once.

``csrc/cuda/dense_update.cu`` does what the foreach steps of ``torch.optim`` do on a GPU, operation
for operation and with a fused multiply-add where they have one, so the numbers are theirs. Those
steps read and write every tensor several times, with four to fourteen launches; so this one is used
wherever it can be, without timing it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int32, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recast.runtime import device
from recast.runtime.gpu import gpu as gpus
from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Kernel, pointer
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.recorded import recording

Group = Mapping[str, Any]

_BLOCK = 256
CHUNK = _BLOCK * 4 * 2  # elements of a block: two reads of 16 bytes by each thread
_MAXIMIZES, _DECAYS, _DECOUPLED, _NESTEROV, _COUNTED = 1, 2, 4, 8, 16


class Rule(NamedTuple):
    """How a group is stepped: the formula and its numbers, in the form that the kernel takes."""

    code: int  # RECAST_RULE
    states: tuple[str, ...]  # names in ``optimizer.state``, in the kernel's order
    flags: int
    decay: float
    eps: float = 0.0
    keep: float = 0.0
    add: float = 0.0
    second_keep: float = 0.0
    second_add: float = 0.0


def sgd(group: Group) -> Rule:
    """The rule for a group of ``torch.optim.SGD``."""
    if not group["momentum"]:
        return Rule(0, (), _flags(group), group["weight_decay"])
    flags = _flags(group) | (_NESTEROV if group["nesterov"] else 0)
    keep, add = group["momentum"], 1 - group["dampening"]
    return Rule(1, ("momentum_buffer",), flags, group["weight_decay"], keep=keep, add=add)


def adagrad(group: Group) -> Rule:
    """The rule for a group of ``torch.optim.Adagrad``."""
    return Rule(2, ("sum",), _flags(group), group["weight_decay"], group["eps"])


def adam(group: Group, decoupled: bool, counted: bool) -> Rule:
    """The rule for a group of ``torch.optim.Adam`` or (``decoupled``) ``AdamW``. ``counted``: the
    host counts the steps, and the rate is what :func:`adam_numbers` returns.
    """
    flags = _flags(group) | (_COUNTED if counted else 0)
    if flags & _DECAYS and decoupled:
        flags ^= _DECAYS | _DECOUPLED
    names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
    first, second = group["betas"]
    return Rule(
        len(names) + 1, names, flags, group["weight_decay"], group["eps"],
        first, 1 - first, second, 1 - second,
    )  # fmt: skip


def adam_numbers(group: Group, steps: float) -> tuple[float, float, float]:
    """What step number ``steps`` of Adam takes in place of the rate when the host counts steps.

    -lr / (1 - beta1^t), sqrt(1 - beta2^t) and 1 - lr weight_decay, in float64 as torch's.
    """
    lr, (first, second) = float(group["lr"]), group["betas"]
    decay = 1 - lr * group["weight_decay"]
    return -(lr / (1 - first**steps)), (1 - second**steps) ** 0.5, decay


def _flags(group: Group) -> int:
    return (_MAXIMIZES if group["maximize"] else 0) | (_DECAYS if group["weight_decay"] else 0)


def serving(parameter: Tensor) -> Gpu | None:
    """What runs the kernel on the memory of ``parameter``; None when torch's own calls must be
    used.
    """
    return None if device.held() == "torch" else gpus.serving(parameter)


def takes(parameter: Tensor, tensors: Sequence[Tensor | None]) -> bool:
    """Whether the kernel can step ``parameter``, with its gradient and states in ``tensors``.

    All must be float32, of one shape and order in memory without gaps, and strided.
    """
    if not _dense(parameter):
        return False
    shape, strides, where = parameter.shape, parameter.stride(), parameter.device
    return all(
        t is not None and _dense(t) and t.shape == shape and t.stride() == strides
        and t.device == where
        for t in tensors
    )  # fmt: skip


def _dense(t: Tensor) -> bool:
    """Whether ``t`` is plain float32 memory without gaps or overlaps."""
    plain = type(t) in (Tensor, torch.nn.Parameter) and t.layout is torch.strided
    if not plain or t.dtype != torch.float32:
        return False
    if t.is_contiguous():
        return True
    wanted = 1
    for step, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size != 1 and step != wanted:
            return False
        wanted *= size
    return True


def warm(rule: Rule, where: torch.device) -> None:
    """Compile and load the kernel of ``rule``, which no capture can do.

    Steps that run as always do not use it. Raises KernelError where it does not compile.
    """
    there = serving(torch.empty(0, device=where))
    if there is not None:
        there.warm(_kernel(rule.code))


class Target(NamedTuple):
    """One parameter that :func:`takes` accepted."""

    parameter: Tensor
    grad: Tensor
    states: Sequence[Tensor]  # in the order of the rule
    steps: Tensor | None = None  # (): float32, with this step counted, if the device counts


def step(
    gpu: Gpu, rule: Rule, targets: Sequence[Target], rate: Tensor, found: Tensor | None = None
) -> None:
    """Step all of ``targets``. ``rate``: float32 on the device, one number, or three when counted.
    ``found``: (1,) float32 on the device; if it is not 0 at that time, nothing is stepped. A
    recording keeps alive what its replays read: the table, the states and the rate.
    """
    table = array("q")
    for parameter, grad, states, steps in targets:
        written = [t.data_ptr() for t in (parameter, *states)]
        read, count = grad.data_ptr(), parameter.numel()
        aligned = not any(address % 16 for address in (*written, read))
        tail = 0 if steps is None else steps.data_ptr()
        for at in range(0, count, CHUNK):
            places = [address + 4 * at for address in written]
            table.extend((*places, *(0,) * (4 - len(places)), read + 4 * at, tail))
            table.extend((min(CHUNK, count - at), aligned))
    if not table:
        return
    chunks = gpu.upload(table)
    gpu.launch(
        _kernel(rule.code), (len(table) // 8, 1, 1), (_BLOCK, 1, 1), 0,
        (
            c_void_p(chunks.data_ptr()), c_void_p(rate.data_ptr()), c_int32(rule.flags),
            *map(c_float, rule[3:]), pointer(found),
        ),
    )  # fmt: skip
    torch.autograd.graph.increment_version([w for t in targets for w in (t.parameter, *t.states)])
    recorded = recording.current()
    if recorded is not None:
        recorded.keep(rate, found, [(t.parameter.detach(), t.states, t.steps) for t in targets])


@cache
def _kernel(code: int) -> Kernel:
    defines = {"RECAST_RULE": code, "RECAST_BLOCK": _BLOCK}
    return Kernel(nvrtc.program("dense_update.cu", defines=defines), "dense_update")
