"""Imported before anything else: if a package is missing, ends the process with status 2 and says
how to install it.
"""

from __future__ import annotations

import importlib.util
import sys

_LACKS = [name for name in ("torch", "numpy") if importlib.util.find_spec(name) is None]

if _LACKS:
    print(
        f"{sys.executable} has no {' and no '.join(_LACKS)}. Another interpreter:"
        " `make gpu-check PYTHON=/path/to/python`. Without a network: elsewhere"
        f" `pip download {' '.join(_LACKS)} -d wheels`, here"
        " `pip install --no-index --target site wheels/*.whl` and PYTHONPATH=site"
    )
    raise SystemExit(2)
