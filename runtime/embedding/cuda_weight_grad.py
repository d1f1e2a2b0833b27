"""The gradient of per-sample weights on a GPU, by ``csrc/cuda/embedding_weight_grad.cu``."""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p
from functools import lru_cache

import torch
from torch import Tensor

from recast.runtime.embedding.call import Call
from recast.runtime.embedding.cuda_classes import BLOCK, CODES, takes
from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel, pointer
from recast.runtime.gpu.gpu import Gpu


@lru_cache(maxsize=64)
def _weight_grad(table: int, grad: int, lanes: int) -> Kernel:
    defines = {
        "RECAST_TABLE": table, "RECAST_GRAD": grad, "RECAST_LANES": lanes, "RECAST_BLOCK": BLOCK,
    }  # fmt: skip
    program = nvrtc.program("embedding_weight_grad.cu", defines=defines)
    return Kernel(program, "embedding_weight_grad")


def sample_weights(call: Call, k: int, grad: Tensor, on: Gpu) -> Tensor | None:
    """The gradient of the per-sample weights of lookup ``k``, shaped like its ids.

    ``grad``: (bags, dim). None if the kernel does not take the table or the gradient.
    """
    weight, ids, offsets = call.weight(k), call.ids[k].contiguous(), call.offsets[k]
    if not takes(weight) or grad.dtype not in CODES:
        return None
    if grad.stride(1) != 1:
        grad = grad.contiguous()
    if offsets is not None:
        offsets = offsets.contiguous()
    out = torch.empty(ids.shape, dtype=weight.dtype, device=ids.device)
    dim, padding, count = weight.shape[1], call.left_out(k), ids.numel()
    lanes = min(32, 1 << (max(dim, 1) - 1).bit_length())
    blocks = -(-count // (BLOCK // lanes))
    arguments: list[Argument] = [
        c_void_p(weight.data_ptr()), *map(c_int64, (*weight.shape, weight.stride(0))),
        c_void_p(ids.data_ptr()), c_int32(ids.dtype is torch.int64), c_int64(count),
        pointer(offsets),
        c_int32(offsets is not None and offsets.dtype is torch.int64),
        c_int64(0 if offsets is None else len(offsets)), c_int64(max(1, ids.shape[-1])),
        c_int64(len(grad)), c_int64(-1 if padding is None else padding),
        c_void_p(grad.data_ptr()), c_int64(grad.stride(0)), c_void_p(out.data_ptr()),
    ]  # fmt: skip
    kernel = _weight_grad(CODES[weight.dtype], CODES[grad.dtype], lanes)
    on.launch(kernel, (blocks, 1, 1), (BLOCK, 1, 1), 0, arguments)
    return out
