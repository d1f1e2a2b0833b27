"""JSON that people write -> values. What Python's own reader lets pass is refused: a key that is
there twice, of which it keeps the last.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recast.errors import UsageError


def read(text: str, what: str, tries: Iterable[str] = ()) -> Any:
    """The value of ``text``, which errors call ``what``. Raises UsageError if it is not JSON, or
    says a key twice. NaN and infinities, which JSON does not have, are left to the caller.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [name for name, times in Counter(n for n, _ in pairs).items() if times > 1]
        if twice:
            why = "only one of them can be meant"
            raise UsageError(f"{what} says {twice[0]!r} twice", why=why)
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except UsageError:  # a ValueError too
        raise
    except ValueError as error:  # a number of thousands of digits is no JSONDecodeError
        raise UsageError(f"{what} is not JSON", why=str(error), tries=tries) from error
    except RecursionError as error:
        why = "its lists or objects are nested too deeply"
        raise UsageError(f"{what} cannot be read", why=why, tries=tries) from error


def of_file(path: str | Path, what: str, tries: Iterable[str] = ()) -> Any:
    """:func:`read` of a file. Raises UsageError also if it cannot be read, or is not UTF-8."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # as some editors begin it
    except OSError as error:
        raise UsageError(f"{what} cannot be read", why=str(error.strerror)) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not JSON", why=str(error), tries=tries) from error
    return read(text, what, tries)


def shown(value: Any) -> str:
    """A value as the file has it, cut to a few words."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except ValueError:  # a whole number of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
