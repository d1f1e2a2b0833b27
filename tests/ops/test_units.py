"""A build compiles what has changed, and every source once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recast.runtime import device
from recast.runtime.units import units

CSRC = Path(device.__file__).resolve().parents[1] / "csrc"
CHANGED = {
    "one.cpp": {"one"},
    "deep.h": {"one", "both"},
    "b.cpp": {"both"},
    "units/both.cpp": {"both"},
}


def write(folder: Path) -> None:
    (folder / "units").mkdir(parents=True)
    (folder / "one.cpp").write_text('#define RECAST_KERNEL "kernel.h"\n#include RECAST_KERNEL\n')
    (folder / "kernel.h").write_text('#include <vector>\n#include "deep.h"\n#include "absent.h"\n')
    (folder / "deep.h").write_text('#include "kernel.h"\n')
    (folder / "a.cpp").write_text('#include "deep.h"\n')
    (folder / "b.cpp").write_text("")
    (folder / "units" / "both.cpp").write_text('#include "../a.cpp"\n#include "../b.cpp"\n')


@pytest.mark.parametrize("name", CHANGED)
def test_what_a_change_makes_new(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    before = units(tmp_path)
    assert {unit.stem for unit in before} == {"one", "both"}
    with (tmp_path / name).open("a") as file:
        file.write("// other words\n")
    after = units(tmp_path)
    assert {unit.stem for unit in after if after[unit] != before[unit]} == CHANGED[name]


def test_units_are_what_cmake_builds() -> None:
    """Each source of the kernels is in one unit, or compiled by itself, as CMake reads it too."""
    named = [
        name
        for unit in CSRC.glob("units/*.cpp")
        for name in re.findall(r'^#include "\.\./(\w+\.cpp)"$', unit.read_text(), re.MULTILINE)
    ]
    alone = {unit.name for unit in units(CSRC) if unit.parent == CSRC}
    assert len(named) == len({*named})
    assert {*named} | alone == {source.name for source in CSRC.glob("*.cpp")}
    assert not {*named} & alone


def test_what_has_not_changed_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stand-in for a compiler writes down what it compiles, and fails while `broken` is there."""
    folder = tmp_path / "csrc"
    write(folder)
    said, script, broken = tmp_path / "said", tmp_path / "c++", tmp_path / "broken"
    script.write_text(f"""#!/bin/sh
for last; do :; done
case "$1 $*" in
  --version*) exit ;;
  -shared*) ;;
  *one.cpp*) echo one >> {said}; [ ! -e {broken} ] || exit 1 ;;
  *) echo both >> {said} ;;
esac
echo of this version > "$last"
""")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("RECAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(device, "_SOURCES", folder)

    def compiled() -> list[str]:
        said.write_text("")
        device.library()
        return sorted(said.read_text().split())

    assert compiled() == ["both", "one"]
    assert compiled() == []
    (folder / "b.cpp").write_text("// changed")
    assert compiled() == ["both"]
    broken.touch()
    (folder / "kernel.h").write_text("// changed")
    with pytest.raises(Exception, match="exit code 1"):
        compiled()
    broken.unlink()
    assert compiled() == ["one"]  # the other one had been compiled, though there was no library
    objects = sorted(path.stem.split("-")[0] for path in (tmp_path / "cache").rglob("*.o"))
    assert objects == ["both", "one"]  # the old ones are gone
