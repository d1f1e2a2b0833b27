"""The machines that a plan is for: ranks, hosts, memory and bandwidths.

Presets hold the makers' figures (peak, one direction); the cost model knows which part of a peak is
reached. ``"dgx-a100x16"`` is the preset ``dgx-a100`` with 16 ranks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

import torch

from recast.errors import UsageError

from . import json_text

GB, GIB = 10**9, 2**30
MOST_RANKS = 2**16  # more than any machine has: a slip of the keyboard, which would plan for hours


@dataclass(frozen=True, slots=True)
class Topology:
    """``ranks`` equal devices on ``hosts`` equal machines. Bytes, bytes/s, operations/s, seconds.

    Bandwidths are per rank and direction, except ``host_bandwidth``: that of a host's memory, which
    its ranks share.
    """

    name: str
    ranks: int
    hosts: int
    device_memory: int  # of one rank
    host_memory: int  # of one host
    memory_bandwidth: float  # device memory
    intra_host: float  # to the other ranks of the host
    inter_host: float  # to ranks of other hosts
    host_link: float  # device to host memory
    host_bandwidth: float
    flops: float  # of the dense part: TF32 on GPUs that have it, else fp32
    latency: float = 2e-5  # of one collective

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise UsageError(f"topology {self.name!r}: its name is no text")
        counts = {"ranks": self.ranks, "hosts": self.hosts}
        wrong = [f"{k}={v}" for k, v in counts.items() if not _count(v)]
        rates = {f.name: getattr(self, f.name) for f in fields(self)[3:]}
        wrong += [f"{k}={v}" for k, v in rates.items() if not _positive(v, k == "host_memory")]
        if wrong:
            raise UsageError(
                f"topology {self.name}: {', '.join(wrong)}",
                why=f"counts are whole numbers from 1 to {MOST_RANKS:,}, memory and rates finite"
                " numbers of more than 0",
            )
        if self.ranks % self.hosts:
            raise UsageError(
                f"topology {self.name}: {self.ranks} ranks on {self.hosts} hosts",
                why="every host has the same number of ranks",
                tries=(f"hosts={_largest_divisor(self.ranks, self.hosts)}",),
            )

    @property
    def ranks_per_host(self) -> int:
        return self.ranks // self.hosts

    def host(self, rank: int) -> int:
        """The host of ``rank``: ranks are numbered host by host."""
        return rank // self.ranks_per_host

    def of(self, ranks: int) -> Topology:
        """The same machines, as many as ``ranks`` need. Raises UsageError when more ranks than a
        host has do not fill whole hosts.
        """
        each = self.ranks_per_host
        if ranks <= each:
            return replace(self, ranks=ranks, hosts=1)
        if ranks % each:
            raise UsageError(
                f"{ranks} ranks of {self.name}: {each} fit a host",
                why="every host has the same number of ranks",
                tries=(f"{ranks // each * each} ranks", f"{-(-ranks // each) * each} ranks"),
            )
        return replace(self, ranks=ranks, hosts=ranks // each)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: Any) -> Topology:
        """Raises UsageError for unknown or missing fields."""
        names = [f.name for f in fields(Topology)]
        if not isinstance(data, dict):
            raise UsageError(f"a topology is a JSON object, not a {type(data).__name__}")
        unknown = [k for k in data if k not in names]
        missing = [k for k in names[:-1] if k not in data]
        if unknown or missing:
            raise UsageError(
                f"topology {data.get('name') or 'without a name'}: "
                + ", ".join(
                    [f"unknown field {k!r}" for k in unknown] + [f"no {k}" for k in missing]
                ),
                why=f"its fields are {', '.join(names)}",
            )
        return Topology(**data)

    def __str__(self) -> str:
        hosts = f"{self.hosts} host{'s' if self.hosts > 1 else ''}"
        return (
            f"{self.name}: {self.ranks} rank{'s' if self.ranks > 1 else ''} on {hosts},"
            f" {self.device_memory / GIB:.0f} GiB each, {self.host_memory / GIB:.0f} GiB a host;"
            f" GB/s: memory {self.memory_bandwidth / GB:.0f}, within a host"
            f" {self.intra_host / GB:.0f}, between hosts {self.inter_host / GB:.1f},"
            f" to host memory {self.host_link / GB:.0f}"
        )


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_RANKS


def _positive(value: object, or_zero: bool) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 < value < float("inf") or (or_zero and value == 0)


def _largest_divisor(ranks: int, most: int) -> int:
    return next(h for h in range(min(most, ranks), 0, -1) if ranks % h == 0)


# Makers' data sheets, peak. NVLink is quoted for both directions together: half of it here. One
# network card for each GPU of a DGX (200 and 400 Gb/s); one of 100 Gb/s for a PCIe box.
PRESETS: dict[str, Topology] = {
    t.name: t
    for t in (
        # 8 x A100-SXM4-80GB, NVLink 600 GB/s, 8 x HDR 200 Gb/s, PCIe 4 x16, 2 x EPYC 7742
        Topology("dgx-a100", 8, 1, 80 * GIB, 2000 * GB, 2039e9, 300e9, 25e9, 32e9, 380e9, 156e12),
        # 8 x H100-SXM5-80GB, NVLink 900 GB/s, 8 x NDR 400 Gb/s, PCIe 5 x16, 2 x Xeon 8480C
        Topology("dgx-h100", 8, 1, 80 * GIB, 2000 * GB, 3350e9, 450e9, 50e9, 64e9, 614e9, 494e12),
        # 8 x H200-SXM5-141GB, otherwise the H100's
        Topology("dgx-h200", 8, 1, 141 * GB, 2000 * GB, 4800e9, 450e9, 50e9, 64e9, 614e9, 494e12),
        # 4 cards without NVLink: what they say to each other crosses PCIe
        Topology("pcie-a100", 4, 1, 80 * GIB, 512 * GB, 1935e9, 32e9, 3.1e9, 32e9, 200e9, 156e12),
        Topology("pcie-h100", 4, 1, 80 * GIB, 512 * GB, 2000e9, 64e9, 3.1e9, 64e9, 300e9, 378e12),
        Topology("pcie-l40s", 4, 1, 48 * GB, 512 * GB, 864e9, 32e9, 3.1e9, 32e9, 300e9, 183e12),
        # 4 processes on one ordinary server; they share 100 GB/s of memory
        Topology("cpu", 4, 1, 64 * GIB, 256 * GIB, 25e9, 5e9, 1.25e9, 25e9, 100e9, 0.5e12, 2e-4),
    )
}


def named(name: str) -> Topology:
    """The topology called ``name``: a preset, ``"<preset>x<ranks>"``, ``"here"`` (:func:`detect`),
    or a JSON file. Raises UsageError for anything else.
    """
    if name == "here":
        return detect()
    if name.endswith(".json"):
        return _read(name)
    if name in PRESETS:
        return PRESETS[name]
    scaled = re.fullmatch(r"(.+?)x(\d+)", name)
    if scaled and scaled[1] in PRESETS:
        if int(scaled[2]) < 1:
            raise UsageError(f"topology {name!r}: no ranks", tries=(f"{scaled[1]}x8",))
        return PRESETS[scaled[1]].of(int(scaled[2]))
    if os.path.isfile(name):
        return _read(name)
    near = get_close_matches(scaled[1] if scaled else name, PRESETS, n=1)
    raise UsageError(
        f"no topology {name!r}",
        why=f"there are {', '.join(PRESETS)}, each with x<ranks>, here, and JSON files",
        tries=(f"{near[0]}x16",) if near else ("dgx-a100x16",),
    )


def _read(path: str) -> Topology:
    data = json_text.of_file(path, f"topology {path}")
    try:
        return Topology.from_dict(data)
    except UsageError as error:
        raise UsageError(f"{path}: {error.what}", why=error.why, tries=error.tries) from error


def detect(ranks: int | None = None) -> Topology:
    """The present machine as one host; ``ranks`` None means its GPUs, or one process on its CPU.

    Memory is that of the devices. Bandwidths are not measured: they are those of the preset with
    the same device, or with the most similar one.
    """
    host = _host_memory()
    if not torch.cuda.is_available():
        n = ranks or 1
        base = PRESETS["cpu"]
        share = host // n
        return replace(
            base, name="here", ranks=n, hosts=1, device_memory=share, host_memory=host,
            memory_bandwidth=base.host_bandwidth / n, flops=_cpu_flops() / n,
        )  # fmt: skip
    gpu = torch.cuda.get_device_properties(0)
    base = PRESETS[_preset_of(gpu.name)]
    n = ranks or torch.cuda.device_count()
    return replace(
        base, name="here", ranks=n, hosts=1, device_memory=gpu.total_memory, host_memory=host
    )


def _preset_of(gpu: str) -> str:
    """The preset with the device ``gpu``, as torch names it; that of one without is pcie-a100."""
    on_pcie = "PCIE" in gpu.upper() or "L40" in gpu  # "A100-PCIE-40GB", "A100 80GB PCIe"
    for word, preset in _devices():
        if word in gpu and preset.startswith("pcie") == on_pcie:
            return preset
    return "pcie-a100"


def _devices() -> Iterator[tuple[str, str]]:
    """``(what is in its name, preset)`` of every GPU that has one."""
    for preset in PRESETS:
        _, dash, gpu = preset.partition("-")
        if dash:
            yield gpu.upper().replace("L40S", "L40"), preset


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_flops() -> float:
    """fp32: cores x 16 lanes x 2 operations x 2 GHz, the half of what AVX-512 cores can do."""
    return (os.cpu_count() or 1) * 16 * 2 * 2e9
