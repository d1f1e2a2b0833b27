"""The user's embedding module, once its table is dynamic.

It stays in its place in the model, and its class becomes one of these: the same module with the
same Parameter, which is now the slab of a :class:`DynamicTable`. ``state_dict()`` holds the stored
rows only::

    weight  (n, D)                      ids, scores, stamps  (n,) int64: for each row its id, its
    padding (1, D), with padding_idx        score for eviction, and the step of its last lookup
    clock   (4,) int64                  seen (3, m) int64: ids waiting for MinCount, lookups, step
    initial (3,) float64: the distribution of initial rows, measured when the table became dynamic

Optimizer state is saved with the optimizer, for the same n rows in the same order. On many ranks,
each saves its own part; it can load a part or the whole, of which it takes its own rows
(``recast.checkpoint`` and ``full_state_dict()`` have the whole).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from recast.errors import CheckpointError
from recast.runtime.dynamic.parts import kept as own_rows
from recast.runtime.dynamic.parts import own_entries
from recast.runtime.dynamic.rows import find_rows
from recast.runtime.dynamic.settings import Initial
from recast.runtime.dynamic.table import DynamicTable


class _Dynamic(nn.Module):
    """What both kinds of module share."""

    recast_layer: ClassVar[bool] = True  # counts as a torch layer, though it takes any ids
    table: DynamicTable
    weight: Any  # the Parameter

    def _rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        matrix, rows = find_rows([self.table], [self.weight], [ids], [0], [self.training])
        return matrix, rows

    def _padding(self) -> int | None:
        return None if self.table.padding is None else 0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.table.check_generation(self.weight)
        index = self.table.index
        ids, rows, scores, stamps = self.table.stored()
        kept = {
            "weight": self.table.take("weight", self.weight.detach(), rows),
            "ids": ids,
            "scores": scores,
            "stamps": stamps,
            "clock": torch.tensor([index.step, index.epoch, index.looked_up, self.table.seed]),
            "initial": self.table.initial.pack(),
            "seen": self.table.candidates(),
        }
        if self.table.padding is not None:
            kept["padding"] = self.weight.detach()[:1].clone()
        destination.update({prefix + name: value for name, value in kept.items()})

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        names = ["weight", "ids", "scores", "stamps", "clock", "initial", "seen"]
        names += ["padding"] * (self.table.padding is not None)
        absent = [prefix + name for name in names if prefix + name not in state_dict]
        unexpected_keys += [
            key for key in state_dict
            if key.startswith(prefix) and key.removeprefix(prefix) not in names and strict
        ]  # fmt: skip
        if absent:
            missing_keys += absent if strict else []
            return
        try:
            self._take({name: state_dict[prefix + name] for name in names})
        except CheckpointError as error:
            error_msgs.append(str(error))

    def _take(self, kept: dict[str, Tensor]) -> None:
        table = self.table
        table.chosen = len(kept["ids"]), own_rows(table, kept["ids"])
        kept = own_entries(table, kept)
        n = len(kept["ids"])
        if kept["weight"].shape != (n, table.dim):
            raise CheckpointError(
                f"{table.name}: rows of shape {tuple(kept['weight'].shape)} for {n} ids",
                why=f"this table has rows of {table.dim} numbers, one for each id",
            )
        with torch.no_grad():
            slab = self.weight.data
            table.load(slab, kept["ids"], kept["scores"], kept["stamps"], kept["weight"])
            if "padding" in kept:
                slab[:1] = kept["padding"].to(slab)
        table.load_candidates(kept["seen"])
        clock = map(int, kept["clock"])
        table.index.step, table.index.epoch, table.index.looked_up, table.seed = clock
        table.initial = Initial.unpack(kept["initial"])

    def extra_repr(self) -> str:
        return f"{self.table.capacity}, {self.table.dim}, dynamic, {len(self.table)} rows"


class DynamicEmbedding(_Dynamic, nn.Embedding):
    """``nn.Embedding`` over a dynamic table."""

    def forward(self, input: Tensor) -> Tensor:
        matrix, rows = self._rows(input)
        out: Tensor = torch.ops.recast.embedding_bags.default(
            [matrix], [rows], [None], [None], [0], ["none"], [self._padding()], [False],
            [self.sparse],
        )[0]  # fmt: skip
        return out


class DynamicEmbeddingBag(_Dynamic, nn.EmbeddingBag):
    """``nn.EmbeddingBag`` over a dynamic table."""

    def forward(
        self, input: Tensor, offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        matrix, rows = self._rows(input)
        out: Tensor = torch.ops.recast.embedding_bags.default(
            [matrix], [rows], [offsets], [per_sample_weights], [0], [self.mode],
            [self._padding()], [self.include_last_offset], [self.sparse],
        )[0]  # fmt: skip
        return out
