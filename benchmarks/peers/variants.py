"""Every way to train the model: ours, eager PyTorch, torch.compile, FBGEMM, TorchRec.

All train the same tables and states (:class:`~peers.model.Tables`), each with a dense part of its
own that starts from the same numbers. A variant gets its batch in the form it asks for; making that
is not timed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recast
from peers.cells import Cell
from peers.model import START, Batch, DensePart, Tables, batch, plain
from recast.optim import RowWiseAdagrad

LR, EPS = 0.01, 1e-10
Form = Literal["lists", "flat", "jagged"]
Semantics = Literal["exact", "row-wise"]


class Variant:
    """One way to train.

    forward: (dense (B, 13), input) -> clicks (B,); form: what ``input`` is; dense: the modules with
    dense parameters; optimizers: all that step.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[[Tensor, Any], Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        form: Form,
        shared: Sequence[Tensor] = (),
    ) -> None:
        self.module, self.forward, self.form = module, forward, form
        self.optimizers = list(optimizers)
        tables = {id(t) for t in shared}
        self._dense = [p for p in module.parameters() if id(p) not in tables]
        self._start = [p.detach().clone() for p in self._dense]

    def infer(self, dense: Tensor, given: Any) -> Tensor:
        with torch.no_grad():
            return self.forward(dense, given)

    def train(self, dense: Tensor, given: Any, label: Tensor) -> Tensor:
        """One step; the loss before it."""
        loss = F.binary_cross_entropy(self.forward(dense, given), label)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def reset(self) -> None:
        """Reset the dense part and its optimizer states to those at the start."""
        with torch.no_grad():
            for parameter, start in zip(self._dense, self._start, strict=True):
                parameter.copy_(start)
                for optimizer in self.optimizers:
                    if parameter in optimizer.state:
                        optimizer.state[parameter]["sum"].fill_(START)
                        optimizer.state[parameter]["step"].zero_()


def given(form: Form, b: Batch) -> Any:
    """The ids of a batch in the form that a variant takes."""
    if form == "lists":
        return b.ids
    values = torch.cat([i.reshape(-1) for i in b.ids])
    bags, ids = len(b.ids) * len(b.label), b.ids[0].shape[1]
    if form == "flat":
        return values, torch.arange(0, bags * ids + 1, ids)
    return values, torch.full((bags,), ids)


