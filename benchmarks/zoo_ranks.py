"""Models of public libraries, trained on two ranks: are their parameters those of one process?

    python benchmarks/zoo_ranks.py                                  # in the environment of make zoo
    python benchmarks/zoo_ranks.py --only deepctr/DIN,rechub
    python benchmarks/zoo_ranks.py --sharding column_wise

Each model takes two steps of SGD in train mode, on two processes over gloo with half of each batch,
and on one with all of it, from one seed. ``apart`` is the largest difference of a parameter or
buffer, as a share of how far it moved. A loss that is a sum over samples differs on ranks as under
DistributedDataParallel, and a parameter whose gradient is rounding moves at random: such models are
told from wrong ones by reading them. Exit code 1 if a model cannot be trained.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import record
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import recast
from recast.runtime import device
from recast.runtime.ranks import shards

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "ranks"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "zoo"))
import zoo_models
from harness import processes
from zoo_data import Subject
from zoo_judge import quiet

RANKS, ROWS, STEPS = 2, 24, 2
SAME = 1e-3  # of how far a parameter moved
FLOOR = 1e-5  # what moves less moves by rounding


def mean(out: Any) -> Tensor:
    """The mean of every output that leads to parameters."""
    found = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([t.float().mean() for t in found]).sum()


def joined(first: Any, second: Any) -> Any:
    """Two batches as one."""
    if isinstance(first, Tensor):
        return torch.cat([first, second])
    if isinstance(first, dict):
        return {k: joined(first[k], second[k]) for k in first}
    if isinstance(first, (list, tuple)):
        return type(first)(joined(a, b) for a, b in zip(first, second, strict=True))
    if hasattr(first, "interaction"):  # RecBole's
        return type(first)(joined(first.interaction, second.interaction))
    return first


def trained(model: nn.Module, optimizer: Any, batches: list[Any]) -> dict[str, Tensor]:
    """All parameters and buffers after a step on each batch."""
    torch.manual_seed(11)
    for batch in batches:
        optimizer.zero_grad()
        mean(model(*batch)).backward()
        optimizer.step()
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: t.detach().clone() for name, t in held.items() if t.is_floating_point()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def judged(subject: Subject, sharding: str) -> tuple[float, str]:
    """How far the two are apart, and the name of what is."""
    with quiet():
        model, batch = subject.build()
        model.train()
        parts = [[batch(ROWS, 10 * k + r) for k in range(STEPS)] for r in range(RANKS)]
        one = copy.deepcopy(model)
        wanted = trained(one, sgd(one), [joined(a, b) for a, b in zip(*parts, strict=True)])
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def rank(r: int) -> tuple[float, str]:
        with quiet():
            own = copy.deepcopy(model)
            fast, optimizer = recast.optimize(
                own, sgd(own), example=batch(64, 0), sharding=sharding, world_size=RANKS
            )
            cut = {n: shards.of(p) for n, p in fast.named_parameters()}
            found = trained(fast, optimizer, parts[r])
        worst = 0.0, ""
        for name, value in wanted.items():
            part = cut.get(name)
            want, start = (
                t if part is None else part.local(t) for t in (value, before[name].detach())
            )
            if want.numel():
                moved = float((want - start).abs().max()) + FLOOR
                worst = max(worst, (float((want - found[name]).abs().max()) / moved, name))
        return worst

    return max(processes(RANKS, rank, timeout=120))


def rows(o: argparse.Namespace) -> Iterator[dict[str, object]]:
    models, missing = zoo_models.collect(o.libraries.split(","))
    for library, why in missing.items():
        print(f"{library} is missing: {why}; try: make zoo", file=sys.stderr)
    for subject in models:
        if not any(part in subject.name for part in o.only.split(",")):
            continue
        line: dict[str, object] = {"model": subject.name, "apart": None, "at": "", "why": ""}
        try:
            apart, line["at"] = judged(subject, o.sharding)
            line["apart"] = f"{apart:.1e}"
            line["same"] = "yes" if apart <= SAME else "NO"
        except Exception as error:
            line["same"], line["why"] = "NO", f"{type(error).__name__}: {error}".splitlines()[0]
        print(*line.values(), flush=True)
        yield line


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="models with one of these in their names")
    parser.add_argument("--libraries", default=",".join(zoo_models.LIBRARIES))
    parser.add_argument("--sharding", default="row_wise", help="of all tables that may have it")
    o = parser.parse_args()
    torch.set_num_threads(1)
    device.extension()  # here, not in each rank
    found = list(rows(o))
    apart = [line for line in found if line["same"] != "yes"]
    print(f"\n{len(found) - len(apart)} of {len(found)} are those of one process")
    if apart:
        print(f"\nthe others:\n\n{record.table(apart)}")
    return int(not found or any(line["why"] for line in found))


if __name__ == "__main__":
    sys.exit(main())
