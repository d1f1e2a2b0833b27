"""Counts what row gradients cost beyond the fused path, for the report.

Keys are ``<event>`` or ``<event>:<operation>``:

    merge         pieces were summed to unique rows (a norm, a finiteness check, accumulation)
    dense-write   an operation wrote to a row gradient or took a view, which made it dense for good
    dense-read    an operation read a dense copy
    dense-step    an optimizer that is not fused got the dense gradient
    fused-step    a table was updated without a dense gradient
"""

from __future__ import annotations

from collections import Counter

_COUNTS: Counter[str] = Counter()


def count(event: str, what: str = "", times: int = 1) -> None:
    if times:
        _COUNTS[f"{event}:{what}" if what else event] += times


def counters() -> dict[str, int]:
    """All counts since the start of the process or the last ``reset_counters()``."""
    return dict(_COUNTS)


def reset_counters() -> None:
    _COUNTS.clear()
