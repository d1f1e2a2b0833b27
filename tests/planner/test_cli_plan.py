"""``recast plan`` and ``recast simulate``: answers, files, exit codes."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from recast import Plan
from recast.rewriter.cli import main as cli
from recast.runtime.planner import picture, simulate, spec
from recast.runtime.planner.models import MODELS
from recast.runtime.topology import Topology, named

MODEL = Path(__file__).parents[1] / "cli" / "small.py"
A = {"name": "a", "rows": 3, "dim": 4}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: Any, monkeypatch: Any, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    tables = [{"name": "a", "rows": 10**6, "dim": 64, "ids": 3}, {"name": "b", "rows": 9, "dim": 8}]
    Path("tables.json").write_text(json.dumps({"batch": 64, "tables": tables}))

    def call(*arguments: str) -> tuple[int, str, str]:
        return (cli.main(list(arguments)), *capsys.readouterr())

    return call


def test_names_beyond_ascii_in_a_locale_without_them(run: Run, monkeypatch: Any) -> None:
    problem = {"batch": 64, "tables": [{"name": "größe", "rows": 10**6, "dim": 64, "ids": 3}]}
    text = json.dumps(problem, ensure_ascii=False)
    Path("problem.json").write_text(text, encoding="utf-8")
    monkeypatch.setattr(io, "text_encoding", lambda given, *_: given or "ascii")
    for drawing in ("p.svg", "p.html"):
        asked = ("--tables", "problem.json", "--world-size", "2", "--picture", drawing)
        assert run("plan", *asked, "-o", "p.json")[0] == 0
    by_hand = Path("p.json").read_text(encoding="utf-8").replace("gr\\u00f6\\u00dfe", "größe")
    Path("p.json").write_text(by_hand, encoding="utf-8")
    assert [t.name for t in Plan.load("p.json").tables] == ["größe"]


def test_tables(run: Run) -> None:
    code, out, err = run(
        "plan", "--tables", "tables.json", "--topology", "dgx-a100x8", "-o", "p.json",
        "--picture", "p.svg", "--pin", "b=data_parallel",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert out.startswith("plan for 8 ranks: 2 tables") and "rank   #" in out
    made = Plan.load("p.json")
    made.check()
    assert made.placement("b").sharding_type == "data_parallel"
    assert Path("p.svg").read_text().count("<text") > 16
    again = run("plan", "--tables", "tables.json", "--topology", "dgx-a100x8", "--pin",
                "b=data_parallel", "--json")  # fmt: skip
    assert json.loads(again[1]) == json.loads(Path("p.json").read_text())


def test_explain(run: Run) -> None:
    code, out, _ = run("plan", "--tables", "tables.json", "--world-size", "4", "--explain", "a")
    assert code == 0
    assert "chosen" in out and "runner-up" in out and "rows 0.." in out


def test_html(run: Run) -> None:
    assert (
        run("plan", "--tables", "tables.json", "--world-size", "2", "--picture", "p.html")[0] == 0
    )
    page = Path("p.html").read_text()
    assert (
        "<svg" in page and "<td>a</td>" in page and "http" not in page.replace("http://www.w3", "")
    )


def test_a_model(run: Run) -> None:
    code, out, err = run("plan", f"{MODEL}:model", "--world-size", "4", "-o", "p.json", "-q")
    assert (code, err) == (0, "")
    assert out.startswith("plan for 4 ranks: 3 tables")
    assert Plan.load("p.json").world_size == 4
    assert run("plan", f"{MODEL}:model", "--world-size", "1", "-q")[1].startswith("plan for 1 rank")


def test_does_not_fit(run: Run) -> None:
    tables = [{"name": "a", "rows": 10**9, "dim": 256}]
    Path("large.json").write_text(json.dumps(tables))
    code, out, err = run("plan", "--tables", "large.json", "--topology", "pcie-l40sx2")
    assert (code, out) == (1, "")
    assert "no plan fits" in err and "try  1. " in err and "ranks of 44.7 GiB" in err
    code, out, again = run("plan", "--tables", "large.json", "--topology", "pcie-l40sx2", "--json")
    assert (code, again) == (1, err)
    said = json.loads(out)
    assert said["fits"] is False and said["try"][0].startswith("1. ")
    assert err.splitlines()[:2] == [said["what"], f"  why  {said['why']}"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan",), "a model or --tables"),
        (("plan", "--tables", "none.json"), "No such file"),
        (("plan", "--tables", "tables.json", "--explain", "c"), "no table 'c'"),
        (("plan", "--tables", "tables.json", "--pin", "c=row_wise"), "no table 'c'"),
        (("plan", "--tables", "tables.json", "--pin", "c"), "--pin c"),
        (("plan", "--tables", "tables.json", "--picture", "p.png"), "--picture p.png"),
        (("plan", "--tables", "tables.json", "--topology", "dgx"), "no topology 'dgx'"),
        (("simulate", "--model", "huge"), "no model 'huge'"),
        (("simulate", "--devices", "one"), "--devices one"),
        (("plan", "--tables", "tables.json", "--world-size", "0"), "plan: --world-size is 0"),
        (("plan", f"{MODEL}:model", "--world-size", "-3"), "plan: --world-size is -3"),
        (("plan", "--tables", "tables.json", "--batch", "0"), "plan: --batch is 0"),
    ],
)
def test_bad_questions(run: Run, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"tables": 3}, "tables is no list"),
        ([], r"there are no tables in it(.|\n)*why  a plan places them(.|\n)*try  \{"),
        ({"batch": 8, "tables": []}, "there are no tables in it"),
        ({"tables": [], "size": 3}, "unknown key 'size'"),
        ([{"name": "a", "rows": 3}], "no 'dim'"),
        ([{"name": "a", "rows": 3, "dim": 4, "colour": 1}], "unknown key 'colour'"),
        ([{"name": "a", "rows": "3", "dim": 4}], r"tables\[0\].rows"),
        ({"tables": [{"name": "a", "rows": 3, "dim": 4}], "batch": 1.5}, "batch: 1.5"),
        ({"tables": [{"name": "a", "rows": 3, "dim": 4}], "world_size": "2"}, 'world_size: "2"'),
        ([{"name": "a", "rows": 3, "dim": 4, "types": ["by_row"]}], r"tables\[0\].types"),
        ({"tables": [A], "batch": True}, "batch: true(.|\n)*whole number of at least 1"),
        ({"tables": [A], "world_size": 0}, "wrong.json: world_size: 0"),
        ({"tables": [A], "topology": 3}, "topology: 3(.|\n)*name of a preset, or an object"),
        ({"tables": [A], "topology": {"name": "x"}}, "wrong.json: topology x: no ranks"),
        ({"tables": [A], "batches": 3}, "unknown key 'batches'(.|\n)*try  'batch'?"),
        ([A, A], r"tables\[1\]\.name: \"a\"(.|\n)*tables\[0\] has that name"),
        (
            [A | {"dtype": "int8"}],
            "dtype of table 'a': \"int8\"\n  why .* one of float32,",
        ),
        ([A | {"dtype": "e"}], "one of float32"),  # torch.e is no dtype either
        ([A | {"ids": float("inf")}], "ids of table 'a': Infinity\n  why  .* a number from 0 to"),
        ([A | {"ids": float("nan")}], "ids of table 'a': NaN"),
        ([A | {"ids": True}], "ids of table 'a': true"),
        ([A | {"ids": 1e300}], "ids of table 'a'"),
        ([A | {"rows": 10**30}], "rows of table 'a': 10000"),
        ([A | {"lookups": -1}], "lookups of table 'a': -1"),
        ([A | {"distinct": 1.5}], "distinct of table 'a': 1.5\n  why  .* a number from 0 to 1"),
        ([A | {"id_bytes": 0}], "id_bytes of table 'a': 0"),
        ([A | {"state_row": float("nan")}], "state_row of table 'a': NaN"),
        ([A | {"stored_row": 0}], "stored_row of table 'a': 0"),
        ([A | {"pooling": True}], "pooling of table 'a': true"),
        ([A | {"pooling": -1}], "pooling of table 'a': -1\n  why  .* one of sum, .* or a number"),
        ([A | {"pooling": 2, "ids": 2}], r"tables\[0\] of table 'a': ids, and a number as pooling"),
        ([A | {"dynamic": 1}], "dynamic of table 'a': 1\n  why  .* true or false"),
        ([A | {"dynamic": True, "types": ["table_wise"]}], "types of table 'a'(.|\n)*left out"),
        ([A | {"types": ["row_wise"] * 2}], "types of table 'a'(.|\n)*each once"),
        ([A | {"name": ""}], r"tables\[0\]\.name"),
    ],
)
def test_wrong_tables(run: Run, tables: Any, said: str) -> None:
    Path("wrong.json").write_text(json.dumps(tables))
    code, _, err = run("plan", "--tables", "wrong.json", "--world-size", "2")
    assert code == 2
    assert re.search(said, err)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"name": "a", "rows": 3, "rows": 4, "dim": 4}]', "wrong.json says 'rows' twice"),
        ('[{"name": "a", "rows": 1' + "0" * 5000 + ', "dim": 4}]', "wrong.json is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("", "wrong.json is not JSON"),
        (b"\xff[]", "wrong.json is not JSON"),
    ],
)
def test_what_is_hardly_json(run: Run, text: str | bytes, said: str) -> None:
    Path("wrong.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    for asked in (
        ("--tables", "wrong.json"),
        ("--tables", "tables.json", "--topology", "wrong.json"),
    ):
        code, out, err = run("plan", *asked)
        assert (code, out) == (2, "") and re.search(said, err)


def test_a_file_may_begin_as_editors_on_windows_begin_it(run: Run) -> None:
    Path("with_mark.json").write_text(Path("tables.json").read_text(), encoding="utf-8-sig")
    assert run("plan", "--tables", "with_mark.json", "--topology", "dgx-a100x8")[0] == 0


def test_the_files_of_the_page_are_read(run: Run) -> None:
    """``docs/many-devices.md`` shows a file of tables and one of machines, and tells every key."""
    page = (Path(__file__).parents[2] / "docs/many-devices.md").read_text()
    tables, machines = re.findall(r"^```json\n(.*?)^```$", page, re.M | re.S)
    Path("problem.json").write_text(tables)
    Path("machines.json").write_text(machines)
    made = json.loads(run("plan", "--tables", "problem.json", "--json")[1])
    assert (made["world_size"], made["topology"]["name"]) == (16, "dgx-a100")
    assert {t["name"] for t in made["tables"]} == {"user", "history"}
    asked = ["plan", "--tables", "problem.json", "--topology", "machines.json", "--json"]
    assert json.loads(run(*asked)[1])["topology"] == json.loads(machines)
    assert set(json.loads(machines)) == {f.name for f in fields(Topology)}
    keys = [key for row in re.findall(r"^\| (`.*?) \|", page, re.M) for key in row.split(", ")]
    assert {f"`{key}`" for key in (*spec._OF_TABLE, *spec._OF_LOAD)} <= set(keys)


def test_simulate(run: Run) -> None:
    code, out, err = run("simulate", "--model", "tiny", "--topology", "dgx-a100x8")
    assert (code, err) == (0, "")
    assert "modelled, not measured" in out and "blog 3.6" in out
    data = json.loads(run("simulate", "--model", "tiny", "--devices", "8", "--json")[1])
    assert data["rows"][0]["ranks"] == 8 and data["rows"][0]["ratio"]["blog"] > 1


def test_simulate_says_that_all_models_take_long(run: Run, monkeypatch: Any) -> None:
    tiny = simulate.simulate("tiny", named("dgx-a100x8"))
    asked: list[tuple[str, int]] = []

    def quick(name: str, machines: Any, batch: int) -> simulate.Simulated:
        asked.append((name, machines.ranks))
        return tiny

    monkeypatch.setattr(simulate, "simulate", quick)
    code, out, err = run("simulate")
    assert code == 0 and "modelled, not measured" in out
    assert asked == [(name, n) for name in MODELS for n in simulate.DEVICES]
    assert f"{len(asked)} plans, may take minutes; of one model: recast simulate --model" in err
    assert run("simulate", "-q")[2] == ""


def test_a_plan_says_where_the_tables_are(run: Run) -> None:
    asked = ("plan", "--tables", "tables.json", "--topology", "dgx-a100x8")
    _, out, _ = run(*asked, "--pin", "a=row_wise", "--pin", "b=data_parallel")
    told = out.split("tables, largest first\n")[1].splitlines()[:2]
    assert [line.split() for line in told] == [
        ["a", "1,000,000", "x", "64", "row_wise", "on", "ranks", "0", "to", "7"],
        ["b", "9", "x", "8", "data_parallel", "on", "every", "rank"],
    ]
    assert "why a table is where it is: --explain TABLE" in out
    _, out, _ = run(*asked, "--pin", "a=table_wise")
    assert re.search(r"  a  1,000,000 x 64  table_wise +on rank \d\n", out)


def test_of_many_tables_the_largest_are_told(run: Run) -> None:
    tables = [{"name": f"t{k}", "rows": 100 + k, "dim": 8} for k in range(picture.MOST_TABLES + 3)]
    Path("many.json").write_text(json.dumps({"batch": 64, "tables": tables}))
    _, out, _ = run("plan", "--tables", "many.json", "--topology", "dgx-a100x8")
    assert f"  t{len(tables) - 1} " in out and "  t0 " not in out
    assert "  and 3 more\n" in out


def test_one_rank_is_one_rank(run: Run) -> None:
    tables = [{"name": "a", "rows": 10**10, "dim": 64}]
    Path("large.json").write_text(json.dumps({"tables": tables}))
    _, _, err = run("plan", "--tables", "large.json", "--topology", "dgx-a100x1")
    assert "1 rank of 80.0 GiB leaves" in err and "1 ranks" not in err


def test_a_table_is_explained_by_the_name_of_its_module(run: Run) -> None:
    """As ``sharding=`` takes it."""
    asked = ("plan", f"{MODEL}:model", "--world-size", "2", "--explain")
    code, out, _ = run(*asked, "tables.1")
    assert (code, out) == run(*asked, "tables.1.weight")[:2]
    assert code == 0 and out.startswith("tables.1.weight: 11 x 4 float32")
    assert run(*asked, "tables.9")[0] == 2
