"""Which algorithms of cublasLt treat relu and its mask as torch does.

NVIDIA does not specify what cublasLt writes into the mask at 0, and some algorithms turn NaN into
0, which would hide that a model diverges. So each algorithm is probed on its first use, with a
product of zeros and one of NaN. One that lets the gradient pass at 0 is not trusted with masks: a
kernel derives them from the output. One that hides NaN is not trusted with relu: a kernel does
both. (Whether a gradient passes at NaN is left open: the loss is NaN in any case.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recast.runtime import fastest
from recast.runtime.gpu import cublaslt
from recast.runtime.gpu.cublaslt import Ready
from recast.runtime.mlp import mask as mlp_mask
from recast.runtime.mlp.product_ways import RANKS, kernel_of
from recast.runtime.recorded import recording


class ReluBehaviour(NamedTuple):
    """How an algorithm with a relu epilogue behaves."""

    stops_at_zero: bool  # its mask bit at 0 is 0; meaningless without a mask
    shows_nan: bool  # relu of NaN is NaN


_known: dict[tuple[object, ...], ReluBehaviour] = {}  # by algorithm, dtype, precision and epilogue


def note_trust(key: tuple[object, ...], products: Sequence[Ready | None]) -> None:
    """Note which algorithms are trusted with relu and mask, and what is wrong with the others."""
    for way, ready in zip(RANKS, products, strict=True):
        if ready is None:
            continue
        found, masked = _known.get(kernel_of(ready)), bool(ready.addresses[-1])
        if found is None:
            said = "by a kernel: not asked"
        elif not found.shows_nan:
            said = "by a kernel: relu of NaN would be 0"
        elif masked and not found.stops_at_zero:
            said = "by a kernel: the bit of a sum of 0 is set"
        else:
            said = "by the product"
        fastest.leave_out(key, f"{'mask' if masked else 'relu'}, {way}", said)


def run_trusted(ready: Ready | None, x: Tensor, bits: Tensor | None) -> bool | None:
    """Run a product with relu, and its mask if ``bits`` is given, if it agrees with torch.

    False: it does not. None: there is no such product, or it cannot be probed now. In both cases
    nothing it wrote may be used.
    """
    if ready is None:
        return None
    found = _known.get(kernel_of(ready))
    if found is None:
        if recording.current() is not None or (
            x.is_cuda and torch.cuda.is_current_stream_capturing()
        ):
            return None
        found = _known[kernel_of(ready)] = _probe(ready, x, bits)
    trusted = found.shows_nan and (found.stops_at_zero or bits is None)
    if trusted:
        ready.run()
    return trusted


def _probe(ready: Ready, x: Tensor, bits: Tensor | None) -> ReluBehaviour:
    """Probe what it makes of sums that are exactly 0, and of NaN. Synchronises the device."""
    weight, _, out, bias, mask = ready.addresses
    # The product is made for the leading dimension of x, and for its and the bias's alignment.
    given = x.new_zeros(x.shape[0] * max(x.stride(0), x.shape[1]) + cublaslt.ALIGNMENT)
    none = x.new_zeros(ready.out.shape[1] + cublaslt.ALIGNMENT)
    of_x, of_bias = (
        -(-t.data_ptr() // cublaslt.ALIGNMENT) * cublaslt.ALIGNMENT for t in (given, none)
    )
    asking = ready._replace(addresses=(weight, of_x, out, of_bias if bias else 0, mask))
    asking.run()
    stops = bits is not None and not bool(mlp_mask.unpack(bits, ready.out.shape[1]).any())
    given.fill_(float("nan"))
    asking.run()
    return ReluBehaviour(stops, bool(ready.out.isnan().all()))
