"""The backward of a chain of layers on the GPU (:mod:`.cuda`), stage by stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recast.runtime.mlp import aligned as mlp_aligned
from recast.runtime.mlp import mask as mlp_mask
from recast.runtime.mlp import one_output as mlp_one_output
from recast.runtime.mlp import products as mlp_products
from recast.runtime.mlp.chain import Step, there
from recast.runtime.mlp.mask import Finish, Gate
from recast.runtime.mlp.one_output import Layer
from recast.runtime.mlp.run import BACKWARD, backward_activation

Saved = list[Tensor | None]  # by a stage, for its backward


def saved_of(ctx: Any) -> list[Saved]:
    """What each stage kept for backward."""
    saved = iter(ctx.saved_tensors[1:])
    return [[next(saved) if there else None for there in mine] for mine in ctx.present]


class Backward:
    """One run through the stages from the last to the first, without a graph."""

    def __init__(self, ctx: Any) -> None:
        self.gpu, self.chain, self.needs = ctx.gpu, ctx.chain, ctx.needs
        self.stages, self.records, self.kept = ctx.stages, ctx.records, saved_of(ctx)
        self.wants_input = ctx.needs_input_grad[3]
        self.grads: list[Tensor | None] = [None] * len(ctx.versions)
        # The gradient of the current stage's output, and whether it is a buffer of this call.
        self.g: Tensor | None = None
        self.ours = False
        # Whether the stage above has applied this stage's mask to it, and the bias gradient if so.
        self.masked = False
        self.sums: Tensor | None = None
        self.unfinished: list[Finish] = []  # sums that are not needed before the end
        self.reads: list[object] = []  # what the second stream reads

    def run(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the input and of the params."""
        self.g = grad
        for i in range(len(self.stages) - 1, -1, -1):
            stage = self.stages[i]
            if not self.needs[stage.at].any:
                self.g = None
            if self.g is None:
                break
            if stage.kind == "linear":
                self._linear(i, self.g)
            elif stage.kind == "mask":
                self._mask(i, self.g)
            else:
                self._step(i, self.g)
        for finish in self.unfinished:
            finish()
        if self.reads:
            self.gpu.join(())
            self.reads.clear()
        return (self.g if self.wants_input else None, *self.grads)

    def _linear(self, i: int, g: Tensor) -> None:
        stage, (x, _, weight, _) = self.stages[i], self.kept[i]
        step, need = self.chain.steps[stage.at], self.needs[stage.at]
        of_weight, of_bias = self._likes(step, need)
        flat, gate = mlp_products.rows(g), self._gate(i)
        if gate is not None and not self.masked:
            flat = self._passed(flat, gate, None if of_bias is None else of_bias.dtype)
        if gate is None and need.input and of_weight is not None and x is not None:
            layer = self._one_output(i, flat, of_weight, of_bias is not None)
            found = mlp_one_output.backward(self.gpu, layer)
            if found is not None:
                self.grads[step.param], self.sums = found.weight, found.below
                self.grads[step.param + 1] = found.bias
                self._later(found.finish)
                self._goes_on(i, found.x, layer.gate)
                return
        bias_done = gate is not None
        if of_bias is not None and bias_done:
            self.grads[step.param + 1] = self.sums
        of_bias = None if bias_done else of_bias
        if of_weight is None:
            if of_bias is not None:
                self.grads[step.param + 1] = flat.sum(0, dtype=of_bias.dtype)
        else:
            x, out = there(x), of_weight.new_empty(of_weight.shape)
            sums = None if of_bias is None else out.new_empty(out.shape[0])
            self.grads[step.param] = out
            if sums is not None:
                self.grads[step.param + 1] = sums
            wide = out if x.shape[1] == out.shape[1] else out.new_empty(out.shape[0], x.shape[1])
            work = mlp_products.weight_gradient(flat, x, wide, sums)
            if wide is not out:
                work = mlp_aligned.only_columns(work, wide, out)
            if need.input:
                self._beside(work, flat, x, wide)
            else:
                if self.unfinished:
                    self._beside(None)
                work()
        self.g, self.masked, self.sums = None, False, None
        if need.input:
            under, of_below = self._below(i)
            dx, self.sums, finish = mlp_products.input_gradient(
                self.gpu, flat, there(weight), under, of_below
            )
            self._later(finish)
            self._goes_on(i, dx, under)

    def _gate(self, i: int) -> Gate | None:
        """The gate of stage i's relu and dropout; None if it has neither."""
        stage, mine = self.stages[i], self.kept[i]
        bits, out = (mine[1], mine[3]) if stage.kind == "linear" else (mine[0], None)
        if not stage.masked or (bits is None and out is None):
            return None
        return Gate(bits, None if out is None else mlp_mask.flat(out), mlp_mask.scale_of(stage.p))

    def _below(self, i: int) -> tuple[Gate | None, torch.dtype | None]:
        """The gate of the stage below i, and the dtype of its bias gradient."""
        gate = self._gate(i - 1) if i else None
        if gate is None or self.stages[i - 1].kind != "linear":
            return gate, None
        step = self.chain.steps[self.stages[i - 1].at]
        wanted = self._likes(step, self.needs[self.stages[i - 1].at])[1]
        return gate, None if wanted is None else wanted.dtype

    def _one_output(self, i: int, g: Tensor, like: Tensor, has_bias: bool) -> Layer:
        """Stage i, which keeps its input and weight and has no mask."""
        x, _, weight, _ = self.kept[i]
        under, sums = self._below(i)
        return Layer(g, there(weight), there(x), under, like, has_bias, sums)

    def _goes_on(self, i: int, dx: Tensor, under: Gate | None) -> None:
        """Go on with ``dx``, the gradient of stage i's input with the gate ``under`` applied."""
        record = self.records[i]
        self.masked, self.ours = under is not None, True
        dx = dx if dx.shape[1] == record.shape[-1] else dx[:, : record.shape[-1]]
        dx = dx if len(record.shape) == 2 else dx.view(record.shape)
        self.g = dx if dx.dtype == record.dtype else dx.to(record.dtype)

    def _later(self, finish: Finish | None) -> None:
        if finish is not None:
            self.unfinished.append(finish)

    def _beside(self, work: Finish | None, *reads: Tensor) -> None:
        """Start ``work`` and all unfinished sums on the second stream.

        They use memory of the first stream only, kept until that has waited for them: so nothing
        need be recorded with the allocator, which can reuse the memory within a capture.
        """
        with self.gpu.in_parallel(()):
            if work is not None:
                work()
            for finish in self.unfinished:
                finish()
        self.reads += [*reads, *self.unfinished]
        self.unfinished.clear()

    def _likes(self, step: Step, need: Any) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias of a linear layer, each None if its gradient is not wanted."""
        weight, bias = self.chain.params[step.param : step.param + 2]
        return weight if need.params[0] else None, bias if need.params[1] else None

    def _passed(self, flat: Tensor, gate: Gate, sums: torch.dtype | None) -> Tensor:
        """``flat`` with the gate applied; its column sums go to ``self.sums``."""
        dense = flat.contiguous()
        out = dense if self.ours or dense is not flat else torch.empty_like(dense)
        self.sums = None if sums is None else dense.new_empty(dense.shape[1], dtype=sums)
        self._later(mlp_mask.gradient(self.gpu, dense, gate, out, self.sums))
        return out

    def _mask(self, i: int, g: Tensor) -> None:
        if not self.masked:
            flat, gate = mlp_mask.flat(g.contiguous()), self._gate(i)
            assert gate is not None
            self.ours = self.ours or not g.is_contiguous()
            self.g = self._passed(flat, gate, None).view(g.shape)
            self.ours = True
        self.masked = False

    def _step(self, i: int, g: Tensor) -> None:
        stage, record = self.stages[i], self.records[i]
        step, need, (*tape, weight) = self.chain.steps[stage.at], self.needs[stage.at], self.kept[i]
        call = BACKWARD.get(step.name, backward_activation)
        self.g, found = call(self.chain, step, tape, record.info, weight, need, g, self.ours)
        if self.g is not None and self.g.dtype != record.dtype:
            self.g = self.g.to(record.dtype)
        self.ours = self.ours or self.g is not g
        self.grads[step.param : step.param + len(found)] = found
