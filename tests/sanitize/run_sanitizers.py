"""Runs the tests of the CPU kernels under AddressSanitizer, UndefinedBehaviorSanitizer
and ThreadSanitizer: ``make sanitize``.

Each build is kept in ``$RECAST_CACHE`` (8 minutes of one core for address, 4 for thread; then only
for what has changed in ``csrc``). Then faults are planted, each of which must be reported; then the
tests run, and the first report ends them. Registers that are loaded or stored under a mask
are not watched: GCC does not instrument them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Sanitizer(NamedTuple):
    """How a process is watched, what it must find, and which tests it runs."""

    libraries: tuple[str, ...]  # loaded before Python
    options: dict[str, str]
    faults: dict[str, str]  # of planted_faults.py, and what the report says
    tests: tuple[tuple[str, ...], ...]  # arguments of pytest, for all instruction sets at once
    each: tuple[str, ...]  # the same, for each of them anew


# Not those that force plain torch: no kernel of ours runs in them.
_OPS = ("tests/ops", "-k", "not emulated and not cuda and not -torch]")
SANITIZERS = {
    "address": Sanitizer(
        # libstdc++ too: the first of them wraps what throws exceptions, and looks for it at once.
        ("libasan.so", "libubsan.so", "libstdc++.so.6"),
        # With Python's objects in memory of their own, so that those which are gone are known.
        {
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",
        },
        {
            "overrun": "heap-buffer-overflow",
            "overread": "heap-buffer-overflow",
            "overflow": "signed integer overflow",
        },
        (
            (
                *_OPS,
                "tests/wire/test_codecs.py",
                "tests/serving/test_small_mlp.py",
                "tests/serving/test_stacks.py",
            ),
            (
                "tests/row_grad/test_row_pieces.py",
                "tests/row_grad/test_row_sorts.py",
                "tests/row_grad/test_row_lots.py",
                "tests/row_grad/test_row_steps.py",
                "tests/row_grad/test_row_ages.py",
                "tests/row_grad/test_row_whole.py",
                "tests/row_grad/test_native_step.py",
                "tests/dynamic/test_id_table.py",
            ),
            ("tests/capture/test_known_calls.py",),
        ),
        ("tests/ops/test_threads.py", "tests/row_grad/test_row_update.py"),
    ),
    "thread": Sanitizer(
        ("libtsan.so",),
        # Python, torch and OpenMP were not built for it, and would be reported.
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1 exitcode=66"},
        {"race": "data race"},
        (("tests/ops/test_threads.py", "tests/dynamic/test_id_table.py", "-k", "not python"),),
        (),
    ),
}


def compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++")
    if not found or "clang" in _output([found, "--version"]):
        sys.exit("make sanitize needs g++, with its sanitizers")
    return found


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def watched(name: str) -> dict[str, str]:
    """The environment of a process that the sanitizer watches."""
    its = SANITIZERS[name]
    paths = [_output([compiler(), f"-print-file-name={library}"]) for library in its.libraries]
    missing = [path for path in paths if not Path(path).is_absolute()]
    if missing:
        sys.exit(f"make sanitize needs {', '.join(missing)}, which comes with g++")
    built = {**os.environ, **its.options, "RECAST_SANITIZER": name, "OMP_NUM_THREADS": "1"}
    return {**built, "LD_PRELOAD": " ".join(paths)}


def build(name: str) -> None:
    """In a process that is not watched, as the compiler would be too."""
    code = "from recast.runtime import device; print(device.library())"
    environment = {**os.environ, "RECAST_SANITIZER": name}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, check=True)


def finds_faults(name: str) -> bool:
    """Whether each planted fault is reported, and nothing where there is none."""
    good = True
    for fault, says in {**SANITIZERS[name].faults, "clean": ""}.items():
        run = subprocess.run(
            [sys.executable, HERE / "planted_faults.py", fault], env=watched(name), cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        found = run.returncode == 0 if fault == "clean" else run.returncode != 0
        found = found and says in run.stdout
        print(f"{name}: planted fault: {fault}: {'as it should be' if found else 'NOT'}")
        if not found:
            print(run.stdout)
        good = good and found
    return good


def isas() -> list[str]:
    code = "from recast.runtime import device; print(*(i for i in device.ISAS if device.extension()"
    return _output([sys.executable, "-c", f"{code}.has_isa(i)))"]).split()


def passes(name: str) -> bool:
    """Whether all tests pass and nothing is reported."""
    its = SANITIZERS[name]
    runs: list[tuple[tuple[str, ...], dict[str, str]]] = [(tests, {}) for tests in its.tests]
    runs += [(its.each, {"RECAST_KERNELS": isa}) for isa in isas() if its.each]
    good = True
    for tests, chosen in runs:
        # Without capture: the report of what ends a process would be lost.
        command = [
            "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider",
            "-p", "no:xdist", "--every-case", *tests,
        ]  # fmt: skip
        print(f"{name}: {' '.join(tests)} {chosen or ''}", flush=True)
        run = subprocess.run(
            [sys.executable, *command], env={**watched(name), **chosen}, cwd=ROOT, check=False
        )
        good = run.returncode == 0 and good
    return good


def main() -> None:
    names = sys.argv[1:] or list(SANITIZERS)
    for name in names:
        build(name)
    failed = [name for name in names if not (finds_faults(name) and passes(name))]
    print(f"sanitize: {'failed: ' + ' '.join(failed) if failed else 'nothing was reported'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
