"""The scripts for a machine with a GPU, tried without one: tiny sizes, kernels on the emulator."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from gpu.bench import op_cases, roofline, synthetic_models, variants
from gpu.check import external_tools, model_checks, op_checks, op_samples, recorded_run
from gpu.harness import item_log, runner, worker
from gpu.harness.items import Item, Skip
from gpu.harness.progress import Progress, results_folder
from torch import Tensor, nn
from torch.nn import functional as F

from recast.runtime import OPS
from recast.runtime.op import Op, Sample

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def run(script: str, *options: str, out: Path) -> tuple[subprocess.CompletedProcess, dict]:
    asked = [sys.executable, str(ROOT / "benchmarks" / script), "--dry-run", "--out", str(out)]
    done = subprocess.run(
        [*asked, *options], capture_output=True, text=True, timeout=280, check=False
    )
    files = list(out.glob("*.json"))
    return done, json.loads(files[0].read_text()) if files else {}


def long(*options: tuple[str, ...]) -> Iterator[ParameterSet]:
    return (pytest.param(each, marks=pytest.mark.long) for each in options)


@pytest.mark.parametrize(
    "options",
    [
        ("--groups", "graphs", "--only", "ragged|capturable|dense"),
        *long(
            ("--groups", "op relu_dropout", "batches", "memcheck", "tests", "tests of ops"),
            ("--groups", "dynamic", "ranks"),
            ("--groups", "op mlp"),
            ("--groups", "zoo", "optimizers"),
            ("--groups", "op dice", "op gated_sums", "op field_attention"),
            ("--groups", "op compressed_interaction"),
        ),
    ],
    ids=lambda o: o[1],
)
def test_check(options: tuple[str, ...], tmp_path: Path) -> None:
    done, found = run("gpu_check.py", *options, out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    states = {row["status"] for row in found["rows"]}
    assert states <= {"ok", "skipped"} and "ok" in states
    assert "gpu" in found["machine"] and "torch" in found["machine"]
    assert "0 failed" in next(tmp_path.glob("*.md")).read_text()


@pytest.mark.parametrize(
    "options",
    [
        *long(
            ("--groups", "dropout", "--prepare"),  # prepared first, as all are where it counts
            ("--groups", "dlrm", "--only", "ranked"),
            ("--groups", "ops", "--only", "factorisation.*float32|relu and"),
            ("--groups", "ops", "--only", "CIN.*32, 16|attention|gates|Dice"),
            ("--groups", "tiny", "--only", "fp32, ranked"),
            ("--groups", "small", "--only", "bf16, shuffled"),
            ("--groups", "updates", "--only", "Adagrad"),
            ("--groups", "dlrm", "more of dlrm", "--only", "ranked"),
        ),
    ],
    ids=lambda o: o[1],
)
def test_bench(options: tuple[str, ...], tmp_path: Path) -> None:
    done, found = run("gpu_bench.py", *options, out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for row in found["rows"] for line in row["rows"]]
    measured = {line["variant"] for line in lines if "ms" in line}
    assert "recast" in measured and "floor" in measured and len(measured) > 3
    assert not [line for line in lines if "why not" in line]


# ---------------------------------------------------------------- samples


@pytest.mark.parametrize("sample", op_samples._large_mlps(), ids=lambda s: s.label)
def test_no_value_is_near_the_kink_of_a_relu(sample: Sample) -> None:
    """They are exact in every dtype, and further from 0 than half an ulp of the largest."""
    x, params = sample.args[:2]
    for dtype in op_checks.DTYPES:
        low, wide = x.to(dtype), x.double()
        for weight, bias in zip(params[:-2:2], params[1:-2:2], strict=True):
            low = F.linear(low, weight.to(dtype), bias.to(dtype))
            wide = F.linear(wide, weight.double(), bias.double())
            assert torch.equal(low.double(), wide)
            assert float(wide.abs().min()) > 2**-8 * float(wide.abs().max())
            low, wide = low.relu(), wide.relu()


@pytest.mark.parametrize("op", op_checks.ops(), ids=lambda op: op.name)
def test_every_sample_has_a_reference_in_every_dtype(op: Op) -> None:
    # -1e9, say, fills no float16: the item fails on a GPU, and a dry run tries float32 alone.
    for sample in op.samples():
        for dtype in op_checks.DTYPES:
            with torch.no_grad():
                op.reference(*op_checks.cast(sample.args, dtype, CPU))


def test_models_are_compared_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a GPU's convolutions may be TF32: ours then are, torch's if cuDNN so chooses."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    seen = set[bool]()

    def loss(out: Tensor, *rest: Tensor) -> Tensor:
        seen.add(torch.backends.cudnn.allow_tf32)
        return out.square().mean()

    x = torch.rand(8, 3, generator=torch.Generator().manual_seed(0))
    model_checks.diff_training(nn.Linear(3, 2), (x,), loss=loss)

    def step(net: nn.Module, *rest: Any) -> None:
        loss(net(x))
        raise Skip("nothing is recorded without a GPU")

    monkeypatch.setattr(recorded_run, "recorded_step", step)
    with pytest.raises(Skip):
        recorded_run.compare_training(
            lambda: nn.Linear(3, 2), loss, [((x,), ())], torch.optim.Adagrad, CPU
        )
    assert seen == {False} and torch.backends.cudnn.allow_tf32


def test_one_mask_serves_all_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch draws other masks on a GPU than on the CPU, so nothing could be compared."""
    draws: list[None] = []

    def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
        draws.append(None)  # the first tells the shape of the result, the second is the op's
        g = torch.Generator().manual_seed(int(len(draws) == 2))
        return x * torch.empty_like(x).bernoulli_(1 - p, generator=g) / (1 - p)

    op = next(op for op in op_checks.ops() if op.name == "cross_mixture")
    sample = next(s for s in op.samples() if s.label == "drop")
    monkeypatch.setattr(F, "dropout", dropout)
    for dtype in op_checks.DTYPES:
        op_checks.check(op, sample, dtype, CPU)
    with op_checks._drawing() as masks:
        F.dropout(torch.ones(10_000), 0.25)
    assert len(masks) == 1 and abs(float(masks[0].mean()) - 0.75) < 0.02
    draws.clear()
    monkeypatch.setattr(op_checks, "_drawing", lambda: contextlib.nullcontext([]))
    with pytest.raises(AssertionError, match="of the limit"):
        op_checks.check(op, sample, torch.float32, CPU)


