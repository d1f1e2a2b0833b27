"""Naming a model on the command line: ``package.module:attr`` or ``file.py:attr``.

``attr`` is a Module, or a function or class that returns a model, ``(model, example)``, ``(model,
example, loss)`` or ``(model, example, loss, forms)``; ``--arg name=value`` gives its arguments (see
``arguments``). ``example`` and ``forms`` are what :func:`recast.optimize` takes; ``loss(output)``
returns the scalar to differentiate, or is None.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from recast.errors import UsageError

from .arguments import parse_arguments

RETURNS = "(model, example), (model, example, loss) or (model, example, loss, forms)"


@dataclass(frozen=True)
class Subject:
    """The model that a SPEC names."""

    text: str
    model: nn.Module
    example: Any = None
    loss: Callable[..., Any] | None = None
    forms: tuple[Any, ...] = ()  # further examples, for calls of other forms


def load(text: str, arguments: Sequence[str] = ()) -> Subject:
    """The subject named by ``text``. Raises UsageError with the user's file and line."""
    place, separator, attribute = text.rpartition(":")
    if not separator or not place or not attribute:
        raise UsageError(
            f"spec: cannot read {text!r}",
            why="a model is named by a module or file, a colon, and an attribute",
            tries=_written_in(text) or ("package.module:attr", "file.py:attr"),
        )
    named = all(part.isidentifier() for part in place.split("."))
    if not named and not place.endswith(".py"):
        raise UsageError(
            f"spec: cannot read {text!r}",
            why=f"{place} is neither a .py file nor the name of a module",
            tries=(f"{place}.py:{attribute}" if Path(f"{place}.py").is_file() else "file.py:attr",),
        )
    module = _file(place) if place.endswith(".py") else _module(place)
    found = _attribute(module, attribute, place)
    if isinstance(found, nn.Module):
        if arguments:
            raise UsageError(
                f"spec: {text} is a Module and takes no arguments",
                why="--arg gives the arguments of a function that returns the model",
            )
        return Subject(text, found)
    if not callable(found):
        raise UsageError(
            f"spec: {text} is {_a(found)}, not a model",
            why="it should be a Module, or a function that returns one",
            tries=[f"{place}:{name}" for name in _candidates(module)[:3]] or (f"{place}:NAME",),
        )
    return _subject(text, _call(text, found, arguments))


