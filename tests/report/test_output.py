"""Files of models with several graphs: two modes, or parts of one not captured whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import UsageError
from recast.rewriter.report import output


class TwoModes(nn.Module):
    """Its forward differs between train and eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.training:
            return y * 2
        return torch.tanh(y)


class InParts(nn.Module):
    """A loop over the rows of the batch around a tower that can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y = self.tower(x)
        return torch.stack([y[k] * y[k].sum().item() for k in range(len(y))])


def batches() -> list[tuple[Tensor]]:
    return [(torch.randn(6, 4),), (torch.randn(5, 4),)]


def test_two_modes_are_two_files(tmp_path: Path) -> None:
    fast = recast.optimize(TwoModes(), example=batches())
    written = output.write(fast, tmp_path / "out", {"text": "graph.txt", "json": "graph.json"})
    assert sorted(p.name for p in written) == [
        "graph.eval.json", "graph.eval.txt", "graph.train.json", "graph.train.txt",
    ]  # fmt: skip
    texts = {p.name: p.read_text() for p in written}
    assert "tanh" in texts["graph.eval.txt"]
    assert "tanh" not in texts["graph.train.txt"]
    assert set(fast.report.pictures) == {
        "eval, before", "eval, after", "train, before", "train, after",
    }  # fmt: skip
    assert next(iter(fast.report.pictures)).endswith("before")


def test_a_part_has_its_path(tmp_path: Path) -> None:
    fast = recast.optimize(InParts(), example=batches())
    assert fast.report.captured == "partial"
    written = output.write(fast, tmp_path, {"text": "graph.txt"})
    assert [p.name for p in written] == ["graph.tower.txt"]
    assert written[0].read_text().startswith("graph InParts.tower(")
    assert "recast.mlp" in fast.report.graph_text
    assert list(fast.report.pictures) == ["tower, before", "tower, after"]
    page = fast.report.to_html(tmp_path / "r.html").read_text()
    assert "Why it is not captured whole" in page
    assert "test_output.py:" in page


def test_the_report_survives_a_copy(tmp_path: Path) -> None:
    """A Compiled that was saved whole still has its report, pictures and all."""
    fast = recast.optimize(TwoModes(), example=batches())
    torch.save(fast, tmp_path / "m.pt")
    again = torch.load(tmp_path / "m.pt", weights_only=False)
    assert again.report.to_dict() == fast.report.to_dict()
    assert again.report.pictures == fast.report.pictures


def test_a_folder_that_cannot_be_written_is_the_users_question(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full" / "graph.txt").mkdir(parents=True)
    fast = recast.optimize(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1)))
    for folder in (tmp_path / "file" / "out", tmp_path / "full"):
        with pytest.raises(UsageError, match="cannot write to the folder"):
            output.write(fast, folder, {"text": "graph.txt"})