SAID = """\
RecastWarning: something of ours
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at void sum<float, 8>(float const*, int)+0x1f0
=========     by thread (3,0,0) in block (0,0,0)
=========     Access to 0x7f20c0a00060 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f20c0a00000 of size 96 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernel [0x1]
=========
========= Invalid __global__ read of size 16 bytes
=========     at void sum<float, 8>(float const*, int)+0x200
=========     by thread (4,0,0) in block (0,0,0)
=========     Access to 0x7f20c0a00070 is out of bounds
=========     and is 17 bytes after the nearest allocation at 0x7f20c0a00000 of size 96 bytes
=========
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on cuX.
=========     Saved host backtrace up to driver entry point at error
=========
========= ERROR SUMMARY: 3 errors
"""


def test_what_the_sanitizer_says_is_told() -> None:
    first, second, last = external_tools.complaints(SAID)
    assert first.startswith("2 x Invalid __global__ read of size 16 bytes at void sum<float, 8>")
    assert "1 bytes after the nearest allocation" in first and "0x" not in first
    assert second.startswith("1 x Program hit CUDA_ERROR_INVALID_VALUE")
    assert last == "1 x ERROR SUMMARY: 3 errors"
    clean = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    assert external_tools.complaints(clean) == []


ASKED = """\
========= Program hit CUDA_ERROR_NOT_FOUND (error 500) on CUDA API call to cuGetProcAddress_v2.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: cuGetProcAddress_v2 [0x1]
=========
"""


def test_symbols_that_a_driver_lacks_are_no_fault_of_a_kernel() -> None:
    """But whatever else is counted, also where it was not printed."""
    asked = "========= COMPUTE-SANITIZER\n" + 2 * ASKED
    assert external_tools.complaints(f"{asked}========= ERROR SUMMARY: 2 errors\n") == []
    assert external_tools.complaints(f"{asked}========= ERROR SUMMARY: 3 errors\n") == [
        "1 x ERROR SUMMARY: 3 errors"
    ]
    launch = ASKED.replace("cuGetProcAddress_v2", "cuLaunchKernel")
    first, last = external_tools.complaints(f"{asked}{launch}========= ERROR SUMMARY: 3 errors\n")
    assert "cuLaunchKernel" in first and last.endswith("3 errors")


def test_what_pytest_says_of_failures_is_told() -> None:
    said = "E   assert 0 == 1\nx.py:3: RecastWarning: it runs on: a reason\nFAILED t.py::a - as"
    assert external_tools.failures(f"...\n{said}\n==== 1 failed, 2 warnings in 3.00s ====") == [
        "FAILED t.py::a - as", "E   assert 0 == 1", "x.py:3: RecastWarning: it runs on: a reason",
    ]  # fmt: skip
    assert external_tools.failures("t.py::a PASSED\nt.py::b")[-1] == "t.py::b"


# ---------------------------------------------------------------- groups in processes


