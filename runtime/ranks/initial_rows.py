"""The first value of a row: a function of (seed, table, row, column) and of nothing else.

    words = philox(key = sha256(seed, name), counter = (row, column // 4)),   p = (word + ½) / 2³²
    uniform: a + (b - a)·p          normal: a + b·Φ⁻¹(p)

So any rank can make any rows at any time, and gets the same values as a single process. Only
integers and the five operations that IEEE 754 rounds correctly (+ - · / √) are used, so the bits
are the same on every device, whatever the memory layout. Philox4x32-10: Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", 2011. Φ⁻¹: Wichura, algorithm AS 241 (PPND16), 1988, to
1e-16; p is at least 2⁻³³, so |Φ⁻¹| < 6.4 and the third of its three ranges is never needed.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import torch
from torch import Tensor

from recast.errors import UsageError

Kind = Literal["normal", "uniform"]

_BLOCK = 1 << 17  # values at once: the fastest of 2^14 to 2^18, temporaries included
_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_LN2 = 0.6931471805599453


def rows(
    ids: Tensor,
    dim: int,
    *,
    seed: int,
    name: str,
    kind: Kind = "normal",
    a: float = 0.0,
    b: float = 1.0,
    columns: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The first values of rows ``ids`` of table ``name``, on the device of ``ids``.

    Args:
        ids: (n,) int64, any.
        dim: columns of the whole table.
        kind: "normal": mean ``a``, deviation ``b``; "uniform": between ``a`` and ``b``.
        columns: first column, and the one after the last; None: all.

    Returns:
        (n, dim), or (n, columns), of ``dtype``.

    Raises:
        UsageError: an unknown ``kind``, or ``columns`` outside ``dim``.
    """
    first, end = columns or (0, dim)
    if kind not in ("normal", "uniform") or not 0 <= first <= end <= dim:
        raise UsageError(
            f"initial rows of {name}: kind={kind!r}, columns={columns}",
            why=f'kinds are "normal" and "uniform", columns from 0 to {dim}',
        )
    key = _key(seed, name)
    out = torch.empty(len(ids), end - first, dtype=dtype, device=ids.device)
    groups = torch.arange(first // 4, (end + 3) // 4, device=ids.device)
    step = max(1, _BLOCK // max(1, 4 * len(groups)))
    for at in range(0, len(ids), step):
        some = ids[at : at + step].long()
        words = _philox(some[:, None], groups, key).flatten(1)
        skipped = first - first // 4 * 4
        p = (words[:, skipped : skipped + end - first].double() + 0.5) * 2.0**-32
        values = a + (b - a) * p if kind == "uniform" else a + b * _normal(p)
        out[at : at + step] = values
    return out


def _key(seed: int, name: str) -> tuple[int, int]:
    """Two words; different for each table of one seed, and for each seed of one table."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def _philox(ids: Tensor, groups: Tensor, key: tuple[int, int]) -> Tensor:
    """(n, groups, 4) words below 2³², as int64; their products wrap, and keep the bits needed."""
    shape = torch.broadcast_shapes(ids.shape, groups.shape)
    c = [(ids & _MASK).expand(shape), ((ids >> 32) & _MASK).expand(shape), groups.expand(shape)]
    c.append(torch.zeros_like(c[2]))
    k0, k1 = key
    for _ in range(10):
        left, right = c[0] * _MULTIPLIERS[0], c[2] * _MULTIPLIERS[1]
        c = [
            (right >> 32).bitwise_and_(_MASK).bitwise_xor_(c[1]).bitwise_xor_(k0),
            right.bitwise_and_(_MASK),
            (left >> 32).bitwise_and_(_MASK).bitwise_xor_(c[3]).bitwise_xor_(k1),
            left.bitwise_and_(_MASK),
        ]
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack(c, -1)


# --- the inverse of the normal distribution ------------------------------------------------------

_A = (
    2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
    13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608,
)  # fmt: skip
_B = (
    5226.495278852854561, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867,
    5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0,
)  # fmt: skip
_C = (
    7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177,
    1.27045825245236838258, 3.64784832476320460504, 5.7694972214606914055,
    4.6303378461565452959, 1.42343711074968357734,
)  # fmt: skip
_D = (
    1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966,
    0.14810397642748007459, 0.68976733498510000455, 1.6763848301838038494,
    2.05319162663775882187, 1.0,
)  # fmt: skip


def _normal(p: Tensor) -> Tensor:
    """Φ⁻¹(p), float64."""
    q = p - 0.5
    r = 0.180625 - q * q
    z = q * _ratio(_A, _B, r)
    tail = (r < 0).nonzero(as_tuple=True)  # 15 % of all
    far = q[tail]
    r = (-_log(0.5 - far.abs())).sqrt() - 1.6
    z[tail] = _ratio(_C, _D, r) * far.sign()
    return z


def _ratio(upper: tuple[float, ...], lower: tuple[float, ...], x: Tensor) -> Tensor:
    return _polynomial(upper, x) / _polynomial(lower, x)


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    # Not addcmul: it rounds once where it is one instruction, and twice elsewhere.
    value = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        value = value.mul_(x).add_(coefficient)
    return value


def _log(x: Tensor) -> Tensor:
    """ln x = e·ln 2 + 2·artanh((m - 1)/(m + 1)), x = m·2ᵉ; torch's own differs by device."""
    m, e = torch.frexp(x)  # m in [1/2, 1)
    small = m < 0.7071067811865476
    m = torch.where(small, m * 2.0, m)
    e = e.double() - small.double()
    s = (m - 1.0) / (m + 1.0)  # |s| < 0.172, and 0.172²³ < 1e-17
    odd = tuple(1.0 / k for k in range(23, 0, -2))
    return e * _LN2 + 2.0 * s * _polynomial(odd, s * s)
