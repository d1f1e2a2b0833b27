"""A training run that is killed at random moments, as a program: ``killed.py FOLDER ROUNDS SEED``.

Forks a process that trains with tiers, saves a checkpoint now and then and compacts its files, and
kills it (SIGKILL). The next one must find the last checkpoint bit for bit, as a run that was never
killed had it, and trains on from there. Prints a line of JSON: what happened.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dynamickit import Model, Stream, example, train

import recast
from recast.errors import CheckpointError

STEPS, EVERY = 40, 4


def made(tier: Path | None) -> tuple[Any, Any, Stream]:
    torch.manual_seed(3)
    stream, model = Stream(1, many=900), Model()
    how = recast.Dynamic(max_rows=5000, seed=5)
    if tier is not None:
        how = recast.Dynamic(
            tiers=[recast.Host(330_000), recast.Disk(tier, "1MiB")], evict="lfu", seed=5
        )
    opt = torch.optim.Adagrad(model.parameters(), lr=0.1)
    fast, opt = recast.optimize(
        model, opt, example=example(stream), tables={"user": how, "items": how}
    )
    return fast, opt, stream


def digest(fast: Any, opt: Any) -> str:
    """A digest of all numbers that does not depend on the order of the rows."""
    found = hashlib.sha256()
    model, states = fast.state_dict(), opt.state_dict()["state"]
    by_id = {n: torch.argsort(model[f"{n}.ids"]) for n in ("user", "items")}
    for number, (name, _) in enumerate(fast.named_parameters()):
        order = by_id.get(name.removesuffix(".weight"))
        for value in (model[name], states[number]["sum"]):
            part = value if order is None else value[order]
            found.update(part.detach().contiguous().numpy().tobytes())
    for name, order in by_id.items():
        found.update(model[f"{name}.ids"][order].numpy().tobytes())
    return found.hexdigest()


def run(folder: Path, tell: Callable[..., None], tiered: bool) -> None:
    """Train from the last checkpoint to the end; ``tell`` is called with each checkpoint."""
    fast, opt, stream = made(folder / "tier" if tiered else None)
    begin = 0
    if (folder / "saved").exists():
        try:
            begin = recast.checkpoint.load(folder / "saved", fast, opt).step or 0
            tell("found", begin, digest(fast, opt))
        except CheckpointError as error:  # killed in the middle of the first one
            tell("refused", 0, str(error))
    batches = [stream.batch(40) for _ in range(STEPS)]
    tables = recast.dynamic.tables(fast)
    for k in range(begin, STEPS):
        train(fast, opt, batches[k : k + 1])
        if k + 1 < STEPS:
            tables["user"].prefetch(batches[k + 1][0])
        if tiered and k % 3 == 2:
            tell("compacts", k, "")
            tables["user"].tier.store.compact()
            tables["items"].tier.store.compact()
            tell("compacted", k, "")
        if (k + 1) % EVERY == 0:
            recast.checkpoint.save(folder / "saved", fast, opt, step=k + 1, keep=2)
            tell("saved", k + 1, digest(fast, opt))
    if tiered:
        assert all(t.tier.below > 100 for t in tables.values())
    tell("end", STEPS, digest(fast, opt))


def fork(folder: Path, log: Path, tiered: bool = True) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with open(log, "a") as out:

            def tell(*what: object) -> None:
                out.write(json.dumps(what) + "\n")
                out.flush()

            run(folder, tell, tiered)
        code = 0
    except BaseException:
        log.with_suffix(".error").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def told(log: Path) -> list[list[Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def main(folder: Path, rounds: int, seed: int) -> None:
    torch.set_num_threads(1)
    made(None)  # all that is imported late, once
    chance = random.Random(seed)
    start = time.monotonic()
    assert os.waitpid(fork(folder / "plain", folder / "plain.log", False), 0)[1] == 0
    long = (time.monotonic() - start) * 1.1
    true = {step: sum_ for what, step, sum_ in told(folder / "plain.log") if what == "saved"}
    shutil.rmtree(folder / "plain")
    kills = begun = compacting = ends = 0
    saved = False  # by a run since the last beginning
    while kills < rounds:
        log = folder / f"run-{begun}.log"
        begun += 1
        began = time.time()
        child = fork(folder / "run", log)
        time.sleep(chance.uniform(0.05, 1) * long)
        ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        error = log.with_suffix(".error")
        assert not error.exists(), error.read_text()
        events = told(log)
        for what, step, sum_ in events:
            if what in ("found", "saved", "end"):
                assert true[step] == sum_, f"{what} {step} of run {begun - 1} is another"
            assert what != "refused" or not saved, sum_
            saved = saved or what in ("found", "saved")
        kills += status == signal.SIGKILL
        compacting += bool(events) and events[-1][0] == "compacts"
        # On a busy machine a run takes longer than that first one, and would die before it saves.
        if not any(what == "saved" for what, *_ in events):
            long *= 1.25
        if events and events[-1][0] == "end":
            long = log.stat().st_mtime - began
            ends, saved = ends + 1, False
            shutil.rmtree(folder / "run")
    found = sum(e[0] == "found" for n in range(begun) for e in told(folder / f"run-{n}.log"))
    print(json.dumps({"kills": kills, "found": found, "compacting": compacting, "ends": ends}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