SCRIPT = """
import os, subprocess, sys, time
sys.path.insert(0, {folder!r})
from pathlib import Path
import torch
from gpu.harness import runner, worker
from gpu.harness.items import Item, Skip
def group(device, tiny):
    def skip(): raise Skip("not here")
    def fail(): raise ValueError("wrong\\nnumbers")
    def hang(): time.sleep(60)
    def good():
        open(line + ".ran", "a").write("once ")
        return {{"detail": "fine"}}
    if "limit" in sys.argv[2]:
        def leaves():
            held = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
            open(line + ".left", "w").write(str(held.pid))
            hang()
        yield Item("limited", leaves, limit=1)
        yield Item("last", lambda: None)
        return
    yield Item("good", good)
    yield Item("bad", fail)
    def leave():
        worker.report_so_far([{{"case": "a", "ms": 1}}])
        print("last words", flush=True)
        os._exit(3)
    yield Item("gone", leave)
    yield Item("absent", skip)
    yield Item("after", lambda: None)
    if "hang" in sys.argv[2]:
        yield Item("slow", hang)
line = sys.argv[sys.argv.index("--lines") + 1]
sys.exit(worker.work(group, Path(line), torch.device("cpu"), False, None))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(folder=str(ROOT / "benchmarks")))
    return path


@pytest.mark.long
def test_a_crash_costs_one_item_and_a_later_call_goes_on(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Items that ended well do not run again, failed ones do; each call reports as it goes."""
    seen: list[tuple[list[str], list[str]]] = []

    def record(rows: Sequence[dict[str, Any]], left: Sequence[str]) -> None:
        seen.append(([r["name"] for r in rows], list(left)))

    folder = tmp_path / "lines"
    for turn in range(2):
        if turn:  # the process was killed in the middle of a line
            with (folder / "a.jsonl").open("a") as out:
                out.write('{"name": "aft')
        progress = Progress(["a"], record, each=True)
        rows = runner.run(script, ["a"], folder, budget=120, jobs=1, resume=True,
                              progress=progress)  # fmt: skip
        found = {row["name"]: row for row in rows}
        assert {name: row["status"] for name, row in found.items()} == {
            "good": "ok", "bad": "failed", "gone": "failed", "absent": "skipped", "after": "ok",
        }  # fmt: skip
        assert found["good"]["detail"] == "fine" and found["good"]["group"] == "a"
        assert "ValueError: wrong | numbers" in found["bad"]["detail"]
        assert found["gone"]["detail"] == "the process ended in it with status 3: last words"
        assert found["gone"]["rows"] == [{"case": "a", "ms": 1}], "what it had found by then"
        assert sorted(seen[-1][0]) == sorted(r["name"] for r in rows) and seen[-1][1] == []
        told = capsys.readouterr().out
        assert "a: bad failed" in told and "== a: 2 ok, 2 failed, 1 skipped; 0 groups" in told
        assert ("a: good ok" in told) == (turn == 0)
    assert seen[0][1] == ["a"] and "good" in seen[0][0]
    assert (folder / "a.jsonl.ran").read_text() == "once "


def test_lines_of_another_tree_are_not_taken_over(tmp_path: Path) -> None:
    """Nor any where nothing is resumed; a temporary folder is no one's."""
    folder = tmp_path / "kept"
    for resume, gpu, there in (
        (folder, "a", False), (folder, "a", True), (None, "a", False), (folder, "a", True),
        (folder, "b", False),
    ):  # fmt: skip
        with results_folder(resume, folder, {"gpu": gpu}) as (found, resumed):
            assert (found, resumed) == (folder, resume is not None)
            assert (folder / "x.jsonl").exists() == there
            (folder / "x.jsonl").touch()
    with results_folder(None, None, {}) as (found, resumed):
        assert found.is_dir() and not resumed and not list(found.iterdir())
    assert not found.exists()


