"""The CPU extension, compiled for the Python of another machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from recast.runtime import device

_ASK = (
    "import json, sysconfig as s;"
    "print(json.dumps([s.get_config_var('EXT_SUFFIX'), s.get_paths()['include']]))"
)


def build(python: str) -> str:
    """Compile it for the interpreter ``python``, which needs its headers and nothing else; says for
    which it is there now. Raises RuntimeError if it cannot be compiled.
    """
    try:
        asked = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"{python} does not run: {error}") from error
    suffix, include = json.loads(asked.stdout)
    if not Path(include, "Python.h").exists():
        raise RuntimeError(f"{python} has no headers: there is no Python.h in {include}")
    try:
        device.compile_ahead(device.made_ahead(suffix), Path(include))
    except Exception as error:
        raise RuntimeError(f"no extension for {suffix}: {error}") from error
    return str(suffix)