class Recipe(NamedTuple):
    """How a variant is built, what it needs beside torch, and what its optimizer means."""

    build: Callable[[Tables, Cell], Variant]
    semantics: Semantics
    needs: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Which package is not installed, and how to get it; None when all are."""
        for name in self.needs:
            if importlib.util.find_spec(name) is None:
                return f"needs {name}: {GET[name]}"
        return None


GET = {
    "fbgemm_gpu": "pip install --no-deps fbgemm-gpu-cpu==1.8.0 numpy (the one for torch 2.13)",
    "torchrec": "pip install --no-deps torchrec==1.8.0 tensordict==0.15.3 torchmetrics==1.0.3 tqdm"
    " pyre-extensions==0.0.32 iopath==0.1.10 lightning-utilities typing-inspect mypy-extensions"
    " psutil cloudpickle orjson pyvers portalocker packaging importlib_metadata zipp pyyaml",
}


# ---------------------------------------------------------------- the parts


def _adagrad(
    tables: Tables, model: nn.Module, fused: bool, apart: bool = False
) -> list[torch.optim.Optimizer]:
    """Adagrad of the dense parameters and the tables, whose states are the shared ones.

    apart: the tables have an optimizer of their own, not fused, as sparse gradients need.
    """
    shared = {id(w) for w in tables.weights}
    dense = [p for p in model.parameters() if id(p) not in shared]
    # The constructor makes states, add_param_group does not: the tables get the shared ones below.
    found: list[torch.optim.Optimizer] = [torch.optim.Adagrad(dense, lr=LR, eps=EPS, fused=fused)]
    if apart:
        found.append(torch.optim.Adagrad([{"params": []}], lr=LR, eps=EPS))
    found[-1].add_param_group({"params": tables.weights})
    for weight, total in zip(tables.weights, tables.sums, strict=True):
        found[-1].state[weight] = {"step": torch.zeros(()), "sum": total}
    return found


def _of_lists(model: Callable[..., Tensor]) -> Callable[[Tensor, Any], Tensor]:
    return lambda dense, ids: model(dense, [None] * len(ids), ids)


def _example(tables: Tables, cell: Cell) -> tuple[Any, ...]:
    b = batch(cell, tables.rows, seed=0, size=4)
    return b.dense, [None] * len(b.ids), b.ids


# ---------------------------------------------------------------- ours


def ours(tables: Tables, cell: Cell) -> Variant:
    model = plain(tables, sparse=False)
    (optimizer,) = _adagrad(tables, model, fused=True)
    fast, optimizer = recast.optimize(model, optimizer, example=_example(tables, cell))
    return Variant(fast, _of_lists(fast), [optimizer], "lists", tables.weights)


def ours_row_wise(tables: Tables, cell: Cell) -> Variant:
    model = plain(tables, sparse=False)
    optimizer = RowWiseAdagrad(tables.weights, lr=LR, eps=EPS)
    for weight, total in zip(tables.weights, tables.row_sums, strict=True):
        optimizer.state[weight] = {"step": torch.zeros(()), "sum": total}
    fast, _ = recast.optimize(model, optimizer, example=_example(tables, cell))
    shared = {id(w) for w in tables.weights}
    rest = [p for p in fast.parameters() if id(p) not in shared]
    dense = torch.optim.Adagrad(rest, lr=LR, eps=EPS, fused=True)
    return Variant(fast, _of_lists(fast), [optimizer, dense], "lists", tables.weights)


# ---------------------------------------------------------------- eager and compiled


def _compiled(model: nn.Module) -> Any:
    """``model`` by torch.compile, for each batch size, mode and number of threads anew: past its
    own limit of eight recompilations, torch would run the model uncompiled.
    """
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024
    return torch.compile(model, dynamic=False)


def _torch(sparse: bool, fused: bool, compiled: bool) -> Callable[[Tables, Cell], Variant]:
    def build(tables: Tables, cell: Cell) -> Variant:
        model = plain(tables, sparse)
        optimizers = _adagrad(tables, model, fused, apart=sparse)
        run = _compiled(model) if compiled else model
        return Variant(model, _of_lists(run), optimizers, "lists", tables.weights)

    return build


# ---------------------------------------------------------------- FBGEMM and TorchRec


class Pooled(nn.Module):
    """FBGEMM's table-batched lookup, then the dense part."""

    def __init__(self, lookup: nn.Module, dense: nn.Module, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.dense, self.run, self.lookup = dense, run, [lookup]  # its tables are no parameters

    def forward(self, dense: Tensor, ids: tuple[Tensor, Tensor]) -> Tensor:
        return self.run(dense, self.lookup[0](*ids))


def _adopt(lookup: Any, tables: Tables, row_wise: bool) -> None:
    """Let a table-batched lookup train the shared tables."""
    state = tables.flat_row_sums if row_wise else tables.flat_sums
    for name, flat in (("weights_host", tables.flat), ("momentum1_host", state)):
        own = getattr(lookup, name)
        assert own.numel() == flat.numel(), f"FBGEMM lays {name} out in another way"
        own.data = flat.data.view(-1)


def _fbgemm(row_wise: bool, compiled: bool) -> Callable[[Tables, Cell], Variant]:
    def build(tables: Tables, cell: Cell) -> Variant:
        from fbgemm_gpu import split_table_batched_embeddings_ops_common as common
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

        kind = EmbOptimType.EXACT_ROWWISE_ADAGRAD if row_wise else EmbOptimType.EXACT_ADAGRAD
        where = common.EmbeddingLocation.HOST, training.ComputeDevice.CPU
        lookup = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, tables.dim, *where) for rows in tables.rows],
            optimizer=kind, learning_rate=LR, eps=EPS, pooling_mode=common.PoolingMode.SUM,
        )  # fmt: skip
        _adopt(lookup, tables, row_wise)
        part = DensePart(tables)
        run = _compiled(part) if compiled else part
        adagrad = torch.optim.Adagrad(part.parameters(), lr=LR, eps=EPS, fused=True)
        module = Pooled(lookup, part, run)
        return Variant(module, module, [adagrad], "flat")

    return build


