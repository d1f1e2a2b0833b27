"""Records checks and measurements of a GPU: the machine, all rows as JSON, and a readable page."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from gpu.harness import item_log
from gpu.harness.item_log import Row

DRY = "GPU: this was a dry run, whose times mean nothing"


def machine(device: torch.device) -> dict[str, object]:
    """The GPU, its driver, and versions; nothing that names one particular computer."""
    import recast
    from recast.runtime.gpu import cuda_launch

    facts = cuda_launch.facts()
    found: dict[str, object] = {
        "gpu": "none: the emulator and torch on the CPU",
        "cpu cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nvrtc": facts["nvrtc"],
        "driver": facts["driver"],
        "recast": recast.__version__,
    }
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        found["gpu"] = about.name
        found["memory GiB"] = round(about.total_memory / 2**30, 1)
        found["multiprocessors"] = about.multi_processor_count
        found["driver"] = _driver() or found["driver"]
    return found


def _driver() -> str | None:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(said.stdout.strip().splitlines()), None)


def missing() -> Iterator[str]:
    """What the machine lacks, each with the way to bring it."""
    from recast.runtime import device
    from recast.runtime.gpu import cublaslt, cuda_launch

    why = cuda_launch.why_not()
    if why is not None:
        yield f"kernels cannot be launched: {why}"
    # Built here, once, before the children begin: it takes longer than some of their items.
    if (why := device.why_missing()) is not None:
        yield f"no C++ extension, so no cublasLt either: {why}"
    elif (why := cublaslt.why_not()) is not None:
        yield f"no cublasLt: {why}"
    for package, use in (("pytest", "the tests marked gpu"), ("numpy", "torch's own needs")):
        if importlib.util.find_spec(package) is None:
            yield (
                f"no {package} ({use}): elsewhere `pip download {package} -d wheels`, here "
                f"`pip install --no-index --target site wheels/*.whl` and PYTHONPATH=site"
            )


def write(
    folder: Path, name: str, title: str, on: Mapping[str, object], rows: Sequence[Row], text: str,
    missing: Sequence[str] = (), **more: object,
) -> Path:  # fmt: skip
    """Keep all rows as JSON and ``text`` as a page, ``<date>-<gpu>-<name>``; the page's path.

    ``missing``: what a whole record would have besides, so that this one cannot be taken for it.
    """
    date = datetime.now(UTC).date().isoformat()
    slug = re.sub(r"[^a-z0-9]+", "-", str(on["gpu"]).lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{date}-{slug}-{name}.json"
    held = {"date": date, "title": title, "machine": dict(on), "complete": not missing}
    held |= {"missing": list(missing), **more}
    lines = ",\n  ".join(json.dumps(row) for row in rows)  # one each: rounds are many numbers
    whole = f'{json.dumps(held, indent=1)[:-2]},\n "rows": [\n  {lines}\n ]\n}}\n'
    item_log.replace(file, whole)
    about = ", ".join(f"{k} {v}" for k, v in on.items() if v is not None)
    mark = "" if not missing else f"**Not complete**: no {'; no '.join(missing)}.\n\n"
    file = file.with_suffix(".md")
    item_log.replace(file, f"# {title}\n\n{date}; {about}\n\n{mark}{text}\n")
    return file


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Markdown; all rows have the columns of the first."""
    if not rows:
        return "(nothing)"
    head = list(rows[0])
    cells = [head, *([str(row.get(k, "")) for k in head] for row in rows)]
    width = [max(len(line[k]) for line in cells) for k in range(len(head))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, width, strict=True)) + " |"
        for line in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in width) + "|", *lines[1:]])
