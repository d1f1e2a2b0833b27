"""Machines: presets, their numbers of ranks, JSON, and impossible ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import recast
from recast.errors import UsageError
from recast.runtime.topology import GIB, PRESETS, Topology, detect, named


@pytest.mark.parametrize("name", PRESETS)
def test_presets_scale_by_hosts(name: str) -> None:
    base = named(name)
    twice = named(f"{name}x{2 * base.ranks}")
    assert (twice.hosts, twice.ranks_per_host) == (2 * base.hosts, base.ranks_per_host)
    assert twice.host(base.ranks) == 1
    assert named(f"{name}x1").hosts == 1
    assert Topology.from_dict(json.loads(json.dumps(twice.to_dict()))) == twice


def test_json_file(tmp_path: Path) -> None:
    (tmp_path / "machines").write_text(json.dumps(PRESETS["cpu"].to_dict()))
    assert named(str(tmp_path / "machines")) == PRESETS["cpu"]
    (tmp_path / "part.json").write_text('{"name": "x"}')
    with pytest.raises(UsageError, match=r"part\.json: topology x: no ranks"):
        named(str(tmp_path / "part.json"))
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(PRESETS["cpu"].to_dict()))
    assert named(str(path)) == PRESETS["cpu"]


def test_detect() -> None:
    here = detect(3)
    assert (here.ranks, here.hosts) == (3, 1)
    assert 0 < here.device_memory <= here.host_memory
    assert named("here").ranks >= 1


@pytest.mark.parametrize(
    ("gpu", "preset"),
    [
        ("NVIDIA A100-SXM4-80GB", "dgx-a100"),
        ("NVIDIA A100 80GB PCIe", "pcie-a100"),
        ("A100-PCIE-40GB", "pcie-a100"),
        ("NVIDIA H100 80GB HBM3", "dgx-h100"),
        ("NVIDIA H100 PCIe", "pcie-h100"),
        ("NVIDIA H200", "dgx-h200"),
        ("NVIDIA L40S", "pcie-l40s"),
        ("Tesla V100-SXM2-16GB", "pcie-a100"),  # of no preset: not taken for a processor
    ],
)
def test_a_gpu_is_known_by_its_name(gpu: str, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(name=gpu, total_memory=GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: found)
    here = detect()
    assert (here.ranks, here.hosts, here.device_memory) == (2, 1, GIB)
    assert here.memory_bandwidth == PRESETS[preset].memory_bandwidth
    assert here.intra_host == PRESETS[preset].intra_host
    assert detect(1).ranks == 1


def test_as_text() -> None:
    assert str(named("dgx-a100x16")) == (
        "dgx-a100: 16 ranks on 2 hosts, 80 GiB each, 1863 GiB a host; GB/s: memory 2039,"
        " within a host 300, between hosts 25.0, to host memory 32"
    )
    assert str(named("cpux1")).startswith("cpu: 1 rank on 1 host, 64 GiB each")


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
    with pytest.raises(UsageError, match="8 ranks on 3 hosts") as caught:
        replace(base, hosts=3)
    assert caught.value.tries == ("hosts=2",)
    with pytest.raises(UsageError, match="intra_host=0"):
        replace(base, intra_host=0)
    for name, value in (("flops", float("inf")), ("latency", float("nan")), ("hosts", True)):
        with pytest.raises(UsageError, match=f"{name}={value}(.|\n)*finite numbers"):
            replace(base, **{name: value})
    with pytest.raises(UsageError, match="ranks=800000, hosts=100000"):
        base.of(800_000)
    with pytest.raises(UsageError, match="its name is no text"):
        replace(base, name=3)
    with pytest.raises(UsageError, match="unknown field 'gpus'"):
        Topology.from_dict(base.to_dict() | {"gpus": 8})
    without = {k: v for k, v in base.to_dict().items() if k not in ("flops", "latency")}
    with pytest.raises(UsageError, match="no flops"):
        Topology.from_dict(without)
    assert Topology.from_dict(without | {"flops": base.flops}) == base  # latency has a default


@pytest.mark.parametrize(
    ("asked", "name", "hosts"),
    [
        (PRESETS["cpu"], "cpu", 2),
        ("cpu", "cpu", 2),
        ("cpux16", "cpu", 2),
        ("dgx-a100", "dgx-a100", 1),
        ("here", "here", 1),
    ],
)
def test_optimize_takes_as_many_machines_as_ranks_need(
    asked: Topology | str, name: str, hosts: int
) -> None:
    """A plan for more ranks than run would give rows to ranks that do not exist."""
    model, ids = torch.nn.EmbeddingBag(100, 8), torch.zeros(4, 3, dtype=torch.long)
    made = recast.optimize(model, example=ids, world_size=8, topology=asked).plan
    assert (made.world_size, made.topology.ranks) == (8, 8)
    assert (made.topology.name, made.topology.hosts) == (name, hosts)


def test_optimize_refuses_hosts_in_part() -> None:
    model, ids = torch.nn.EmbeddingBag(100, 8), torch.zeros(4, 3, dtype=torch.long)
    with pytest.raises(UsageError, match="6 ranks of cpu: 4 fit a host"):
        recast.optimize(model, example=ids, world_size=6, topology="cpu")
