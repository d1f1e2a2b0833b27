"""Every kernel source compiles for every architecture, and none spills registers to memory.

A source is specialised by macros. On every architecture one combination is compiled; among the long
tests every value, and on one architecture every pair of values.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import ptxas
import pytest

from recast.runtime.gpu import kernel_cache, nvrtc

WHY_MISSING = nvrtc.why_missing()
needs_nvrtc = pytest.mark.skipif(WHY_MISSING is not None, reason=f"NVRTC: {WHY_MISSING}")

Values = Mapping[str, object]
PAIRS = "sm_90"

# The macros of each source and the values to compile it with; its head says what they mean. A
# source that is not here must compile without any.
MACROS: dict[str, dict[str, tuple[object, ...]]] = {
    "attention_tiles.cu": {
        "IN": (0, 1, 2), "STEPS": (1, 2, 3, 4), "KEYS": (1, 5, 8), "BARE": (0, 1),
        "VEC": (1, 2, 4),
    },
    "cin_forward.cu": {
        "IN": (0, 1, 2), "PRODUCT": (0, 1, 2), "DEEP": (1, 2, 4, 5), "TILES": (1, 2, 4),
        "VEC": (1, 4),
    },
    "cin_inputs.cu": {
        "IN": (0, 1, 2), "PRODUCT": (0, 1, 2), "STEPS": (1, 4, 8), "TILES": (1, 2),
        "ACROSS": (2, 4), "VEC": (1, 2, 4),
    },
    "cin_weight.cu": {
        "IN": (0, 1, 2), "PRODUCT": (0, 1, 2), "OUTER": (1, 7, 13), "INNER": (1, 2),
        "SPLIT": (1, 2, 4, 8), "VEC": (1, 4),
    },
    "cast_rows.cu": {"OUT": (0, 1, 2), "BLOCK": (128, 256)},
    "compressed_interaction.cu": {"IN": (0, 1, 2), "PRODUCT": (0, 1, 2), "BLOCK": (128, 256)},
    "copy_tensors.cu": {"BLOCK": (128, 256)},
    "cross_mixture.cu": {"ACT": (0, 1, 2, 3), "VEC": (1, 2, 4), "BLOCK": (128, 256)},
    "cross_tail.cu": {"GATED": (0, 1), "VEC": (1, 4), "BLOCK": (128, 256)},
    "cross_vector.cu": {
        "LAYERS": (1, 3, 8), "START": (0, 1), "VEC": (1, 4), "BLOCK": (128, 256),
    },
    "dense_update.cu": {"RULE": (0, 1, 2, 3, 4), "BLOCK": (128, 256)},
    "dice.cu": {
        "IN": (0, 1, 2), "ALPHA": (0, 1, 2), "OUT": (0, 1, 2), "VEC": (1, 4, 8),
        "BLOCK": (128, 256),
    },
    "dot_interaction.cu": {
        "FEATURES": (3, 27), "DIM": (10, 64, 128), "PAIRS": (0, 1, 2, 3), "IN": (0, 1, 2),
        "OUT": (0, 1, 2), "VEC": (1, 2, 4, 8), "ELEMENT": (0, 1, 2, 3), "SAMPLES": (1, 4),
        "BLOCK": (128, 256),
    },
    "dot_warps.cu": {
        "FEATURES": (3, 27), "DIM": (16, 48, 128), "PAIRS": (1, 2, 3), "ELEMENT": (1, 2, 3),
        "BLOCK": (64, 128),
    },
    "dot_warps_gathered.cu": {
        "FEATURES": (3, 27), "DIM": (16, 48, 128), "PAIRS": (1, 3), "ELEMENT": (1, 2, 3),
        "TABLE": (0, 1, 2), "BLOCK": (64, 128),
    },
    "dot_gathered.cu": {
        "FEATURES": (3, 27), "DIM": (10, 128), "PAIRS": (0, 1), "IN": (0, 1, 2), "OUT": (0, 2),
        "TABLE": (0, 1, 2), "VEC": (1, 4, 8), "ELEMENT": (0, 1, 2, 3), "SAMPLES": (1, 4),
        "BLOCK": (128, 256),
    },
    "embedding_forward.cu": {
        "TABLE": (0, 1, 2), "OUT": (0, 1, 2), "VEC": (1, 2, 4, 8), "LANES": (1, 8, 32),
        "CHUNKS": (1, 2, 4), "MAX": (0, 1), "BAGS": (1, 4), "LONG": (0, 512), "BLOCK": (128, 256),
    },
    "embedding_samples.cu": {
        "TABLE": (0, 1, 2), "OUT": (0, 1, 2), "VEC": (1, 2, 4, 8), "BLOCK": (128, 256),
    },
    "row_norm.cu": {
        "ORDER": (0, 1, 2), "GRAD": (0, 1, 2), "TABLE": (0, 1, 2), "VEC": (1, 4, 8),
        "LANES": (1, 8, 32), "CHUNKS": (1, 2, 4), "TILE": (128,), "BLOCK": (128, 256),
        "WIDE_KEY": (0, 1),
    },
    "mlp_epilogue.cu": {
        "OF": (0, 1, 2), "SUM": (0, 1, 2), "VEC": (1, 2, 4, 8), "LANES": (1, 4, 32),
        "BLOCK": (128, 256), "AHEAD": (1, 2, 4),
    },
    "mlp_one_output.cu": {
        "OF": (0, 1, 2), "SUM": (0, 1, 2), "VEC": (1, 2, 4, 8), "LANES": (1, 4, 32),
        "BLOCK": (128, 256), "AHEAD": (1, 2, 4),
    },
    "embedding_weight_grad.cu": {
        "TABLE": (0, 1, 2), "GRAD": (0, 1, 2), "LANES": (1, 8, 32), "BLOCK": (128, 256),
    },
    "fm_interaction.cu": {
        "IN": (0, 1, 2), "OUT": (0, 1, 2), "VEC": (1, 2, 4, 8), "LANES": (1, 8, 32),
        "SPLITS": (1, 4, 32), "HELD": (4, 8, 16), "REDUCE": (0, 1), "BLOCK": (128, 256),
    },
    "field_attention.cu": {"IN": (0, 1, 2), "WIDTH": (8, 16, 24, 32), "BLOCK": (128, 256)},
    "gated_sums.cu": {"IN": (0, 1, 2), "VEC": (1, 4, 8), "BLOCK": (128, 256)},
    "initial_rows.cu": {"TABLE": (0, 1, 2)},
    "join_columns.cu": {"OUT": (0, 1, 2), "BLOCK": (128, 256)},
    "pair_backward.cu": {"IN": (0, 1, 2), "SUM": (0, 1, 2, 3), "VEC": (1, 2, 4, 8)},
    "pair_forward.cu": {"IN": (0, 1, 2), "SUM": (0, 1, 2, 3), "VEC": (1, 2, 4, 8)},
    "outer_products.cu": {
        "IN": (0, 1, 2), "DIM": (3, 16, 32), "VEC": (1, 4, 8), "BLOCK": (128, 256),
    },
    "scaled_tiles.cu": {"IN": (0, 1, 2), "GROUPS": (1, 3, 8), "TILES": (1, 2)},
    "scaled_weight.cu": {"IN": (0, 1, 2), "HALVES": (1, 2, 4)},
    "scaled_product.cu": {"IN": (0, 1, 2), "VEC": (1, 4, 8), "BLOCK": (128, 256)},
    "row_sort.cu": {"WIDE_KEY": (0, 1)},
    "row_update.cu": {
        "ACTION": (0, 1, 2, 3), "GRAD": (0, 1, 2), "TABLE": (0, 1, 2), "STATE": (0, 2),
        "STOCHASTIC": (0, 1), "VEC": (1, 2, 4, 8), "LANES": (1, 2, 8, 32), "CHUNKS": (1, 2, 4),
        "TILE": (128,), "BLOCK": (128, 256), "WIDE_KEY": (0, 1),
    },
}  # fmt: skip


def means_something(source: str, values: Values) -> bool:
    """Whether the head of ``source`` allows these values together."""
    if source in ("dot_interaction.cu", "dot_gathered.cu"):
        fp32, dim, vec = values["IN"] == 0, int(str(values["DIM"])), int(str(values["VEC"]))
        known = fp32 or values["ELEMENT"] in (0, values["IN"])
        return dim % vec == 0 and not (fp32 and vec == 8) and known
    if source == "dot_warps_gathered.cu":
        return values["TABLE"] in (0, int(str(values["ELEMENT"])) % 3)
    if source.startswith("cin_"):
        whole = values.get("ACROSS", 4) if values["VEC"] != 1 else 1
        many = int(str(values.get("OUTER", 1))) * int(str(values.get("INNER", 1))) > 14
        return values["VEC"] == whole and (values["IN"] == 0 or values["PRODUCT"] != 0) and not many
    if source == "outer_products.cu" and int(str(values["DIM"])) % int(str(values["VEC"])):
        return False
    if source in (
        "outer_products.cu",
        "scaled_product.cu",
        "dice.cu",
        "fm_interaction.cu",
        "gated_sums.cu",
        "pair_backward.cu",
        "pair_forward.cu",
    ):
        team = int(str(values.get("LANES", 1))) * int(str(values.get("SPLITS", 1)))
        if team > 32:
            return False
        return not (values["IN"] == 0 and values["VEC"] == 8)
    fp32 = values.get("TABLE") == 0
    if source == "embedding_samples.cu":
        return not (fp32 and values["VEC"] == 8)
    if source == "embedding_forward.cu":
        many = int(str(values["BAGS"])) * int(str(values["CHUNKS"])) > 4
        return not (fp32 and values["VEC"] == 8) and not many
    return not (fp32 and values.get("STOCHASTIC") == 1)


def variants(source: str, together: int) -> Iterator[dict[str, object]]:
    """Few combinations in which every ``together`` values that may meet do meet.

    Greedy: of all combinations, the first that has the most of what is still missing.
    """
    macros = MACROS.get(source, {})
    every = [
        dict(zip(macros, chosen, strict=True)) for chosen in itertools.product(*macros.values())
    ]
    allowed = [values for values in every if means_something(source, values)]
    meets = [set(itertools.combinations(v.items(), min(together, len(v)))) for v in allowed]
    missing = set().union(*meets)
    while missing:
        best = max(range(len(allowed)), key=lambda k: len(meets[k] & missing))
        missing -= meets[best]
        yield allowed[best]


# How many values of macros meet, by architecture; 0: one combination.
NOW = dict.fromkeys(ptxas.ARCHS, 0)
LATER = {arch: 1 + (arch == PAIRS) for arch in ptxas.ARCHS}  # long tests
CASES = [
    pytest.param(path.name, arch, together, id=f"{path.stem}-{arch}-{together}", marks=marks)
    for path in nvrtc.sources()
    for archs, marks in ((NOW, ()), (LATER, pytest.mark.long))
    for arch, together in archs.items()
]


@needs_nvrtc
@pytest.mark.parametrize(("source", "arch", "together"), CASES)
def test_it_compiles_and_does_not_spill(source: str, arch: str, together: int) -> None:
    spilled, kernels = [], set()
    for values in variants(source, together):
        defines = {f"RECAST_{name}": value for name, value in values.items()}
        program = nvrtc.program(source, defines=defines, options=(ptxas.VERBOSE,))
        found = ptxas.usage(kernel_cache.binary(program, arch).log)
        assert found, "no kernel"
        kernels |= set(found)
        spilled += [
            f"{name}: {used} with {dict(values)}"
            for name, used in found.items()
            if used.spill_stores or used.spill_loads or used.stack
        ]
    assert not spilled, "\n".join(spilled)


def test_there_are_sources() -> None:
    assert nvrtc.sources(), f"no kernel source in {nvrtc.folder()}"
    assert set(MACROS) <= {path.name for path in nvrtc.sources()}


@pytest.mark.parametrize("path", nvrtc.sources(), ids=lambda path: path.stem)
def test_all_macros_are_varied(path: Path) -> None:
    """Those that the head of a source lists: one that is not defined would count as 0."""
    listed = re.findall(r"^//   (RECAST_\w+(?:, RECAST_\w+)*)", path.read_text(), re.M)
    names = {name.removeprefix("RECAST_") for line in listed for name in line.split(", ")}
    assert names == set(MACROS.get(path.name, {}))


@pytest.mark.parametrize("together", [1, 2])
def test_the_variants_cover(together: int) -> None:
    source = "embedding_forward.cu"
    seen = list(variants(source, together))
    for names in itertools.combinations(MACROS[source], together):
        for values in itertools.product(*(MACROS[source][name] for name in names)):
            asked = dict(zip(names, values, strict=True))
            if {"TABLE": 0, "VEC": 8}.items() <= asked.items():
                continue
            if asked.get("BAGS") == 4 and asked.get("CHUNKS") in (2, 4):
                continue
            assert any(asked.items() <= each.items() for each in seen), asked
    assert len(seen) < 40


@needs_nvrtc
@pytest.mark.parametrize("arch", ptxas.ARCHS)
def test_a_spill_is_seen(tmp_path: Path, arch: str) -> None:
    """More live values than registers."""
    (tmp_path / "k.cu").write_text("""\
extern "C" __global__ void k(float* x) {
  float held[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) held[i] = x[i * 32 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) x[(63 - i) * 32 + threadIdx.x] = held[i] * held[(i * 7) % 64];
}
""")
    compile = partial(nvrtc.compile, arch=arch)
    free = nvrtc.program(tmp_path / "k.cu", options=(ptxas.VERBOSE,))
    tight = nvrtc.program(tmp_path / "k.cu", options=(ptxas.VERBOSE, "--maxrregcount=32"))
    assert ptxas.usage(compile(free).log)["k"].spill_stores == 0
    used = ptxas.usage(compile(tight).log)["k"]
    assert used.registers <= 32 and used.spill_stores > 0 and used.spill_loads > 0
