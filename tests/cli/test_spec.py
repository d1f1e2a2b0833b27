"""SPEC: every way to name a model, and an answer to every wrong one."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recast.errors import UsageError
from recast.rewriter.cli import spec
from recast.rewriter.cli.arguments import parse_arguments

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.linear = nn.Linear(4, width)

    def forward(self, x):
        return self.linear(x)

net = Net()
number = 3

table = {"a": 1}

async def later():
    return net

def nothing():
    return ()

class holder:
    inner = Net(5)

def plain(width=3):
    return Net(width)

def pair(width: int = 3, kind="a"):
    return Net(width), (torch.ones(2, 4),)

def triple():
    return Net(), torch.ones(2, 4), lambda out: out.sum()

def formed(loss=None, forms=((torch.ones(2, 4), 1),)):
    return Net(), torch.ones(2, 4), loss, list(forms)

def bad_forms():
    return Net(), torch.ones(2, 4), None, (torch.ones(2, 4),)

def only_forms():
    return Net(), None, None, [torch.ones(2, 4)]

def wrong():
    return 1, 2

def bad_loss():
    return Net(), None, 3

def raises():
    return Net(width=-1)

class Wide(Net):
    def __init__(self, width):
        super().__init__(width)
"""


@pytest.fixture(autouse=True)
def _undisturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test in its own folder, and nothing left in sys.modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "its_models.py").write_text(SOURCE)
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "folder.py" / "own.py").touch()
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("zoo_", "_recast_spec_")):
            del sys.modules[name]


@pytest.mark.parametrize("place", ["its_models.py", "its_models"])
@pytest.mark.parametrize("attribute", ["net", "plain", "pair", "triple", "Net", "holder.inner"])
def test_every_form(place: str, attribute: str) -> None:
    found = spec.load(f"{place}:{attribute}")
    assert isinstance(found.model, nn.Module)
    assert (found.example is not None) == (attribute in ("pair", "triple"))
    assert (found.loss is not None) == (attribute == "triple")


def test_forms() -> None:
    found = spec.load("its_models.py:formed")
    assert (len(found.forms), found.loss) == (1, None)
    assert spec.load("its_models.py:formed", ["forms=[]"]).forms == ()
    assert spec.load("its_models.py:triple").forms == ()


def test_arguments() -> None:
    found = spec.load("its_models.py:pair", ["width=7", "kind=not a literal"])
    assert found.model.linear.out_features == 7
    assert parse_arguments(["a=[1, 2]", "b=x=y", "c='s'", "d="]) == {
        "a": [1, 2], "b": "x=y", "c": "s", "d": "",
    }  # fmt: skip


def _takes(
    name: str, on2: bool, on: bool = True, n: int = 3, lr: float = 0.1, pool: str = "sum",
    some: Any = None,
) -> None: ...  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on=false", False), ("on=TRUE", True), ("on=False", False), ("on=0", 0), ("on=none", None),
        ("n=-3", -3), ("n=1_000", 1000), ("n=1e6", 1000000), ("n=2.5", 2.5), ("n=none", None),
        ("lr=1e-3", 1e-3), ("lr=inf", math.inf), ("lr=-inf", -math.inf), ("lr=1", 1),
        ("pool=none", "none"), ("pool=true", "true"), ("pool=None", None), ("pool=mean", "mean"),
        ("pool='None'", "None"), ("name=null", "null"), ("some=null", None), ("some=True", True),
        ("some='true'", "true"), ('some="3"', "3"), ("some=08", "08"), ("some=1,2", (1, 2)),
        ("some={[]}", "{[]}"), ("some=" + "[" * 1000, "[" * 1000), ("other=false", False),
    ],
)  # fmt: skip
def test_what_a_value_means(text: str, value: Any) -> None:
    (found,) = parse_arguments([text], inspect.signature(_takes).parameters).values()
    assert (found, type(found)) == (value, type(value))
    assert math.isnan(parse_arguments(["x=nan"])["x"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("on=no", r"on=no is neither true nor false\n(.|\n)*as a text 'no' would be true"),
        ("on2=", "on2= is neither true nor false"),
        ("n=1,000", r"n=1,000 is no number\n  why  with commas it is the tuple \(1, 0\)"),
    ],
)
def test_what_cannot_be_meant(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_arguments([text], inspect.signature(_takes).parameters)


def test_a_function_in_c_is_called_too() -> None:
    Path("zoo_c.py").write_text("model = dict\n")
    with pytest.raises(UsageError, match=r"zoo_c\.py:model returned dict"):
        spec.load("zoo_c.py:model", ["a=3"])


def test_a_file_may_have_the_name_of_an_installed_module(tmp_path: Path) -> None:
    """A model in torch.py must not replace torch."""
    torch = sys.modules["torch"]
    (tmp_path / "torch").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "pytest.py").write_text(SOURCE)
    assert isinstance(spec.load("models/pytest.py:net").model, nn.Module)
    assert sys.modules["torch"] is torch
    assert sys.modules["pytest"] is pytest


