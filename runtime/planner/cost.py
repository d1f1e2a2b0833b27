"""What a shard costs its rank in one training step: time in ms, memory in bytes.

B samples per rank, W ranks, G = B W; ``n`` ids and ``v`` vectors per sample, ``u`` distinct rows in
a global batch, ``d`` columns of the shard, ``e`` bytes of a weight and ``s`` of its state, ``f``
and ``b`` bytes of a value on the wire, forward and backward.

Compute, for the kernels of this package (fused pooled lookup; sort, segment sum, looked-up rows
updated in one pass), by bytes, as none of them is bound by arithmetic:

    lookup    G n (id_bytes + d e) + G v d 4           an id reads a row, a vector is written
    backward  G n (id_bytes + SORT) + G n d 4          radix sort of (id, position) pairs; a row of
                                                       the gradient is read for every id
    update    u d 2 (e + s)                            weights and state, read and written

Communication: ids go to owners, vectors come back, gradients return (all-to-all: the part (W-1)/W
leaves a rank; within a host at ``intra_host``, the rest at ``inter_host``):

    ids       G n id_bytes                             a row shard gets its part, a column shard all
    rows      G v d f                                  of row shards partial sums, of the bags that
                                                       have an id there
    gradient  G v d b                                  likewise
    all-reduce of a data-parallel table's dense gradient, a ring: 2 (W-1)/W rows d 4, slower link

Both directions of a link run at once. A rank is charged for its traffic as an owner, which covers
everything: owners receive ids, send vectors and receive gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..topology import Topology
from .load import Dense, TableLoad

MS = 1e3
# The fraction of peak that is reached. Memory: random rows of 64 B and more, A100 and H100
# (streaming reaches 0.9); links: NCCL's bus bandwidth for large all-to-alls; flops: GEMMs of MLPs.
MEMORY, LINK, FLOPS = 0.65, 0.75, 0.5
SORT = 16 * 4  # bytes per id: 8-byte pairs, read and written by each of 4 radix passes
OVERHEAD = 5e-6  # seconds per table and rank: launches, descriptors and index arithmetic


@dataclass(frozen=True, slots=True)
class Work:
    """What one shard adds to its rank: ms of compute and of communication, and bytes."""

    compute: float
    communication: float
    device: float
    host: float = 0.0


@dataclass(frozen=True, slots=True)
class Setting:
    """The parameters of a step that all tables share."""

    topology: Topology
    batch: int  # samples of one rank
    forward: float = 4.0  # bytes of a value on the wire
    backward: float = 4.0

    @property
    def samples(self) -> int:
        return self.batch * self.topology.ranks


def lookup_bytes(load: TableLoad, samples: float, ids: float, rows: float, dim: float) -> float:
    """Bytes to and from memory, forward, backward and update: the equations above."""
    element, state = load.element, load.state_element + load.state_row / load.table.dim
    vectors = samples * answers(load, ids / load.ids if load.ids else 1.0)
    forward = ids * samples * (load.id_bytes + dim * element) + vectors * dim * 4
    backward = ids * samples * (load.id_bytes + SORT + dim * 4)
    return forward + backward + rows * dim * 2 * (element + state)


def answers(load: TableLoad, part: float) -> float:
    """Vectors per sample from an owner of the fraction ``part`` of the rows: one for each bag with
    an id there, which a bag of h ids has with probability 1 - (1 - part)^h.
    """
    if load.pooling == "none" or not load.lookups:
        return load.ids * part
    return float(load.lookups * (1 - (1 - part) ** (load.ids / load.lookups)))


def distinct_rows(load: TableLoad, samples: float) -> float:
    """How many distinct rows ``samples`` samples look up."""
    return min(load.table.rows, load.ids * samples * load.distinct)


def wire_seconds(setting: Setting, size: float) -> float:
    """Seconds of an all-to-all in which one rank has ``size`` bytes for all ranks, evenly."""
    t = setting.topology
    inside = size * (t.ranks_per_host - 1) / t.ranks / t.intra_host
    outside = size * (t.ranks - t.ranks_per_host) / t.ranks / t.inter_host
    return (inside + outside) / LINK


def exchanged(
    load: TableLoad, setting: Setting, rows: float, dim: float
) -> tuple[float, float, float]:
    """Bytes of ids that a shard's owner receives, of vectors it sends, of gradients it receives."""
    part = rows / max(load.table.rows, 1)
    ids, vectors = load.ids * part, setting.samples * answers(load, part) * dim
    asked = setting.samples * ids * load.id_bytes
    return asked, vectors * setting.forward, vectors * setting.backward