def torchrec_fused(tables: Tables, cell: Cell) -> Variant:
    """TorchRec's FusedEmbeddingBagCollection, unsharded; a fresh jagged tensor for each batch."""
    from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    keys = [f"f{t}" for t in range(len(tables.rows))]
    configs = [
        EmbeddingBagConfig(
            name=f"t{t}", embedding_dim=tables.dim, num_embeddings=rows, feature_names=[keys[t]]
        )
        for t, rows in enumerate(tables.rows)
    ]
    collection = FusedEmbeddingBagCollection(
        tables=configs, optimizer_type=torch.optim.Adagrad,
        optimizer_kwargs={"lr": LR, "eps": EPS}, device=torch.device("cpu"),
    )  # fmt: skip
    (group,) = collection._emb_modules  # tables of one width are one lookup
    _adopt(group._emb_module, tables, row_wise=False)
    part = DensePart(tables)

    def forward(dense: Tensor, ids: tuple[Tensor, Tensor]) -> Tensor:
        jagged = KeyedJaggedTensor(keys=keys, values=ids[0], lengths=ids[1])
        return part(dense, collection(jagged).values())

    adagrad = torch.optim.Adagrad(part.parameters(), lr=LR, eps=EPS, fused=True)
    return Variant(part, forward, [adagrad], "jagged")


RECIPES: dict[str, Recipe] = {
    "recast": Recipe(ours, "exact"),
    "recast row-wise": Recipe(ours_row_wise, "row-wise"),
    "FBGEMM exact": Recipe(_fbgemm(False, False), "exact", ("fbgemm_gpu",)),
    "FBGEMM row-wise": Recipe(_fbgemm(True, False), "row-wise", ("fbgemm_gpu",)),
    "TorchRec fused": Recipe(torchrec_fused, "exact", ("fbgemm_gpu", "torchrec")),
    "eager sparse": Recipe(_torch(True, False, False), "exact"),
    "eager fused": Recipe(_torch(False, True, False), "exact"),
    "eager dense": Recipe(_torch(False, False, False), "exact"),
    "FBGEMM + compile": Recipe(_fbgemm(False, True), "exact", ("fbgemm_gpu",)),
    "FBGEMM row-wise + compile": Recipe(_fbgemm(True, True), "row-wise", ("fbgemm_gpu",)),
    "compile sparse": Recipe(_torch(True, False, True), "exact"),
    "compile fused": Recipe(_torch(False, True, True), "exact"),
}
OURS: dict[Semantics, str] = {"exact": "recast", "row-wise": "recast row-wise"}


@dataclass
class Built:
    """The variants that could be built, and why the others could not."""

    variants: dict[str, Variant] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def names(self, semantics: Semantics) -> Iterator[str]:
        return (name for name in self.variants if RECIPES[name].semantics == semantics)


def build(tables: Tables, cell: Cell, names: Sequence[str]) -> Built:
    """The variants called ``names``."""
    built = Built()
    for name in names:
        why = RECIPES[name].missing()
        if why is None:
            try:
                built.variants[name] = RECIPES[name].build(tables, cell)
            except Exception as error:
                why = failure(error)
        if why is not None:
            built.absent[name] = why
    return built


def failure(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"failed: {type(error).__name__}: {first}"[:200]
