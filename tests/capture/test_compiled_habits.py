"""A Compiled is used as the user's model is used: modes, copies, files, hooks, wrappers."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading
import time
import timeit
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forms import FORMS
from torch import Tensor, nn
from torch.utils import checkpoint

from recast.errors import IdError, RecastWarning
from recast.rewriter.capture import capture
from recast.rewriter.compiled import Compiled


class Ranker(nn.Module):
    """An ordinary model: tables, a chain with BatchNorm and Dropout, defaults and keywords."""

    kind = "ranker"

    def __init__(self, tables: int = 4) -> None:
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(10, 4) for _ in range(tables))
        self.top = nn.Sequential(
            nn.Linear(4 * tables + 3, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(8, 1),
        )
        self.temperature = 1.0

    def forward(self, dense: Tensor, ids: Tensor, *, bias: float = 0.0) -> Tensor:
        raise NotImplementedError

    def predict(self, *args: Tensor) -> Tensor:
        return torch.sigmoid(self(*args))


class Plain(Ranker):
    def forward(self, dense: Tensor, ids: Tensor, bias: float = 0.0) -> Tensor:  # type: ignore[override]
        e = [t(ids[:, k]) for k, t in enumerate(self.emb)]
        return self.top(torch.cat([dense, *e], 1)).squeeze(1) / self.temperature + bias


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, 10, (rows, 4), generator=generator)
    return torch.randn(rows, 3, generator=generator), ids


def pair() -> tuple[Plain, Compiled]:
    """The plain model, and a compiled copy that shares its parameters."""
    torch.manual_seed(0)
    model = Plain()
    return model, Compiled(capture(model, batch(16)))


def twins() -> tuple[Plain, Compiled]:
    """The same, with parameters of their own."""
    torch.manual_seed(0)
    return Plain(), pair()[1]


def same(plain: Any, fast: Any, args: tuple[Any, ...] = batch(7), **kw: Any) -> None:
    torch.manual_seed(3)
    wanted = plain(*args, **kw)
    torch.manual_seed(3)
    torch.testing.assert_close(fast(*args, **kw), wanted)


def test_arguments_as_the_users() -> None:
    plain, fast = pair()
    plain.eval(), fast.eval()
    dense, ids = batch(7)
    same(plain, fast)
    same(plain, lambda *a: fast(dense, ids=ids))
    same(plain, lambda *a: fast(ids=ids, dense=dense))
    with pytest.raises(TypeError, match="unexpected keyword argument 'bais'"):
        fast(dense, ids, bais=1.0)
    with pytest.raises(TypeError, match="missing a required argument: 'ids'"):
        fast(dense)
    with pytest.warns(RecastWarning, match="other constants"):
        same(plain, fast, bias=0.5)


def test_train_and_eval_follow_every_flag() -> None:
    plain, fast = twins()
    for mode in (True, False, True):
        same(plain.train(mode), fast.train(mode))
        assert fast.training is mode
    for model in (plain, fast):
        model.train()
        model.top[1].eval()
    same(plain, fast)
    for model in (plain, fast):
        model.top[3].p = 0.0
        model.top[1].eps = 0.1
    same(plain, fast)
    assert fast.top[1].num_batches_tracked == plain.top[1].num_batches_tracked > 0


def test_flags_are_its_own_and_tensors_are_shared() -> None:
    plain, fast = pair()
    fast.eval()
    assert plain.training and plain.top[3].training
    with torch.no_grad():
        plain.top[0].weight.mul_(2)
    same(plain.eval(), fast)
    fast.load_state_dict(
        {k: v * 1.5 if v.is_floating_point() else v for k, v in plain.state_dict().items()}
    )
    same(plain, fast)


def test_mixed_flags_that_no_graph_covers_run_plain() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = FORMS["ForksOnTraining"][0](), FORMS["ForksOnTraining"][0]()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    model = Two()
    args = FORMS["ForksOnTraining"][1](6)
    plain, fast = copy.deepcopy(model), Compiled(capture(model, args))
    for one in (plain, fast):
        one.a.eval()
    with pytest.warns(RecastWarning, match="some modules are in train mode and some in eval"):
        same(plain, fast, args)
    assert set(fast.graphs) == {"train", "eval"}


def test_users_attributes_and_methods_are_there() -> None:
    plain, fast = pair()
    plain.eval(), fast.eval()
    assert fast.kind == "ranker"
    assert fast.temperature == 1.0
    torch.testing.assert_close(fast.predict(*batch(5)), plain.predict(*batch(5)))
    with pytest.raises(AttributeError, match="nothing"):
        _ = fast.nothing


def test_a_changed_attribute_is_not_silent() -> None:
    plain, fast = pair()
    plain.eval(), fast.eval()
    plain.temperature = fast.temperature = 2.0
    with pytest.warns(RecastWarning, match=r"temperature was 1\.0 and is now 2\.0"):
        same(plain, fast)
    fast.temperature = plain.temperature = 1.0
    same(plain, fast)


def test_a_replaced_module_is_not_silent() -> None:
    plain, fast = twins()
    plain.eval(), fast.eval()
    new = nn.Linear(8, 1)
    plain.top[4] = new
    fast.top[4] = new
    with pytest.warns(RecastWarning, match="was replaced"):
        same(plain, fast)
    plain.top[0].weight = fast.top[0].weight = nn.Parameter(torch.randn_like(plain.top[0].weight))
    same(plain, fast)


@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "global"])
def test_a_hook_added_later_runs(kind: str) -> None:
    _, fast = pair()
    graph = fast.graph
    for node in list(graph.nodes):  # as a pass does: the module is no longer called
        if node.target == "top.0":
            with graph.inserting_before(node):
                weight = graph.get_attr("top.0.weight")
                bias = graph.get_attr("top.0.bias")
                new = graph.call_function(nn.functional.linear, (node.args[0], weight, bias))
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    fast._runner.build()
    fast.eval()
    wanted = fast(*batch(5))
    seen: list[str] = []
    note = lambda *a: seen.append(kind)  # noqa: E731
    add = {
        "forward": fast.top[0].register_forward_hook,
        "pre": fast.top[0].register_forward_pre_hook,
        "backward": fast.top[0].register_full_backward_hook,
        "global": nn.modules.module.register_module_forward_hook,
    }[kind]
    handle = add(note)
    with pytest.warns(RecastWarning, match="a hook was added"):
        got = fast(*batch(5))
    got.sum().backward()
    assert seen
    torch.testing.assert_close(got, wanted)
    handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(*batch(5))


def test_asking_costs_microseconds() -> None:
    fast = Compiled(capture(Plain(tables=4), batch(16)))
    seconds = min(timeit.repeat(fast._runner.unfused, number=200, repeat=5)) / 200
    assert seconds < 50e-6


def test_hooks_and_parametrizations_there_before_are_kept() -> None:
    torch.manual_seed(0)
    model = Plain()
    seen: list[int] = []
    model.top[0].register_forward_hook(lambda *a: seen.append(1))
    nn.utils.parametrizations.weight_norm(model.top[4])
    it = capture(model, batch(16))
    plain, fast = copy.deepcopy(model), Compiled(it)
    why = {m.node: m.why for m in it.misses}
    assert "forward hooks" in why["top.0"]
    assert "parametrized" in why["top.4"]
    assert it.kind == "whole"
    seen.clear()
    same(plain.eval(), fast.eval())
    assert len(seen) == 2
    assert list(fast.state_dict()) == list(plain.state_dict())


def test_a_hooked_container_runs_its_hook_and_its_inside_is_captured() -> None:
    torch.manual_seed(0)
    model = Plain()
    model.top.register_forward_hook(lambda m, args, out: out * 2)
    it = capture(model, batch(16))
    assert it.kind == "partial"
    assert list(it.parts) == ["top"]
    assert it.parts["top"].kind == "whole"
    assert {n.target for n in it.parts["top"].graphs["both"].nodes if n.op == "call_module"} == {
        "0", "1", "2", "3", "4",
    }  # fmt: skip
    plain, fast = copy.deepcopy(model), Compiled(it)
    for mode in (True, False):
        same(plain.train(mode), fast.train(mode))
    assert isinstance(fast.top, nn.Sequential)
    assert list(fast.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in fast.named_modules()] == [n for n, _ in plain.named_modules()]


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_a_subclass_that_overrides_forward_runs_as_it_is() -> None:
    torch.manual_seed(0)
    model = Plain()
    model.top[4] = Doubled(8, 1)
    it = capture(model, batch(16))
    assert [(m.node, m.why) for m in it.misses] == [
        ("top.4", "a subclass of Linear that overrides forward")
    ]
    same(copy.deepcopy(model).eval(), Compiled(it).eval())


def test_deepcopy_is_whole_and_its_own() -> None:
    plain, fast = pair()
    fast.report = {"captured": "whole"}
    twin = copy.deepcopy(fast)
    same(plain.eval(), twin.eval())
    assert fast.training
    assert twin.report == fast.report
    assert str(twin) == str(fast)
    with torch.no_grad():
        twin.top[0].weight.zero_()
    assert plain.top[0].weight.abs().sum() > 0
    assert twin.top[0].weight is dict(twin.named_parameters())["top.0.weight"]
    same(plain, fast.eval())


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_saved_whole(how: str, tmp_path: Path) -> None:
    plain, fast = pair()
    fast.report, fast.plan = {"fired": 3}, "plan"
    if how == "pickle":
        again = pickle.loads(pickle.dumps(fast))
    else:
        torch.save(fast, tmp_path / "fast.pt")
        again = torch.load(tmp_path / "fast.pt", weights_only=False)
    for mode in (True, False):
        same(plain.train(mode), again.train(mode))
    assert (again.report, again.plan) == (fast.report, fast.plan)
    assert str(again) == str(fast)
    assert again.code.splitlines()[3:] == fast.code.splitlines()[3:]
    assert list(again.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("name", FORMS)
def test_every_form_survives_saving(name: str) -> None:
    make, args = FORMS[name]
    fast = Compiled(capture(make(), args(9)))
    buffer = io.BytesIO()
    torch.save(fast, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False).eval()
    fast.eval()
    leaves = torch.utils._pytree.tree_leaves
    torch.manual_seed(0)
    wanted = fast(*copy.deepcopy(args(5)))
    torch.manual_seed(0)
    got = again(*copy.deepcopy(args(5)))
    for a, b in zip(leaves(wanted), leaves(got), strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b)


def test_state_dict_both_ways() -> None:
    plain, fast = twins()
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(0.1)
    fast.load_state_dict(plain.state_dict())
    same(plain.eval(), fast.eval())
    fresh = Plain()
    fresh.load_state_dict(fast.state_dict())
    same(fresh.eval(), fast)
    with pytest.raises(RuntimeError, match="Missing key"):
        fast.load_state_dict({"top.0.weight": plain.top[0].weight})


def test_to_and_dtypes() -> None:
    plain, fast = twins()
    plain.double().eval(), fast.double().eval()
    dense, ids = batch(5)
    same(plain, fast, (dense.double(), ids))
    assert fast.top[0].weight.dtype is torch.float64


def test_nested_in_another_module() -> None:
    plain, fast = twins()

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
            return self.inner(dense, ids) * 2

    a, b = Outer(plain), Outer(fast)
    for mode in (True, False):
        same(a.train(mode), b.train(mode))
    assert list(a.state_dict()) == list(b.state_dict())
    assert "Compiled" in repr(b)
    again = Compiled(capture(b, batch(9)))
    same(a.eval(), again.eval())


def test_optimizing_a_compiled_again() -> None:
    plain, fast = pair()
    again = Compiled(capture(fast, batch(9)))
    same(plain.eval(), again.eval())
    assert list(again.state_dict()) == list(plain.state_dict())


def test_inplace_rewrites_the_model_itself() -> None:
    model = Plain().eval()
    it = capture(model, batch(9), inplace=True)
    assert it.root is model
    fast = Compiled(it)
    fast.train()
    assert model.training


def test_training_steps_equal_the_plain_ones() -> None:
    plain, fast = twins()
    optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (plain, fast)]
    for step in range(3):
        for model, optimizer in zip((plain, fast), optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            out = model(*batch(11))
            out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(step)))
            optimizer.step()
    for (n, a), (_, b) in zip(plain.state_dict().items(), fast.state_dict().items(), strict=True):
        torch.testing.assert_close(b, a, msg=n)


def test_autocast() -> None:
    plain, fast = twins()
    plain.eval(), fast.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fast(*batch(5)).dtype is torch.bfloat16
        same(plain, fast)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    plain, fast = twins()
    dense, ids = batch(6)
    got = []
    for model in (plain, fast):
        x = dense.clone().requires_grad_()
        torch.manual_seed(1)
        out = checkpoint.checkpoint(model, x, ids, use_reentrant=reentrant)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
        got.append((out.detach(), x.grad, model.top[0].weight.grad))
    for a, b in zip(*got, strict=True):
        torch.testing.assert_close(b, a)


def test_functional_call_and_vmap_of_gradients() -> None:
    plain, fast = pair()
    plain.eval(), fast.eval()
    changed = {k: v * 2 if v.is_floating_point() else v for k, v in plain.state_dict().items()}
    torch.testing.assert_close(
        torch.func.functional_call(fast, changed, batch(4)),
        torch.func.functional_call(plain, changed, batch(4)),
    )


def test_torch_compile() -> None:
    plain, fast = twins()
    compiled = torch.compile(fast, backend="aot_eager")
    for mode in (False, True):
        plain.train(mode), fast.train(mode)
        for model in (plain, fast):
            model.top[3].p = 0.0
        same(plain, compiled)
        same(plain, compiled, batch(9))
    got = []
    for model in (plain, compiled):
        out = model(*batch(6))
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
    for (n, a), (_, b) in zip(plain.named_parameters(), fast.named_parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=n)
    assert got == []


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_what_leaves_python_is_the_plain_model() -> None:
    """A trace or an exported program runs where nobody knows our operations."""
    plain, fast = twins()
    plain.eval(), fast.eval()
    traced = torch.jit.trace(fast, batch(5))
    assert "recast::" not in str(traced.inlined_graph)
    exported = torch.export.export(fast, batch(5))
    assert "recast." not in str(exported.graph)
    wanted = plain(*batch(5))
    torch.testing.assert_close(traced(*batch(5)), wanted)
    torch.testing.assert_close(exported.module()(*batch(5)), wanted)
    torch.testing.assert_close(fast(*batch(5)), wanted)


def test_threads_may_make_the_first_call_of_what_was_loaded() -> None:
    plain, fast = twins()
    plain.eval(), fast.eval()
    saved, wanted, found = pickle.dumps(fast), plain(*batch(6)), []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            loaded = pickle.loads(saved)
            work = partial(lambda model: found.append(model(*batch(6))), loaded)
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(found) == 20
    for output in found:
        torch.testing.assert_close(output, wanted)


def test_errors_name_the_module_and_the_line() -> None:
    _, fast = pair()
    dense, ids = batch(4)
    with pytest.raises(IndexError) as caught:
        fast(dense, ids + 100)
    assert any("emb.0" in n and "test_compiled_habits.py:" in n for n in caught.value.__notes__)

    def bad(*_: Any, **__: Any) -> None:
        raise IdError("id 100 is outside its table")

    fast.top[0].forward = bad
    with pytest.raises(IdError) as ours:
        fast(dense, ids)
    assert ours.value.where is not None
    assert "top.0" in ours.value.where and "test_compiled_habits.py:" in ours.value.where


def test_capture_takes_less_than_a_second() -> None:
    model = Plain(tables=26)
    args = torch.randn(64, 3), torch.randint(0, 10, (64, 26))
    started = time.process_time()
    it = capture(model, args)
    assert it.kind == "whole"
    assert time.process_time() - started < 1.0


def test_distributed_data_parallel(tmp_path: Path) -> None:
    plain, fast = twins()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        wrapped = nn.parallel.DistributedDataParallel(fast)
        for model in (plain, wrapped):
            torch.manual_seed(0)
            out = model(*batch(6))
            out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
        for (n, a), (_, b) in zip(plain.named_parameters(), fast.named_parameters(), strict=True):
            torch.testing.assert_close(b.grad, a.grad, msg=n)
        assert list(wrapped.module.state_dict()) == list(plain.state_dict())
    finally:
        torch.distributed.destroy_process_group()


def test_an_operation_that_knows_tables_by_number_names_them() -> None:
    _, fast = pair()
    graph = fast.graph
    node = next(n for n in graph.nodes if n.target == "emb.2")
    with graph.inserting_before(node):
        weights = [graph.get_attr(f"emb.{k}.weight") for k in range(4)]
        new = graph.call_function(broken, (weights, node.args[0]))
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    fast._runner.build()
    with pytest.raises(IdError) as caught:
        fast(*batch(4))
    text = str(caught.value).splitlines()
    assert text[0] == "id 9 of lookup 0 (table emb.2.weight) is outside its 3 rows"
    assert text[1].startswith("  at   test_compiled_habits.py:")
    assert text[1].endswith("(emb.2.weight)")


def broken(weights: list[Tensor], ids: Tensor) -> Tensor:
    raise IdError("id 9 of lookup 0 (table 2) is outside its 3 rows")