def shard(load: TableLoad, setting: Setting, rows: float, dim: float, memory: str) -> Work:
    """The work of a shard of ``rows`` x ``dim``, for all samples: its share of the ids, vectors of
    ``dim`` columns.
    """
    t, samples = setting.topology, setting.samples
    part = rows / max(load.table.rows, 1)
    ids = load.ids * part
    touched = distinct_rows(load, samples) * part
    moved = lookup_bytes(load, samples, ids, touched, dim)
    asked, sent, returned = exchanged(load, setting, rows, dim)
    seconds = wire_seconds(setting, asked + sent + returned)
    vectors = sent / setting.forward
    held = _held(load, rows, dim)
    buffers = asked + vectors * (4 + 4)  # ids, vectors and their gradients at the owner
    if memory == "host":
        crossing = samples * ids * dim * load.element + touched * dim * 2 * load.element
        compute = moved / (t.memory_bandwidth * MEMORY) + crossing / (t.host_link * LINK)
        return Work((compute + OVERHEAD) * MS, seconds * MS, buffers, held)
    compute = moved / (t.memory_bandwidth * MEMORY) + OVERHEAD
    return Work(compute * MS, seconds * MS, held + buffers)


def replica(load: TableLoad, setting: Setting) -> Work:
    """A whole data-parallel table: a local lookup, a dense gradient, its all-reduce and update."""
    t, table = setting.topology, load.table
    touched = distinct_rows(load, setting.batch)
    moved = lookup_bytes(load, setting.batch, load.ids, touched, table.dim)
    size = table.rows * table.dim * 4.0
    state = table.rows * load.state_bytes
    dense = 0.0 if t.ranks == 1 else 3 * size + 2 * (_held(load, table.rows, table.dim) + state)
    compute = (moved + dense) / (t.memory_bandwidth * MEMORY) + OVERHEAD
    slowest = t.inter_host if t.hosts > 1 else t.intra_host
    seconds = 2 * (t.ranks - 1) / t.ranks * size / (slowest * LINK)
    buffers = setting.batch * load.vectors * table.dim * 8 + (size if t.ranks > 1 else 0)
    return Work(compute * MS, seconds * MS, _held(load, table.rows, table.dim) + buffers)


def _held(load: TableLoad, rows: float, dim: float) -> float:
    """Weights and optimizer state."""
    return rows * (dim * (load.element + load.state_element) + load.state_row)


@dataclass(frozen=True, slots=True)
class DenseWork:
    """The work of every rank, in ms and bytes. ``hidden``: communication that the bottom MLP
    hides.
    """

    compute: float
    communication: float
    hidden: float
    memory: float


def dense(part: Dense, setting: Setting) -> DenseWork:
    """The slower of arithmetic and memory; a ring all-reduce; latencies of 4 collectives."""
    t = setting.topology
    rate = t.flops * FLOPS
    seconds = max(
        part.flops * setting.batch / rate,
        part.traffic * setting.batch / (t.memory_bandwidth * MEMORY),
    )
    update = part.parameters * (3 + 2 * part.optimizer_states) / (t.memory_bandwidth * MEMORY)
    slowest = t.inter_host if t.hosts > 1 else t.intra_host
    reduced = 2 * (t.ranks - 1) / t.ranks * part.parameters / (slowest * LINK)
    calls = 4 * t.latency if t.ranks > 1 else 0.0
    hidden = part.hideable_flops * setting.batch / rate if t.ranks > 1 else 0.0
    memory = part.parameters * (2 + part.optimizer_states) + part.traffic / 3 * setting.batch
    return DenseWork((seconds + update) * MS, (reduced + calls) * MS, hidden * MS, memory)