def test_an_optimizer_of_the_same_state_makes_none() -> None:
    """Adagrad makes a matrix for every table at once: 28 GB of them would not fit twice."""
    model, twin = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    twin._parameters = model._parameters
    ours = torch.optim.Adagrad(model.parameters(), lr=0.1)
    made: list[torch.device] = []

    def make(net: torch.nn.Module) -> torch.optim.Optimizer:
        made.extend(p.device for p in net.parameters())
        return torch.optim.Adagrad(net.parameters(), lr=0.1)

    theirs = variants.shared(make, twin, ours)
    assert {d.type for d in made} == {"meta"}
    (group,) = theirs.param_groups
    assert all(a is b for a, b in zip(group["params"], model.parameters(), strict=True))
    assert all(theirs.state[p] is ours.state[p] for p in model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    theirs.step()
    assert float(ours.state[model.bias]["sum"].sum()) > 0


@pytest.mark.long
def test_a_hang_costs_one_item_and_what_it_started(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lines"
    rows = runner.run(script, ["limit"], folder, budget=240, jobs=1)
    found = {row["name"]: row for row in rows}
    assert found["limited"]["detail"] == "it took more than 1 s and was ended"
    assert found["limited"]["status"] == "failed" and found["last"]["status"] == "ok"
    assert len(found) == 2
    left = Path(f"/proc/{(folder / 'limit.jsonl.left').read_text()}/stat")
    assert not left.exists() or left.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    """An interpreter without torch: which package is missing, and how to install it."""
    asked = [sys.executable, "-S", "-I", str(ROOT / "benchmarks" / "gpu" / "requirements.py")]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "has no torch and no numpy" in done.stdout
    assert "pip download torch numpy" in done.stdout and not done.stderr


@pytest.mark.long
def test_the_budget_holds(script: Path, tmp_path: Path) -> None:
    rows = runner.run(script, ["hang"], tmp_path / "lines", budget=25, jobs=1)
    assert rows[-1]["name"] == "(all of the rest)"
    assert "time was over" in rows[-1]["detail"]
    assert {row["name"] for row in rows} >= {"good", "after", "slow"}


def test_a_script_that_does_not_start_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name\n")
    (row,) = runner.run(broken, ["a"], tmp_path / "lines", budget=60, jobs=1)
    assert row["status"] == "failed" and "nothing_of_this_name" in row["detail"]


def test_a_lost_context_ends_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lost = False

    def settle(device: torch.device) -> None:
        if lost:
            raise RuntimeError("an illegal memory access was encountered")

    def fail() -> None:
        nonlocal lost
        lost = True
        raise ValueError("out of bounds")

    monkeypatch.setattr(worker, "_settle", settle)
    file = tmp_path / "lines"
    items = [Item("first", lambda: None), Item("second", fail), Item("third", lambda: None)]
    assert worker.work(lambda d, t: items, file, CPU, True, None) == worker.POISONED
    lost = False
    assert worker.work(lambda d, t: items, file, CPU, True, None) == 0
    assert [row["status"] for row in item_log.read(file)] == ["ok", "failed", "ok"]
    assert issubclass(Skip, Exception)


# ---------------------------------------------------------------- ids, floors


def test_ids_follow_the_power_law() -> None:
    """Against the closed form of the expected number of distinct ids: 22,627 of 65,536."""
    g = torch.Generator().manual_seed(0)
    found = synthetic_models.power_law(1_000_000, (65_536,), 1.05, g)
    assert found.min() == 0 and found.max() < 1_000_000
    assert abs(found.unique().numel() - 22_627) < 400
    counts = torch.bincount(found)
    assert counts[0] == counts.max()


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 1000, 25_000])
def test_shuffled_ids_are_a_permutation(rows: int) -> None:
    ids = synthetic_models.shuffled(torch.arange(rows), rows)
    assert torch.equal(ids.sort().values, torch.arange(rows))


@pytest.mark.parametrize(
    ("config", "inputs", "elements", "macs"),
    [(synthetic_models.TINY, 58, 1_123_681_280, 207_488),
     (synthetic_models.SMALL, 116, 7_058_084_800, 1_455_232)],
    ids=["tiny", "small"],
)  # fmt: skip
def test_the_published_sizes(
    config: synthetic_models.Config, inputs: int, elements: int, macs: int
) -> None:
    with torch.device("meta"):
        model = synthetic_models.Synthetic(config)
    assert len(model.of_input) == inputs
    assert sum(t.weight.numel() for t in model.tables) == elements
    assert roofline.chain_work(roofline.linears(model.mlp), 1, 4)[1] == 6 * macs


def test_floor_of_lookups() -> None:
    """Two tables, one used twice: ids count twice, distinct rows three times, states twice."""
    ids = [torch.tensor([[1], [2]]), torch.tensor([[2], [2]]), torch.tensor([[0, 0], [3, 4]])]
    moved = roofline.lookup_bytes(
        [(0, ids[0]), (0, ids[1]), (1, ids[2])], [8, 16], 2 * (8 + 8 + 16), state=1, width=4
    )
    rows = (2 * 8 + 3 * 16) * 4 * (1 + 2 + 2)
    assert moved == 2 * 8 * 8 + rows + 2 * 64 * 4


def test_floor_of_an_op_alone() -> None:
    """A forward of lookups reads ids and rows and writes bags: no share of a gradient's bytes."""
    op, args, moved, _, forward = op_cases.lookup(3, 5, 8, torch.float32, CPU, 10)
    ids, bag = args[1][0], OPS[op].target(*args)[0]
    read = ids.numel() * (8 + 8 * 4)
    assert op == "embedding_bags" and forward == (moved, 0)
    assert moved == 3 * (read + bag.numel() * 4)
    pairs = op_cases.pairs(5, 4, "none", torch.float32, CPU, 10)
    read, written = 10 * 5 * 4 * 4, 10 * 10 * 4 * 4  # ten pairs of each of ten samples
    assert pairs.forward[0] == read + written and pairs.moved == 3 * read + 2 * written
