"""Initial values depend on (seed, table, row, column) alone, and have the right distribution."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from recast.errors import UsageError
from recast.runtime.ranks import initial_rows
from recast.runtime.ranks.initial_rows import rows


def test_philox_gives_the_published_words() -> None:
    """Known answers of Philox4x32-10, from the authors' own test vectors."""
    zero = torch.zeros(1, 1, dtype=torch.long)
    made = initial_rows._philox(zero, zero[0], (0, 0))
    assert made.flatten().tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_the_inverse_of_the_normal_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(2**32, (4000,), generator=generator)
    words[:5] = torch.tensor([0, 2**32 - 1, 2**31, 40, 322122547])
    p = (words.double() + 0.5) / 2**32  # no other p comes to be
    exact = statistics.NormalDist()
    truth = torch.tensor([exact.inv_cdf(x) for x in p.tolist()], dtype=torch.float64)
    assert (initial_rows._normal(p) - truth).abs().max() < 1e-13


@pytest.mark.parametrize("kind", ["normal", "uniform"])
@pytest.mark.parametrize("dim", [1, 3, 8, 21])
def test_a_value_depends_on_its_own_place_only(
    kind: str, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([5, 0, 2**40 + 1, -3, 5, 2**63 - 1, -(2**63)])
    whole = rows(ids, dim, seed=7, name="t", kind=kind)  # type: ignore[arg-type]
    assert torch.equal(whole[0], whole[4]) and len(set(map(tuple, whole.tolist()))) == 6
    for k, one in enumerate(ids.split(1)):
        assert torch.equal(rows(one, dim, seed=7, name="t", kind=kind)[0], whole[k])  # type: ignore[arg-type]
    for a in range(0, dim, 2):
        for b in range(a, dim + 1, 3):
            cut = rows(ids, dim, seed=7, name="t", kind=kind, columns=(a, b))  # type: ignore[arg-type]
            assert torch.equal(cut, whole[:, a:b])
    monkeypatch.setattr(initial_rows, "_BLOCK", 16)
    assert torch.equal(rows(ids, dim, seed=7, name="t", kind=kind), whole)  # type: ignore[arg-type]


def test_seeds_and_tables_know_nothing_of_each_other() -> None:
    ids = torch.arange(4000)
    one = rows(ids, 8, seed=1, name="t").flatten()
    for other in (rows(ids, 8, seed=2, name="t"), rows(ids, 8, seed=1, name="u")):
        correlation = torch.corrcoef(torch.stack([one, other.flatten()]))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(len(one))


def test_moments_and_neighbours() -> None:
    made = rows(torch.arange(20000), 12, seed=3, name="t").double()
    n = made.numel()
    assert abs(made.mean()) < 5 / math.sqrt(n)
    assert abs(made.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((made**4).mean() - 3) < 5 * math.sqrt(96 / n)
    limit = 5 / math.sqrt(n)
    assert abs((made[1:] * made[:-1]).mean()) < limit  # rows
    assert abs((made[:, 1:] * made[:, :-1]).mean()) < limit  # columns
    flat = rows(torch.arange(20000), 12, seed=3, name="t", kind="uniform", a=-2.0, b=6.0).double()
    assert flat.min() >= -2 and flat.max() <= 6
    counts = torch.histc(flat, 64, -2, 6)
    assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 63 + 5 * math.sqrt(2 * 63)  # chi squared


def test_wrong_questions() -> None:
    with pytest.raises(UsageError, match="kinds are"):
        rows(torch.arange(2), 4, seed=0, name="t", kind="cauchy")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="columns from 0 to 4"):
        rows(torch.arange(2), 4, seed=0, name="t", columns=(0, 5))
