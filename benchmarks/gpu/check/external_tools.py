"""Checks by other programs: kernels under compute-sanitizer, tests under pytest."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from gpu import ROOT
from gpu.check import (
    SCRIPT,
    op_checks,
    optimizer_checks,
)
from gpu.harness import item_log, runner
from gpu.harness.items import Item, Skip

SANITIZED = "sanitized"


def sanitizer(tool: str, device: torch.device, tiny: bool) -> Iterator[Item]:
    """Kernels on small samples, with every memory access checked."""
    yield Item(f"compute-sanitizer {tool}", partial(_sanitize, tool, device), limit=410)


def _sanitize(tool: str, device: torch.device) -> dict[str, object]:
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if device.type != "cuda" or not Path(program).exists():
        raise Skip("no compute-sanitizer, or no GPU")
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines.jsonl"
        asked = [
            program, "--tool", tool, "--error-exitcode", str(_COMPLAINS), "--print-limit", "10000",
            "--launch-timeout", "300",
            sys.executable, str(SCRIPT), "--group", SANITIZED, "--lines", str(lines),
        ]  # fmt: skip
        status, said = runner.program(asked, 400, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        if "Device not supported" in said or "LibraryNotLoaded" in said:
            raise Skip(f"{tool} does not work on this machine: {said.splitlines()[-1]}")
        rows, whole = item_log.read(lines), item_log.is_complete(lines)
    bad = [f"{r['name']}: {r.get('detail', '')}" for r in rows if r["status"] == "failed"]
    assert rows, f"nothing ran: {said[-800:]}"
    found = complaints(said)
    if found or not whole or status not in (0, _COMPLAINS):
        bad.append(f"status {status}: {' | '.join(found) or said[-800:]}")
    assert not bad, "; ".join(bad)
    lacking = said.count(_ASKED)
    more = f"; {lacking} symbols asked for that the driver lacks" if lacking else ""
    return {"detail": f"{len(rows)} kernels' samples{more}"}


def complaints(said: str) -> list[str]:
    """The faults that compute-sanitizer finds: each kind once per kernel, with its count.

    A complaint is a line ``========= words`` and the indented lines below it: the kernel, the
    thread, the address, the host's stack. Libraries ask a driver for symbols that an older one
    lacks, and do without them: errors of those calls are not ours.
    """
    blocks: list[tuple[str, list[str]]] = []
    for line in said.splitlines():
        mark, bar, words = line.partition("=========")
        if mark or not bar:
            continue
        if words.startswith("     ") and blocks:
            blocks[-1][1].append(words.strip())
        elif words.strip() and not words.strip().startswith(_QUIET):
            blocks.append((words.strip(), []))
    harmless = sum(_ASKED in head for head, _ in blocks)
    summary = re.compile(rf"ERROR SUMMARY: {harmless} errors?\b")
    blocks = [b for b in blocks if _ASKED not in b[0] and not summary.match(b[0])]
    counts: dict[tuple[str, str], int] = {}
    near: dict[tuple[str, str], str] = {}
    for head, rest in blocks:
        kernel = next((x.partition("(")[0] for x in rest if x.startswith("at ")), "")
        kind = head, kernel[:160]
        counts[kind] = counts.get(kind, 0) + 1
        near.setdefault(kind, next((x for x in rest if "nearest allocation" in x), ""))
    told = [f"{n} x {head} {kernel} {near[head, kernel]}" for (head, kernel), n in counts.items()]
    return [re.sub(r"( at)? 0x[0-9a-f]+", "", line).strip() for line in told][:12]


_COMPLAINS = 9  # exit status of the sanitizer if it has found something
_ASKED = "on CUDA API call to cuGetProcAddress"
_QUIET = ("COMPUTE-SANITIZER", "RACECHECK SUMMARY: 0")
_WARNED = "RecastWarning: "
# Samples that have their own kernels in bfloat16, and some in TF32.
ON_TENSOR_CORES = {
    ("compressed_interaction", "layer"), ("dot_interaction", "dlrm padded"),
    ("field_attention", "views"), ("gathered_dots", "a warp a sample"),
    ("scaled_einsum", "many columns"),
}  # fmt: skip


def sanitized(device: torch.device, tiny: bool) -> Iterator[Item]:
    """What runs under the sanitizer: a few samples of every op, and row updates."""
    for op in op_checks.ops():
        chosen = [s for k, s in enumerate(op.samples()) if k % 4 == 0]
        for sample in chosen:
            check = partial(op_checks.check, op, sample, torch.float32, device)
            yield Item(f"{op.name}, {sample.label}", check)
        for sample in op.samples():
            if (op.name, sample.label) not in ON_TENSOR_CORES:
                continue
            check = partial(op_checks.check, op, sample, torch.bfloat16, device)
            yield Item(f"{op.name}, {sample.label}, bfloat16", check)
            if op.name in op_checks.TF32:
                check = partial(op_checks.tiles, op, sample, device)
                yield Item(f"{op.name}, {sample.label}, TF32", check)
    yield from (i for i in optimizer_checks.optimizers(device, True))


def tests(device: torch.device, tiny: bool) -> Iterator[Item]:
    """The tests that need a GPU, if pytest is installed."""
    # Tests of ranks are the group "ranks", which needs no pytest.
    apart = ["--ignore", "tests/gpu/test_ranks_on_gpu.py"]
    apart += ["--ignore", "tests/gpu/test_dynamic_ranks_on_gpu.py"]
    chosen = ["tests/cuda", "tests/gpu", "-m", "gpu", *apart]
    yield Item("tests marked gpu", partial(_pytest, device, chosen), limit=310)


def tests_of_ops(device: torch.device, tiny: bool) -> Iterator[Item]:
    """The tests of the ops on the GPU, likewise."""
    chosen = ["tests/ops/test_ops.py", "-k", "cuda and not emulated"]
    yield Item("tests of ops, on the GPU", partial(_pytest, device, chosen), limit=310)


def _pytest(device: torch.device, chosen: list[str]) -> dict[str, object]:
    if device.type != "cuda":
        raise Skip("no GPU")
    if importlib.util.find_spec("pytest") is None:
        raise Skip("no pytest")
    # A configuration of its own: the project's asks for plugins that may not be there.
    # With -v the last line names the test that runs when the time is over.
    asked = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(ROOT), "-v"]
    asked += ["--tb=short", "-p", "no:cacheprovider", *chosen]
    status, said = runner.program(asked, 300, COLUMNS="200")
    assert status == 0, f"status {status}: {' | '.join(failures(said))}"
    return {"detail": said.splitlines()[-1].strip("= ")}


def failures(said: str) -> list[str]:
    """What pytest says of tests that failed: their names, errors, warnings; else its last lines."""
    lines = [line.strip()[:240] for line in said.splitlines()]
    found = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if not found:
        return lines[-6:]
    return [*found, *dict.fromkeys(x for x in lines if x.startswith("E  ") or _WARNED in x)]
