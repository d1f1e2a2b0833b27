"""What forward prints and logs of the batch: not repeated, not in the way, and no constant."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning
from recast.rewriter.capture.muted import muted

log = logging.getLogger("shown")
IDS = torch.randint(0, 50, (64, 4), generator=torch.Generator().manual_seed(0))
Form = Callable[["Net", Tensor, Tensor], Any]
known: dict[str, float] = {"rows 64": 2.0, "64": 2.0, "torch.Size([64, 4])": 2.0}


class Net(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.log = form, log
        self.e, self.top = nn.Embedding(50, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(x).mean(1)
        factor = self.form(self, x, h)
        out: Tensor = self.top(h)
        return out if factor is None else out * factor


class Handler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.said.append(record.getMessage())
        except Exception as error:
            self.said.append(repr(error))


@pytest.fixture
def said() -> Any:
    handler = Handler()
    log.addHandler(handler)
    log.propagate = False
    yield handler.said
    log.removeHandler(handler)
    log.propagate = True


def logs_decimal(m: Net, x: Tensor, h: Tensor) -> None:
    log.warning("n=%d", len(x))


def logs_any(m: Net, x: Tensor, h: Tensor) -> None:
    log.warning("n=%s %s", len(x), x.shape)


def logs_made(m: Net, x: Tensor, h: Tensor) -> None:
    m.log.warning(f"n={len(x)} {x.shape} {h.mean():.3f}")


def logs_loss(m: Net, x: Tensor, h: Tensor) -> None:
    logging.getLogger("shown").error("m=%.3f", h.mean().item())


def logs_rounded(m: Net, x: Tensor, h: Tensor) -> None:
    log.warning("m=%s", round(float(h.mean().detach()), 3))


def logs_percent(m: Net, x: Tensor, h: Tensor) -> None:
    log.warning("%d of %.2f" % (x.size(0), h.detach().mean()))  # noqa: UP031


def logs_words(m: Net, x: Tensor, h: Tensor) -> None:
    log.warning("%s of %r" % (x.size(0), x.shape))  # noqa: UP031


def logs_format(m: Net, x: Tensor, h: Tensor) -> None:
    log.log(logging.WARNING, "{} of {}".format(x.size(0), str(x.shape)))  # noqa: UP032


def logs_later(m: Net, x: Tensor, h: Tensor) -> None:
    text = f"n={x.size(0)}"
    text += f" m={h.mean()}"
    if m.training:
        log.warning(text)
    log.error("%s", text)


def prints(m: Net, x: Tensor, h: Tensor) -> None:
    print("n", len(x), x.shape, h.mean(), m.training, f"{m.training}")


def prints_made(m: Net, x: Tensor, h: Tensor) -> None:
    print(f"n={x.shape[0]} {tuple(x.shape)}", end="" if m is None else "\n")


def prints_errors(m: Net, x: Tensor, h: Tensor) -> None:
    print("n", len(x), file=sys.stderr)
    sys.stderr.write(f"n {x.size(0)}")


def prints_lists(m: Net, x: Tensor, h: Tensor) -> None:
    print(x[0].tolist(), h.detach().numpy(), [f"{n}" for n in x.shape])


def prints_of_helper(m: Net, x: Tensor, h: Tensor) -> None:
    print(described(x))


def described(x: Tensor) -> str:
    return f"{len(x)} rows of {x.shape}"


@dataclass
class Held:
    x: Any


def prints_objects(m: Net, x: Tensor, h: Tensor) -> None:
    print(Held(x.shape), Held(h))


def asserts(m: Net, x: Tensor, h: Tensor) -> None:
    torch._assert(x.dim() == 2, f"bad {x.shape}")


SHOWN = [logs_decimal, logs_any, logs_made, logs_loss, logs_rounded, logs_percent, logs_words,
         logs_format, logs_later, prints, prints_made, prints_errors, prints_lists,
         prints_of_helper, prints_objects, asserts]  # fmt: skip


@pytest.mark.parametrize("form", SHOWN)
def test_captured_whole(form: Form, said: list[str], capsys: Any) -> None:
    plain, given = Net(form), Net(form)
    fast = recast.optimize(given, example=IDS)
    assert fast.report.captured == "whole", fast.report.why
    told = [n for n in fast.report.notes if n.startswith("printed or logged")]
    expected = form not in (asserts,)
    assert len(told) == expected and all("test_shown.py:" in n for n in told)
    out = capsys.readouterr()
    everything = f"{said} {out}"
    assert "traced" not in everything and "Error" not in everything
    del said[:]
    for rows in (64, 9, 17):  # no other number of rows runs the plain forward: it would warn
        got = fast(IDS[:rows])
        assert not said and capsys.readouterr() == ("", "")
        torch.testing.assert_close(got, plain(IDS[:rows]))
        del said[:]
        capsys.readouterr()


@pytest.mark.parametrize("form", [logs_decimal, logs_made, prints, prints_errors])
def test_a_trace_says_nothing(
    form: Form, said: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is heard is what the plain model says of its batches, when capture runs it."""

    def heard() -> list[str]:
        recast.optimize(Net(form), example=IDS)
        lines = [*said, *"".join(capsys.readouterr()).splitlines()]
        del said[:]
        return lines

    lines = heard()
    assert lines and all("64" in one or "33" in one for one in lines)
    module = importlib.import_module("recast.rewriter.capture.trace")
    monkeypatch.setattr(module, "muted", nullcontext)
    assert len(heard()) > len(lines)