def _file(place: str) -> ModuleType:
    path = Path(place)
    if path.is_dir():
        raise UsageError(
            f"spec: {place} is a folder, not a Python file",
            tries=[f"{p}:ATTR" for p in sorted(path.glob("*.py"))[:2]],
        )
    if not path.is_file():
        beside = [p.stem for p in path.parent.glob("*.py")]
        folder = "the current folder" if path.parent == Path() else f"{path.parent}"
        raise UsageError(
            f"spec: there is no file {place}",
            why=f"{'looked in' if path.parent.is_dir() else 'there is no folder'} {folder}",
            tries=[str(path.with_stem(n)) for n in get_close_matches(path.stem, beside, n=2)],
        )
    path = path.resolve()
    for folder in (str(Path.cwd()), str(path.parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if known is not None:  # another module has this name already, perhaps an installed one
        name = f"_recast_spec_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"spec: {place} is not a Python file", where=place)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise raised(f"spec: {place} raised while it was imported", error, path.name) from error
    return module


def _module(place: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if place == missing or place.startswith(missing + "."):
            file = Path(*place.split(".")).with_suffix(".py")
            raise UsageError(
                f"spec: there is no module {place}",
                why=f"{missing!r} is neither installed nor in the current folder",
                tries=(f"{file}:ATTR" if file.is_file() else "file.py:ATTR",),
            ) from error
        raise raised(f"spec: {place} raised while it was imported", error) from error
    except (Exception, SystemExit) as error:
        raise raised(f"spec: {place} raised while it was imported", error) from error


def _attribute(module: ModuleType, attribute: str, place: str) -> Any:
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [n for n in dir(found) if not n.startswith("_")] if part else []
            near = get_close_matches(part, names, n=2)
            near = near or [w.rpartition(":")[2] for w in _written_in(place)[:2]]
            near = near or _candidates(module)[:2]
            raise UsageError(
                f"spec: {place} has no {attribute!r}",
                where=_base(getattr(module, "__file__", None)),
                why="the part after the colon names a Module or a function in that file",
                tries=[f"{place}:{n}" for n in near],
            )
        found = getattr(found, part)
    return found


def _candidates(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (isinstance(value, nn.Module) or _is_of(value, module))
    ]


def _is_of(value: Any, module: ModuleType) -> bool:
    """Whether it is a function or class that ``module`` itself defines."""
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _written_in(text: str) -> list[str]:
    """Specs of functions and classes in the file that ``text`` names without one; first those that
    can be called without arguments.
    """
    path = Path(text.rstrip(":"))
    try:
        tree = ast.parse(path.read_bytes()) if path.suffix == ".py" else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return []
    defined = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    public = [n for n in defined if not n.name.startswith("_")]
    return [f"{path}:{n.name}" for n in sorted(public, key=_needs_arguments)][:3]


def _needs_arguments(defined: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether a function, or the ``__init__`` of a class if it has one, needs arguments."""
    functions = [defined] if isinstance(defined, ast.FunctionDef) else defined.body
    for function in functions:
        if isinstance(function, ast.FunctionDef) and function.name in (defined.name, "__init__"):
            given, own = function.args, function is not defined
            positional = len(given.posonlyargs) + len(given.args) - own
            return positional > len(given.defaults) or None in given.kw_defaults
    return False


def _call(text: str, function: Callable[..., Any], arguments: Sequence[str]) -> Any:
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a function in C: it checks its arguments itself
        values = parse_arguments(arguments)
    else:
        values = parse_arguments(arguments, signature.parameters)
        _bind(text, function, signature, values)
    try:
        return function(**values)
    except (Exception, SystemExit) as error:
        what = f"spec: {text} raised when it was called"
        raise raised(what, error, _file_of(function)) from error


def _bind(
    text: str, function: Callable[..., Any], signature: inspect.Signature, values: dict[str, Any]
) -> None:
    """Raise UsageError unless ``function`` can be called with these arguments."""
    try:
        signature.bind(**values)
    except TypeError as error:
        known = [p for p in signature.parameters if p != "self"]
        unknown = [name for name in values if name not in known]
        near = [n for name in unknown for n in get_close_matches(name, known, n=1)]
        why = f"it has no argument {unknown[0]!r}" if unknown else str(error)
        tries = [f"--arg {p}=VALUE" for p in near or known if p not in values][:2]
        if isinstance(function, type) and not unknown:  # not all arguments can be written so
            tries.append("name a function that builds it")
        raise UsageError(
            f"spec: {text} cannot be called with these arguments",
            where=_line_of(function),
            why=f"{why}; it takes {', '.join(known) or 'none'}",
            tries=tries,
        ) from error


def _subject(text: str, answer: Any) -> Subject:
    if inspect.iscoroutine(answer):
        answer.close()  # or Python warns that nobody awaited it
    parts = answer if isinstance(answer, tuple) else (answer,)
    if not 1 <= len(parts) <= 4 or not isinstance(parts[0], nn.Module):
        kinds = ", ".join(type(p).__name__ for p in parts)
        raise UsageError(
            f"spec: {text} returned ({kinds})"
            if isinstance(answer, tuple)
            else f"spec: {text} returned {kinds}",
            why=f"it should return a Module, or {RETURNS}",
        )
    model, example, loss, forms = (*parts, None, None, None)[:4]
    if loss is not None and not callable(loss):
        raise UsageError(
            f"spec: the loss returned by {text} is {_a(loss)}",
            why="a loss is a function of the model's output that returns a scalar",
        )
    if forms is not None and not isinstance(forms, list):
        raise UsageError(
            f"spec: the forms returned by {text} are {_a(forms)}, not a list",
            why="it has one example for each further form of call",
            tries=("return model, example, loss, [batch_of_another_form]",),
        )
    if forms and example is None:
        raise UsageError(
            f"spec: {text} returns forms, and no example",
            why="they are further forms of call, beside that of the example",
            tries=("return model, example, loss, [batch_of_another_form]",),
        )
    return Subject(text, model, example, _judged(text, loss), tuple(forms or ()))


def _judged(text: str, loss: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """``loss``, with its errors reported as the user's: calling it then raises UsageError."""
    if loss is None:
        return None

    @wraps(loss, assigned=(), updated=())  # who refuses it names the line of the loss
    def judged(*args: Any, **kwargs: Any) -> Any:
        try:
            value = loss(*args, **kwargs)
        except Exception as error:
            raise _of_loss(text, loss, error) from error
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            tensor = isinstance(value, torch.Tensor)
            gave = f"shape {tuple(value.shape)}" if hasattr(value, "shape") else _a(value)
            raise UsageError(
                f"spec: the loss returned by {text} gave {gave}",
                where=_line_of(loss),
                why="a loss is a scalar tensor, to be differentiated",
                tries=("loss(output).mean()" if tensor else "the tensor itself, without .item()",),
            )
        return value

    return judged


def _of_loss(text: str, loss: Callable[..., Any], error: Exception) -> UsageError:
    """The report of an error of ``loss``; one of torch's own, such as ``nn.MSELoss()``, also wants
    labels.
    """
    what = f"spec: the loss returned by {text} raised"
    if (getattr(loss, "__module__", None) or type(loss).__module__).partition(".")[0] != "torch":
        return raised(what, error)
    return UsageError(
        what,
        why=f"a loss is called with the output of the model alone; {type(error).__name__}: {error}",
        tries=("lambda output: nn.functional.mse_loss(output, labels)",),
    )


def raised(what: str, error: BaseException, prefer: str | None = None) -> UsageError:
    """The report of an error in the user's own code: its last line there, and its message."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).resolve())
    theirs = [f for f in frames if f.filename != ours and not f.filename.startswith("<")]
    written = [f for f in theirs if "site-packages" not in f.filename] or theirs
    named = [f for f in theirs if prefer and Path(f.filename).name == prefer] or written
    where = None
    if named:
        where = f"{_base(named[-1].filename)}:{named[-1].lineno}   {named[-1].line}"
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{_base(error.filename)}:{error.lineno}   {(error.text or '').strip()}"
    if isinstance(error, SystemExit):  # for example, a script that reads its own command line
        return UsageError(
            what,
            where=where,
            why=f"it ended the program, with exit code {error.code}",
            tries=("what only a script does goes under: if __name__ == '__main__':",),
        )
    return UsageError(what, where=where, why=f"{type(error).__name__}: {error}")


def _file_of(function: Callable[..., Any]) -> str | None:
    try:
        return _base(inspect.getsourcefile(inspect.unwrap(function)))
    except TypeError:  # in C
        return None


def _base(file: str | None) -> str | None:
    return Path(file).name if file else None


def _line_of(function: Callable[..., Any]) -> str | None:
    try:
        file, line = inspect.getsourcefile(function), inspect.getsourcelines(function)[1]
    except (OSError, TypeError):
        return None
    return f"{_base(file)}:{line}"


def _a(value: object) -> str:
    name = type(value).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"
