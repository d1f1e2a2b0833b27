"""The id table of dynamic tables compared with boost::unordered_flat_map, in ids per second.

    pip install boost-headers
    python benchmarks/dynamic_ids.py                          # 100 thousand, 1 and 8 million ids
    python benchmarks/dynamic_ids.py --threads 2 1000000
    python benchmarks/dynamic_ids.py --prefix FOLDER          # abseil and ankerl too, from there

Random 64-bit ids in batches of 65536, all of them known ("find", "find or insert"), and a table
filled from empty ("cold"). Both use the same hash, fill the same rows and say which ids are new;
neither reserves memory beforehand, but ours knows its budget. Ours also records the step of each
lookup, which eviction by age needs. They take turns; medians over the rounds, of CPU time with one
thread, else of wall time. Other programs fill the caches, which flatters ours at 100 thousand ids:
measure on an idle machine. ``FOLDER/include`` holds the headers of ``absl`` (as in Debian's
libabsl-dev) or ``ankerl``, and ``FOLDER/lib`` abseil's libraries. Exit code 1 if a rate is below
1.3 times boost's.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE.parent / "csrc"
BAR = 1.3


def boost() -> Path:
    """Where boost's headers are."""
    found = importlib.util.find_spec("boost_headers")
    if found is None or not found.submodule_search_locations:
        sys.exit("pip install boost-headers")
    return Path(next(iter(found.submodule_search_locations))) / "include"


def built(folder: str, prefix: Path | None) -> Path:
    program = Path(folder) / "dynamic_ids"
    table = (x for x in SOURCES.glob("id_table*.cpp") if x.stem != "id_table_python")
    files = [HERE / "dynamic_ids.cpp", *sorted(table)]
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O3", "-fopenmp", f"-I{SOURCES}"]
    command += [f"-I{boost()}", *map(str, files), "-o", str(program)]
    if prefix is not None:
        command.append(f"-I{prefix / 'include'}")
        found = sorted(map(str, prefix.glob("lib/**/libabsl_*.a")))
        command += ["-Wl,--start-group", *found, "-Wl,--end-group"]
    subprocess.run(command, check=True)
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", type=int, default=[100_000, 1_000_000, 8_000_000])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prefix", type=Path, help="where abseil or ankerl is installed")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(built(folder, given.prefix)), str(given.threads), *map(str, given.sizes)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print(
        "| ids | beside | find | its | ratio | find or insert | its | ratio | cold | its | ratio |"
    )
    print("|--:|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    slow = False
    for line in text.splitlines():
        size, name, *rates = line.split()
        cells = []
        for ours, theirs in zip(rates[::2], rates[1::2], strict=True):
            cells += [ours, theirs, f"{float(ours) / float(theirs):.2f}"]
        slow |= any(float(ratio) < BAR for ratio in cells[2::3])
        print(f"| {int(size):,} | {name} | {' | '.join(cells)} |")
    print("\nmillions of ids a second")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