def test_the_streams_and_the_loggers_are_put_back() -> None:
    before = sys.stdout, sys.stderr, [*log.filters], [*logging.root.filters]
    recast.optimize(Net(prints), example=IDS)
    assert before == (sys.stdout, sys.stderr, log.filters, logging.root.filters)


def test_other_threads_are_heard(said: list[str], capsys: Any) -> None:
    with muted():
        thread = threading.Thread(target=lambda: (print("a word"), log.warning("two")))
        thread.start()
        thread.join()
        print("not this")
        log.warning("nor this")
        warnings_go_through()
    assert said == ["two"]
    assert capsys.readouterr().out == "a word\n"


def warnings_go_through() -> None:
    with pytest.warns(UserWarning, match="a warning"):
        warnings.warn("a warning", stacklevel=1)


def test_traces_that_end_in_another_order_leave_no_stream() -> None:
    before = sys.stdout
    first, second = muted(), muted()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert sys.stdout is before


# ---------------------------------------------------------------- no constants


def compares(m: Net, x: Tensor, h: Tensor) -> Any:
    return 2.0 if f"{x.size(0)}" == "64" else None


def looks_up(m: Net, x: Tensor, h: Tensor) -> Any:
    return known.get(f"rows {len(x)}", 1.0)


def looks_up_shape(m: Net, x: Tensor, h: Tensor) -> Any:
    return known.get(str(x.shape), 1.0)


def looks_up_index(m: Net, x: Tensor, h: Tensor) -> Any:
    key = "%d" % x.size(0)  # noqa: UP031
    print(key)
    return known.get(key, 1.0)


def of_tensor(m: Net, x: Tensor, h: Tensor) -> Any:
    return 2.0 if f"{x.max() > 40}".endswith("(True)") else 1.0


def printed_and_used(m: Net, x: Tensor, h: Tensor) -> Any:
    n = int(x.sum())
    print(n)
    return n % 7


def helper_is_used(m: Net, x: Tensor, h: Tensor) -> Any:
    text = described(x)
    print(text)
    return float(text.startswith("64"))


def print_is_another(m: Net, x: Tensor, h: Tensor) -> Any:
    def print(text: str) -> float:
        return float(text == "64") + 1

    return print(f"{len(x)}")


def walrus(m: Net, x: Tensor, h: Tensor) -> Any:
    print(text := f"{len(x)}")
    return float(text == "64")


def of_the_flag(m: Net, x: Tensor, h: Tensor) -> Any:
    return 2.0 if f"{m.training}" == "True" else 1.0


def in_closure(m: Net, x: Tensor, h: Tensor) -> Any:
    text = f"{len(x)}"
    print(text)
    return (lambda: float(text == "64"))()


def in_list(m: Net, x: Tensor, h: Tensor) -> Any:
    texts = found = ["a"]
    texts += [f"{len(x)}"]
    return float(found[-1] == "64")


def in_error(m: Net, x: Tensor, h: Tensor) -> Any:
    try:
        raise ValueError(f"{x.max() > 48}")
    except ValueError as error:
        return 2.0 if str(error) == "True" else 1.0


USED = [compares, looks_up, looks_up_shape, looks_up_index, of_tensor, printed_and_used,
        helper_is_used, print_is_another, walrus, of_the_flag, in_closure, in_list,
        in_error]  # fmt: skip


@pytest.mark.parametrize("form", USED)
def test_what_is_used_is_no_constant(form: Form) -> None:
    plain, fast = Net(form), recast.optimize(Net(form), example=IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecastWarning)
        for training in (True, False):
            for rows in (64, 9, 17, 33):
                for model in (plain, fast):
                    model.train(training)
                torch.testing.assert_close(fast(IDS[:rows]), plain(IDS[:rows]))


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise ValueError(f"not of {x.shape}")
        return x * 2.0


def test_the_error_that_forward_raises_is_said() -> None:
    assert "ValueError: not of torch.Size([64, 4])" in str(
        recast.explain(Raises(), example=IDS).why
    )


class Compared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0 if f"{x.max() > 40}" == "True" else x * 1.0


def test_said_where_a_text_decides() -> None:
    report = recast.explain(Compared(), example=IDS)
    assert "puts a tensor that depends on the batch into a text" in str(report.why)


def test_nothing_of_it_is_left_in_the_graph() -> None:
    """No loss is waited for, and no size guarded."""
    fast = recast.optimize(Net(logs_loss), example=IDS)
    assert all(n.target != "item" for g in fast._runner.graphs.values() for n in g.nodes)
    assert all(not t.guards for t in fast._runner.traced.values())
    fast = recast.optimize(Net(logs_decimal), example=IDS)
    assert all(not t.guards for t in fast._runner.traced.values())
