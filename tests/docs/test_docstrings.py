"""Every public name has a docstring: classes, functions, methods, properties, fields; and each can be typeset."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import enum
import importlib
import inspect
import pydoc
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints, is_typeddict

import pytest

import tenure
from tests.unit.test_public import PUBLIC, exported, module_of

SOURCES = Path(tenure.__file__).parent
BY_PYTEST = ("test_", "pytestmark")
"""Methods of the suites that pytest calls, whose names are their documentation; and what it reads."""
ROLES = ("attr", "class", "data", "exc", "func", "meth", "mod", "obj")


@cache
def described_assignments() -> frozenset[str]:
    """Return ``Name`` or ``Class.name`` of each assignment that a docstring follows, over all modules."""
    found: set[str] = set()
    for file in SOURCES.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for prefix, body in [("", tree.body), *((f"{node.name}.", node.body) for node in classes)]:
            for one, after in pairwise(body):
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
                    found |= {f"{prefix}{target.id}" for target in targets if isinstance(target, ast.Name)}
    return frozenset(found)


def of_ours(cls: type) -> list[type]:
    """Return *cls* and its bases that are of tenure."""
    return [one for one in cls.__mro__ if one.__module__.partition(".")[0] == "tenure"]


def text_of(what: object) -> str:
    """Return the docstring of *what*; of a class, not what it inherits, nor what a dataclass writes by itself."""
    if isinstance(what, type):
        text = vars(what).get("__doc__") or ""
        return "" if text.startswith(f"{what.__name__}(") else inspect.cleandoc(text)
    return inspect.cleandoc(inspect.getdoc(what) or "")


def entries(text: str, section: str) -> set[str]:
    """Return the names that a section of a docstring describes."""
    found = re.search(rf"^{section}:\n((?: .*\n|\n)*)", f"{text}\n", re.MULTILINE)
    lines = textwrap.dedent(found[1]).splitlines() if found else []
    heads = [line.partition(":")[0] for line in lines if line and not line[0].isspace()]
    return {name.strip() for head in heads for name in head.split(",")}


def marked(text: str) -> set[str]:
    """Return the words that stand as code, or as a parameter, in *text*."""
    return set(re.findall(r"``(\w+)``", text)) | set(re.findall(r"(?<!\*)\*(\w+)\*(?!\*)", text))


def methods_of(cls: type) -> Iterator[tuple[str, object]]:
    """Yield the methods and properties of *cls* that are of tenure."""
    seen: set[str] = set()
    for one in of_ours(cls):
        for name, value in vars(one).items():
            member = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if not name.startswith(("_", *BY_PYTEST)) and name not in seen:
                seen.add(name)
                if inspect.isfunction(member) or isinstance(member, property):
                    yield name, member


def fields_of(cls: type) -> set[str]:
    """Return the names of the other attributes of *cls*: fields, members of an enumeration, keys, annotated ones."""
    if dataclasses.is_dataclass(cls):
        names = {field.name for field in dataclasses.fields(cls)}
    elif issubclass(cls, enum.Enum):
        names = set(cls.__members__)
    elif is_typeddict(cls):
        names = set(get_type_hints(cls))
    else:
        names = {name for one in of_ours(cls) for name in inspect.get_annotations(one)}
    return {name for name in names if not name.startswith(("_", *BY_PYTEST))}


def described_in(cls: type) -> set[str]:
    """Return the attributes that *cls* and its bases describe: in a list, in the text, or below the attribute.

    The options of a function, which are a ``TypedDict``, may be described by what the docstring refers to.
    """
    names: set[str] = set()
    for one in of_ours(cls):
        text = text_of(one)
        names |= entries(text, "Attributes") | entries(text, "Args") | marked(text)
        names |= {name.partition(".")[2] for name in described_assignments() if name.startswith(f"{one.__name__}.")}
        if is_typeddict(one):
            for where in re.findall(r":(?:class|meth|func):`~?([\w.]+)`", text):
                there = text_of(pydoc.locate(where) or pydoc.locate(f"{one.__module__}.{where}"))
                names |= entries(there, "Args") | marked(there)
    return names


def is_fixture(value: object) -> bool:
    """Return whether *value* is a fixture of pytest with a docstring: an object around its function."""
    function = getattr(value, "__wrapped__", None) or getattr(value, "_fixture_function", None)
    return inspect.isfunction(function) and bool(text_of(function))


def missing_in(module: str) -> Iterator[str]:
    """Yield what is not documented of a public module."""
    for name, value in exported(module).items():
        if inspect.isfunction(value):
            if not text_of(value):
                yield f"{module}.{name}()"
        elif not isinstance(value, type):
            if name not in described_assignments() and not is_fixture(value):
                yield f"{module}.{name}"
        elif value.__module__ == module:
            if not text_of(value):
                yield f"{module}.{name}"
            yield from (f"{module}.{name}.{verb}()" for verb, member in methods_of(value) if not text_of(member))
            yield from (f"{module}.{name}.{field}" for field in sorted(fields_of(value) - described_in(value)))


@pytest.mark.parametrize("module", PUBLIC)
def test_everything_public_is_documented(module: str) -> None:
    assert module_of(module).__doc__
    assert [*missing_in(module)] == []


def test_what_is_not_documented_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Planted:
        """A value with ``told``, and more."""

        told: int
        untold: int

        def verb(self) -> None:
            pass

    Planted.__module__ = "tenure.ports"
    monkeypatch.setattr("tenure.ports.Planted", Planted, raising=False)
    monkeypatch.setattr("tenure.ports.__all__", ["Planted"])
    assert [*missing_in("tenure.ports")] == ["tenure.ports.Planted.verb()", "tenure.ports.Planted.untold"]


def texts() -> Iterator[tuple[str, object, str]]:
    """Yield each docstring of the public API, with its dotted name and its object."""
    for module in PUBLIC:
        try:
            names = exported(module)
        except pytest.skip.Exception:  # a package that it needs is missing
            continue
        yield module, module_of(module), inspect.cleandoc(module_of(module).__doc__ or "")
        for name, value in names.items():
            if getattr(value, "__module__", "") != module:
                continue
            if isinstance(value, type) or inspect.isfunction(value):
                yield f"{module}.{name}", value, text_of(value)
            if isinstance(value, type):
                yield from ((f"{module}.{name}.{verb}", each, text_of(each)) for verb, each in methods_of(value))


def owner_of(name: str) -> ModuleType:
    """Return the public module that the dotted *name* is in."""
    return module_of(max((one for one in PUBLIC if f"{name}.".startswith(f"{one}.")), key=len))


def test_the_first_line_is_a_sentence() -> None:
    firsts = [(name, text.partition("\n\n")[0]) for name, _, text in texts() if text]
    assert len(firsts) > 500
    assert [first for first in firsts if first[1][-1] not in ".:"] == []


def test_documented_arguments_exist() -> None:
    wrong = []
    for name, what, text in texts():
        function: Any = what.__init__ if isinstance(what, type) else what  # type: ignore[misc]
        if entries(text, "Args") and callable(function):
            parameters = inspect.signature(function).parameters
            if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):  # else they may be options
                wrong += [f"{name}: {each}" for each in entries(text, "Args") - {*parameters}]
    assert wrong == []


def test_documented_errors_exist() -> None:
    named = [(name, each.removeprefix("tenure.")) for name, _, text in texts() for each in entries(text, "Raises")]
    assert len(named) > 100
    homes = (tenure, builtins)
    assert [one for one in named if not any(hasattr(home, one[1]) for home in (*homes, owner_of(one[0])))] == []


def test_every_docstring_can_be_typeset() -> None:
    napoleon = pytest.importorskip("sphinx.ext.napoleon", reason="Sphinx is not installed")
    faults = faults_by_docutils()
    assert faults("A *word, and an ``end") != []
    wrong = []
    for name, what, text in texts():
        kind = "class" if isinstance(what, type) else "module" if inspect.ismodule(what) else "function"
        settings = napoleon.Config(napoleon_use_ivar=True)
        typeset = str(napoleon.GoogleDocstring(text, settings, what=kind, obj=what))
        wrong += [f"{name}: {fault}" for fault in faults(typeset)]
    assert wrong == []


def faults_by_docutils() -> Callable[[str], list[str]]:
    """Return what reports the faults of a text; the roles and directives of Sphinx are known to it."""
    core, nodes, rst = (importlib.import_module(f"docutils.{each}") for each in ("core", "nodes", "parsers.rst"))

    def role(_: str, written: str, text: str, *_more: Any) -> tuple[list[Any], list[Any]]:
        return [nodes.literal(written, text)], []

    for each in ROLES:
        rst.roles.register_local_role(each, role)
    note: type = type("Note", (rst.Directive,), {"optional_arguments": 1, "run": lambda _: []})
    rst.directives.register_directive("versionadded", note)
    settings = {"report_level": 2, "halt_level": 5, "warning_stream": False}

    def faults(text: str) -> list[str]:
        document = core.publish_doctree(text, settings_overrides=settings)
        return [message.astext() for message in document.findall(nodes.system_message)]

    return faults