def test_siblings_can_be_imported(tmp_path: Path) -> None:
    """As when the file is run as a script."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "zoo_helper.py").write_text(SOURCE)
    (tmp_path / "sub" / "zoo_main.py").write_text("from zoo_helper import net\n")
    assert isinstance(spec.load("sub/zoo_main.py:net").model, nn.Module)


@pytest.mark.parametrize("text", ["zoo_plain.py", "zoo_plain.py:nothing"])
def test_what_can_be_called_without_arguments_is_proposed_first(text: str) -> None:
    helpers = "def loss(y):\n    return y\nclass Deep:\n    def __init__(self, n, *, d): ...\n"
    Path("zoo_plain.py").write_text(f"{helpers}def model(n=3, *, d=4):\n    return n\n")
    with pytest.raises(UsageError, match=r"try  zoo_plain\.py:model   \|   zoo_plain\.py:loss"):
        spec.load(text)


@pytest.mark.parametrize(
    ("text", "arguments", "lines"),
    [
        ("its_models", [], ["spec: cannot read 'its_models'", "  why  a model is named by"]),
        ("its_models.py", [], ["spec: cannot read", "  try  its_models.py:Net   |   its_mod"]),
        ("zoo_model.py:net", [], ["spec: there is no file zoo_model.py", "  try  its_models.py"]),
        ("folder.py:net", [], ["spec: folder.py is a folder", "  try  folder.py/own.py:ATTR"]),
        ("its_models.py:holder.x", [], ["has no 'holder.x'"]),
        ("its_models.py:table.x", [], ["has no 'table.x'"]),
        ("its_models.py:later", [], ["its_models.py:later returned coroutine"]),
        ("its_models.py:nothing", [], ["its_models.py:nothing returned ()"]),
        ("far_away.py:net", [], ["there is no file far_away.py", "  why  looked in the current"]),
        ("sub/models.py:net", [], ["no file sub/models.py", "  why  there is no folder sub"]),
        ("its_mdels:net", [], ["there is no module its_mdels", "  why  'its_mdels' is neither"]),
        ("zoo_pkg.deep:net", [], ["spec: there is no module zoo_pkg.deep", "  why  'zoo_pkg' is"]),
        ("its_models.py:nett", [], ["has no 'nett'", "  at   its_models.py", "its_models.py:net"]),
        ("its_models.py:number", [], ["its_models.py:number is an int, not a model"]),
        ("its_models.py:wrong", [], ["returned (int, int)", "(model, example, loss)"]),
        ("its_models.py:bad_loss", [], ["the loss returned by its_models.py:bad_loss is an int"]),
        ("its_models.py:bad_forms", [], ["forms returned by its_models.py:bad_forms are a tuple",
                                         "try  return model, example, loss, [batch_of"]),
        ("its_models.py:only_forms", [], ["returns forms, and no example"]),
        ("its_models.py:raises", [], ["raised when it was called", "at   its_models.py:8 "]),
        ("its_models.py:net", ["width=3"], ["is a Module and takes no arguments"]),
        ("its_models.py:pair", ["wdth=3"], ["has no argument 'wdth'; it takes width, kind",
                                            "--arg width="]),
        ("its_models.py:Wide", [], ["missing a required argument", "--arg width=VALUE   |   name a"
                                    " function that builds it"]),
        ("its_models.py:pair", ["width"], ["--arg: cannot read 'width'"]),
    ],
)  # fmt: skip
def test_wrong(text: str, arguments: list[str], lines: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        spec.load(text, arguments)
    for line in lines:
        assert line in str(caught.value)


@pytest.mark.parametrize("place", ["zoo_broken.py", "zoo_broken"])
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("x = 1\nimport zoo_not_there\n", "ModuleNotFoundError: No module named 'zoo_not_there'"),
        ("x = 1\n1 / 0\n", "ZeroDivisionError: division by zero"),
        ("x = 1\ndef f(:\n", "SyntaxError"),
        ("x = 1\nraise SystemExit(2)\n", "it ended the program, with exit code 2"),
    ],
)
def test_a_module_that_raises_is_not_called_missing(
    tmp_path: Path, place: str, source: str, why: str
) -> None:
    """The error says whose fault it is, with the user's own line."""
    (tmp_path / "zoo_broken.py").write_text(source)
    with pytest.raises(UsageError) as caught:
        spec.load(f"{place}:net")
    told = str(caught.value)
    assert f"{place} raised while it was imported" in told
    assert "  at   zoo_broken.py:2" in told
    assert why in told


def test_a_loss_that_wants_labels(tmp_path: Path) -> None:
    """One of torch's own is not blamed with a line of torch: it lacks the labels."""
    source = "from torch import nn\ndef pair():\n    return nn.Linear(1, 1), None, nn.MSELoss()\n"
    (tmp_path / "zoo_loss.py").write_text(source)
    loss = spec.load("zoo_loss.py:pair").loss
    assert loss is not None
    with pytest.raises(UsageError, match="called with the output of the model alone") as caught:
        loss(torch.ones(2))
    assert caught.value.where is None and "labels" in caught.value.tries[0]


def test_a_missing_file_proposes_names_that_are_alike(tmp_path: Path) -> None:
    """Whatever the folder is called: its name is as near to itself as can be."""
    folder = tmp_path / "a_folder_with_a_long_name"
    folder.mkdir()
    for name in ("dlrm.py", "w.py"):
        (folder / name).touch()
    for asked, proposed in (("dlmr.py", (f"{folder / 'dlrm.py'}",)), ("zoo.py", ())):
        with pytest.raises(UsageError) as caught:
            spec.load(f"{folder / asked}:net")
        assert caught.value.tries == proposed
        assert caught.value.why == f"looked in {folder}"


def test_an_error_of_several_lines_stays_in_its_column(tmp_path: Path) -> None:
    (tmp_path / "zoo_lines.py").write_text("raise ValueError('one\\ntwo')\n")
    with pytest.raises(UsageError) as caught:
        spec.load("zoo_lines.py:net")
    assert str(caught.value).endswith("  why  ValueError: one\n       two")
