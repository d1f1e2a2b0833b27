"""What the graph assumes is checked at each call; what cannot be checked is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from forms import FORMS
from guarded import Net, both, check, ids
from torch import Tensor, nn

from recast.rewriter.capture.capture_model import capture
from recast.rewriter.compiled.module import Compiled


def test_a_branch_not_seen_in_the_example_is_taken() -> None:
    model, batch = FORMS["ValueGuard"]
    plain, fast, it = both(model(), *batch(8))
    assert it.kind == "whole"
    check(plain, fast, *batch(5))
    check(plain, fast, batch(5)[0] + 200, warns="control flow that depends on values")
    check(plain, fast, *batch(6))


def test_a_branch_on_the_number_of_rows() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(self.table(x).sum(1))
            return y.squeeze() if x.shape[0] == 1 else y * 2

    plain, fast, it = both(Model(), ids(8))
    assert it.kind == "whole"
    check(plain, fast, ids(3))
    check(plain, fast, ids(1), warns="control flow that depends on values")


def test_a_loop_over_a_value() -> None:
    class Model(Net):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            y = self.table(x)
            total = torch.zeros(x.size(0), 4)
            for k in range(int(lengths.max())):
                total = total + y[:, k]
            return self.a(total)

    plain, fast, it = both(Model(), ids(8), torch.full((8,), 2))
    assert it.kind == "whole"
    check(plain, fast, ids(4), torch.full((4,), 2))
    check(plain, fast, ids(4), torch.full((4,), 3), warns="control flow that depends on values")


def test_examples_that_disagree_name_the_line_and_the_remedies() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(self.table(x).sum(1))
            if x.size(0) > 6:
                y = y * 2
            return y

    model = Model()
    it = capture(model, ids(8))
    line = Model.forward.__code__.co_firstlineno + 2
    assert it.kind == "partial"
    assert it.where == f"test_guards.py:{line}"
    assert it.why is not None and "bool()" in it.why and "True for one example" in it.why
    assert any("torch.where" in t for t in it.tries)
    assert list(it.parts) == ["table"]  # a lone Linear gains nothing
    check(copy.deepcopy(model), Compiled(it), ids(3))
    check(copy.deepcopy(model), Compiled(it), ids(9))


def test_a_question_that_draws_random_numbers_is_refused() -> None:
    class Noisy(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.table(x).sum(1)
            if torch.rand(()) < 2:
                y = y + torch.rand(4)
            return self.a(y)

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.noisy = Noisy()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.noisy(x) + self.table(x).mean(1))

    plain, fast, it = both(Model(), ids(8))
    assert it.kind == "partial"
    assert it.why is not None and "may draw random numbers" in it.why
    assert list(it.parts) == ["noisy.table"]
    assert [m.node for m in it.misses] == ["noisy"]
    check(plain, fast, ids(5))


def test_other_fixed_sizes_run_plain() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.table(x)
            return self.a(sum(y[:, k] * (k + 1) for k in range(x.shape[1])))

    plain, fast, it = both(Model(), ids(8))
    assert it.kind == "whole"
    check(plain, fast, ids(5))
    check(plain, fast, ids(5, width=4), warns="x had 3 in dimension 1 .* is now of shape")


def test_sizes_that_nobody_reads_may_change() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.table(x).sum(1))

    plain, fast, _ = both(Model(), ids(8))
    check(plain, fast, ids(5, width=7))


def test_other_structures_run_plain() -> None:
    class Model(Net):
        def forward(self, x: dict[str, Tensor]) -> Tensor:
            return self.a(sum(self.table(v).sum(1) for v in x.values()))

    plain, fast, _ = both(Model(), {"a": ids(8), "b": ids(8)})
    check(plain, fast, {"a": ids(5), "b": ids(5)})
    check(plain, fast, {"a": ids(5)}, warns="another structure")


def test_dtypes_that_forward_reads() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + torch.ones(2, dtype=x.dtype)

    plain, fast, it = both(Model(), torch.randn(8, 3))
    assert it.kind == "whole"
    check(plain.double(), fast.double(), torch.randn(5, 3).double(), warns="other dtypes")


def test_dtypes_of_parameters_that_forward_reads() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.table(x)
            mask = (x > 4).to(y.dtype).unsqueeze(-1)
            return self.a((y * mask).sum(1) / mask.sum(1).clamp(min=torch.finfo(y.dtype).eps))

    plain, fast, it = both(Model(), ids(8))
    assert it.kind == "whole"
    check(plain, fast, ids(5))
    check(plain.double(), fast.double(), ids(5), warns="forward reads dtypes")


def test_a_switch_in_forward_is_refused() -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.odd = False

        def forward(self, x: Tensor) -> Tensor:
            self.odd = not self.odd
            return self.a(self.table(x).sum(1)) * self.odd

    plain, fast, it = both(Model(), ids(8))
    assert it.kind == "partial"
    assert it.why is not None and "forward changes self.odd" in it.why
    line = Model.forward.__code__.co_firstlineno + 1
    assert it.where == f"test_guards.py:{line}"
    for _ in range(3):
        check(plain, fast, ids(5))


@pytest.mark.parametrize("absent", [False, True])
def test_a_submodule_that_forward_replaces_is_refused(absent: bool) -> None:
    """As a table that a model ties to another one, but only once it is called."""

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Embedding(*self.table.weight.shape)

        def forward(self, x: Tensor) -> Tensor:
            self.other = None if absent else self.table
            return self.a(((self.other or self.table)(x) * self.table(x)).sum(1))

    plain, fast, it = both(Model(), ids(8))
    assert it.kind == "partial"
    assert it.why is not None and "forward replaces the submodule self.other" in it.why
    line = Model.forward.__code__.co_firstlineno + 1
    assert it.where == f"test_guards.py:{line}"
    for _ in range(3):
        check(plain, fast, ids(5))
        assert [*plain.state_dict()] == [*fast.state_dict()]


def test_a_parameter_that_forward_replaces_is_refused() -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            self.scale = nn.Parameter(self.scale.detach() * 0.5)
            return self.a(self.table(x).sum(1)) * self.scale

    plain, fast, it = both(Model(), ids(8))
    assert it.kind == "partial"
    assert it.why is not None and "forward replaces the parameter self.scale" in it.why
    for _ in range(3):
        check(plain, fast, ids(5))


def test_a_refusal_that_forward_swallows_still_counts() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            try:
                rows = int(x.float().sum())
            except Exception:
                rows = 0
            return self.a(self.table(x).sum(1)) * rows

    plain, fast, it = both(Model(), ids(8))
    assert it.kind == "partial"
    check(plain, fast, ids(5))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * 100 * x  # not the derivative: a straight-through estimator, say


def test_an_own_autograd_function_keeps_its_backward() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Square.apply(x)

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.square = Layer()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.square(self.table(x).sum(1)))

    plain, fast, it = both(Model(), ids(8))
    assert it.kind == "whole" and not it.misses
    for model in (plain, fast):
        model(ids(5)).backward(torch.ones(5, 4))
    torch.testing.assert_close(fast.table.weight.grad, plain.table.weight.grad)


@pytest.mark.parametrize("cause", ["numpy", "backward", "parameter"])
def test_other_refusals_name_the_reason(cause: str) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            if cause == "numpy":
                return x * float(x.detach().numpy().sum())
            if cause == "backward":
                y = x.detach().requires_grad_()
                (y * y).sum().backward()
                return x
            with torch.no_grad():
                self.w.clamp_(min=0)
            return x * self.w

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.layer(self.table(x).sum(1)))

    plain, fast, it = both(Model(), ids(8))
    assert [m.node for m in it.misses] == ["layer"], it.why
    why = {
        "numpy": "leaves torch for numpy", "backward": "backward",
        "parameter": "writes in place to a parameter",
    }[cause]  # fmt: skip
    assert why in it.misses[0].why
    assert it.misses[0].where is not None and "test_guards.py:" in it.misses[0].where
    check(plain, fast, ids(5))


def test_a_layer_in_a_plain_list_that_keeps_statistics() -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norms = [nn.BatchNorm1d(4)]

        def forward(self, x: Tensor) -> Tensor:
            return self.norms[0](self.a(self.table(x).sum(1)))

    _, _, it = both(Model(), ids(8))
    assert it.kind == "partial"
    assert it.why is not None and "a buffer of a BatchNorm1d that is no submodule" in it.why
    assert it.tries[0].startswith("nn.ModuleList")
    assert it.where is not None and it.where.startswith("test_guards.py:")


def test_without_an_example() -> None:
    model, batch = FORMS["Dropouts"]
    it = capture(model())
    assert it.kind == "whole"
    plain, fast = model(), Compiled(it)
    fast.load_state_dict(plain.state_dict())
    for mode in (True, False):
        check(plain.train(mode), fast.train(mode), *batch(5))
    it = capture(FORMS["EnumeratesList"][0]())
    assert it.kind == "none"
    assert it.where is not None and it.where.startswith("forms_inside.py:")
    assert any("example=batch" in t for t in it.tries)


def test_a_failed_trace_leaves_nothing_behind() -> None:
    before = {n: getattr(torch, n) for n in dir(torch)}
    tensor = {n: vars(torch.Tensor).get(n) for n in dir(torch.Tensor)}
    call, get = nn.Module.__call__, nn.Module.__getattr__

    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("broken") if x.sum().item() > 1e9 or x.size(0) > 6 else KeyError("no")

    with pytest.raises(Exception, match=r"broken|no"):
        capture(Model(), ids(8))
    assert all(getattr(torch, n) is v for n, v in before.items())
    assert all(vars(torch.Tensor).get(n) is v for n, v in tensor.items())
    assert nn.Module.__call__ is call
    assert nn.Module.__getattr__ is get
    assert torch.zeros(2).sum() == 0


def test_another_thread_is_not_disturbed() -> None:
    import threading

    model, batch = FORMS["Factories"]
    errors: list[Exception] = []
    stop = threading.Event()

    def work() -> None:
        layer = nn.Linear(3, 3)
        while not stop.is_set():
            try:
                out = layer(torch.zeros(4, 3)) + torch.arange(3).view(1, 3)
                assert type(out) is torch.Tensor
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            assert capture(model(), batch(8)).kind == "whole"
    finally:
        stop.set()
        thread.join()
    assert errors == []
