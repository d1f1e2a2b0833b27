"""How torch.distributed.checkpoint writes and reads our tensors: block by block, in place.

A block is some rows of one shard, at most ``shards_state.BLOCK`` bytes. To load a shard with other
boundaries, the blocks that overlap it are read one after the other, one in memory at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from recast.runtime.ranks import shards_state
from recast.runtime.ranks.shards import ShardedTable

Offset = tuple[int, ...]


class Blocks:
    """A tensor of ``shape``, or this rank's parts of it: views of their memory, by offset."""

    def __init__(self, shape: Iterable[int], parts: Iterable[tuple[Offset, Tensor]]) -> None:
        self.shape = torch.Size(shape)
        self.views = {at: view for part in parts for at, view in _cut(*part) if view.numel()}

    def size(self) -> torch.Size:
        """The shape of the whole tensor."""
        return self.shape

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(at)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(at, view),
                    properties=TensorProperties.create_from_tensor(view),
                    size=self.shape,
                ),
            )
            for at, view in self.views.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(at, view) for at, view in self.views.items()]


def whole(tensor: Tensor) -> Blocks:
    """The blocks of a tensor that this rank has as a whole."""
    tensor = tensor.detach()
    return Blocks(tensor.shape, [((0,) * tensor.dim(), tensor)])


def part(local: Tensor, sharded: ShardedTable) -> Blocks:
    """The blocks of the local part of a table, or of its optimizer state."""
    shape = sharded.whole_shape(local)
    assert shape is not None, f"{sharded.table.name}: {tuple(local.shape)}"
    return Blocks(shape, sharded.pieces(local.detach()))


def _cut(at: Offset, tensor: Tensor) -> Iterator[tuple[Offset, Tensor]]:
    if tensor.dim() == 0:
        yield at, tensor
        return
    row = max(1, tensor[:1].numel() * tensor.itemsize)
    step = max(1, shards_state.BLOCK // row)
    for first in range(0, len(tensor), step):
        yield (at[0] + first, *at[1:]), tensor[first : first + step]


def _chunk(at: Offset, view: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(at), sizes=view.size())


# --- torch.distributed.checkpoint ----------------------------------------------------------------


class _Save(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return _find(self.state_dict, index)


class _Load(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        # torch's own planner would look for meta tensors, and drop everything that is no tensor
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _find(self.state_dict, index)


def _find(state: Mapping[str, Any], index: MetadataIndex) -> Tensor:
    assert index.offset is not None
    view: Tensor = state[index.fqn].views[tuple(index.offset)]
    return view


def write(folder: Path, state: dict[str, Blocks], group: ProcessGroup | None) -> None:
    """Every rank writes its own blocks; a block that several ranks have is written once."""
    alone = not dist.is_initialized()
    with warnings.catch_warnings():
        # torch warns that it assumes a single process, which is intended here
        warnings.filterwarnings("ignore", message="torch.distributed is")
        save(
            dict(state), storage_writer=FileSystemWriter(folder), planner=_Save(),
            process_group=group, no_dist=alone,
        )  # fmt: skip


def read(folder: Path, state: dict[str, Blocks], group: ProcessGroup | None) -> None:
    """Every rank reads its blocks, straight into the memory that they view."""
    alone = not dist.is_initialized()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        load(
            dict(state), storage_reader=FileSystemReader(folder), planner=_Load(),
            process_group=group, no_dist=alone,
        )  # fmt: skip
