"""Any part of a dropout mask as torch draws it on a CPU.

Where the kernel of ``torch_draws`` draws the same numbers as torch, those before and after the part
are skipped, so that a rank gets its rows of the mask of a global batch in less time than torch
takes for these rows alone. Elsewhere (MKL on Intel's processors, GPUs) torch draws the whole mask.
Either way the generator ends in the state after all draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recast.runtime import device
from recast.runtime.mlp import torch_draws

# Elements below which reading and writing the generator's state costs more than it saves.
_WORTH = 2048


def drawn(
    count: int, before: int, after: int, p: float, like: Tensor, source: torch.Generator
) -> Tensor:
    """(count,) of ``empty(before + count + after).bernoulli_(p).div_(p)``, starting at ``before``.

    With the dtype and device of ``like``; ``source`` is a generator of that device.
    """
    total = before + count + after
    if like.is_cpu and total >= _WORTH and torch_draws.why_not() is None:
        made = torch.empty(count, dtype=torch.float32)
        one = float(torch.ones(1).div_(p)) if like.dtype is torch.float32 else 1.0
        # The GIL is held from here to the end, so no other Python thread draws in between.
        state = source.get_state()
        device.extension().bernoulli(state, p, one, made, None, before, after)
        source.set_state(state)
        return made if like.dtype is torch.float32 else made.to(like.dtype).div_(p)
    whole = torch.empty(total, dtype=like.dtype, device=like.device)
    return whole.bernoulli_(p, generator=source).div_(p)[before : before + count]
