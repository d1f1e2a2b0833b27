"""Machines: presets, their numbers of ranks, JSON, and what cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from recast.errors import UsageError
from recast.runtime.topology import PRESETS, Topology, detect, named


@pytest.mark.parametrize("name", PRESETS)
def test_presets_scale_by_hosts(name: str) -> None:
    base = named(name)
    twice = named(f"{name}x{2 * base.ranks}")
    assert (twice.hosts, twice.ranks_per_host) == (2 * base.hosts, base.ranks_per_host)
    assert twice.host(base.ranks) == 1
    assert named(f"{name}x1").hosts == 1
    assert Topology.from_dict(json.loads(json.dumps(twice.to_dict()))) == twice


def test_json_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(PRESETS["cpu"].to_dict()))
    assert named(str(path)) == PRESETS["cpu"]


def test_detect() -> None:
    here = detect(3)
    assert (here.ranks, here.hosts) == (3, 1)
    assert 0 < here.device_memory <= here.host_memory
    assert named("here").ranks >= 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dgx-a10", "no topology"),
        ("dgx-a100x12", "12 ranks of dgx-a100"),
        ("dgx-a100x0", "no ranks"),
        ("none.json", "No such file"),
    ],
)
def test_unknown(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        named(name)


def test_what_cannot_be() -> None:
    base = PRESETS["dgx-a100"]
    with pytest.raises(UsageError, match="8 ranks on 3 hosts"):
        replace(base, hosts=3)
    with pytest.raises(UsageError, match="intra_host=0"):
        replace(base, intra_host=0)
    with pytest.raises(UsageError, match="unknown field 'gpus'"):
        Topology.from_dict(base.to_dict() | {"gpus": 8})
