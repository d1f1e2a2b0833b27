"""Which sources of the CPU kernels are compiled by themselves, and what the object of each depends
on: so that a build compiles what has changed, and nothing else.

``csrc/units`` names those that are compiled at once; ``csrc/CMakeLists.txt`` reads it likewise.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

# Of quotes only: what stands in angle brackets comes with the compiler, Python or torch.
_INCLUDED = re.compile(r'^#\s*(?:include|define RECAST_KERNEL)\s+"([^"]+)"', re.MULTILINE)


def units(folder: Path) -> dict[Path, str]:
    """Each source that is compiled by itself, with the digest of all its text; those with the most
    text come first, as nothing should wait for them in the end.
    """
    several = {unit: _parts(unit) for unit in folder.glob("units/*.cpp")}
    named = {part for parts in several.values() for part in parts}
    alone = (source for source in folder.glob("*.cpp") if source.resolve() not in named)
    texts = {source: text(source) for source in (*several, *alone)}
    order = sorted(texts, key=lambda source: (-len(texts[source]), source.name))
    return {source: digest(texts[source]) for source in order}


def text(source: Path) -> str:
    """A source and, once each, all files of ours that it includes, directly or not."""
    seen: dict[Path, str] = {}
    ahead = [source.resolve()]
    while ahead:
        path = ahead.pop()
        if path in seen:
            continue
        seen[path] = path.read_text()
        ahead += _parts(path)
    return "\0".join(f"{path.name}\0{seen[path]}" for path in sorted(seen))


def digest(whole: str) -> str:
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def _parts(path: Path) -> list[Path]:
    """What a file includes; one that is not there is the compiler's to report."""
    named = _INCLUDED.findall(path.read_text())
    found = ((path.parent / name).resolve() for name in named)
    return [part for part in found if part.is_file()]
