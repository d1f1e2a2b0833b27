"""Any part of a dropout mask as torch draws it on a CPU.

The numbers before the part and behind it are passed over where the kernel of ``torch_draws`` draws
what torch draws, so that a rank can take its rows of the mask of a global batch for less than torch
takes for these rows alone. Elsewhere (MKL draws on Intel's processors, GPUs) torch draws the whole.
Either way the generator is left as by all the draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recast.runtime import device
from recast.runtime.mlp import torch_draws

# Elements below which reading and writing the state of the generator costs more than it brings.
_WORTH = 2048


def drawn(
    count: int, before: int, after: int, p: float, like: Tensor, source: torch.Generator
) -> Tensor:
    """(count,) of ``empty(before + count + after).bernoulli_(p).div_(p)``, from ``before`` on.

    Of the dtype and device of ``like``, which is also that of ``source``.
    """
    total = before + count + after
    if like.is_cpu and total >= _WORTH and torch_draws.why_not() is None:
        made = torch.empty(count, dtype=torch.float32)
        one = float(torch.ones(1).div_(p)) if like.dtype is torch.float32 else 1.0
        # The GIL is held from here to the end, so no other thread of python's draws in between.
        state = source.get_state()
        device.extension().bernoulli(state, p, one, made, None, before, after)
        source.set_state(state)
        return made if like.dtype is torch.float32 else made.to(like.dtype).div_(p)
    whole = torch.empty(total, dtype=like.dtype, device=like.device)
    return whole.bernoulli_(p, generator=source).div_(p)[before : before + count]
