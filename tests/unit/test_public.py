"""What users may import: one list, which says where each name is from, and what its types are."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import inspect
import pickle
import pkgutil
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import pytest

import tenure
from tenure._public import is_private

FACE = ("tenure", "tenure.errors", "tenure.events", "tenure.sync", "tenure.testing")
"""What programs and their tests import; the types of all that is there are public."""

PUBLIC = (
    *FACE,
    "tenure.backends",
    "tenure.backends.azure_storage",
    "tenure.backends.postgres",
    "tenure.backends.sqlite",
    "tenure.cli",
    "tenure.testing.conformance",
    "tenure.testing.faultproxy",
    "tenure.testing.loop",
    "tenure.testing.pytest_plugin",
    "tenure.testing.sim",
    "tenure.testing.sim.queues",
)
"""All modules that users may import from. Every other one is private by its name."""


def module_of(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tenure"):
            raise
        pytest.skip(f"needs {error.name}")


def exported(name: str) -> dict[str, Any]:
    module = module_of(name)
    return {each: getattr(module, each) for each in module.__all__}


def test_every_other_module_is_private_by_its_name() -> None:
    found = {one.name for one in pkgutil.walk_packages(tenure.__path__, "tenure.")}
    assert {name for name in found if not is_private(name)} | {"tenure"} == set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_module_lists_what_is_public(name: str) -> None:
    listed = module_of(name).__all__
    assert len(set(listed)) == len(listed)
    assert not [each for each in listed if each.startswith("_")]
    assert set(listed) <= set(dir(module_of(name)))


def test_the_names_of_tenure_stand_in_its_three_lists() -> None:
    block = next(
        node
        for node in ast.parse(Path(tenure.__file__).read_text(encoding="utf-8")).body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    typed = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    lazy = {name: home for home, names in tenure._HOMES.items() for name in names}
    lazy |= dict.fromkeys(tenure._MODULES, "tenure")
    assert typed == lazy
    assert set(tenure.__all__) | set(tenure._MODULES) == set(lazy)
    assert tenure.__all__ == sorted(tenure.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_public_says_where_it_is_imported_from(name: str) -> None:
    for each, value in exported(name).items():
        if isinstance(value, type) or inspect.isfunction(value):
            home = value.__module__
            if home.partition(".")[0] != "tenure":
                continue
            assert home in PUBLIC, f"{name}.{each} says that it is of {home}"
            assert getattr(module_of(home), value.__qualname__) is value


@pytest.mark.parametrize("name", FACE)
def test_what_is_public_is_found_by_pickle(name: str) -> None:
    for value in exported(name).values():
        if isinstance(value, type) or inspect.isfunction(value):
            assert pickle.loads(pickle.dumps(value)) is value


def test_a_value_comes_out_of_pickle_as_it_was() -> None:
    values = (tenure.Stats(ready=3), tenure.QueueSettings(lock=5), tenure.Outgoing(b"x"), tenure.RetryPolicy(initial=1))
    for value in values:
        assert pickle.loads(pickle.dumps(value)) == value


def test_names_in_errors_and_on_screen_are_the_public_ones() -> None:
    assert str(tenure.Message) == "<class 'tenure.Message'>"
    assert str(tenure.sync.Queue) == "<class 'tenure.sync.Queue'>"
    assert str(tenure.sync.Message) == "<class 'tenure.sync.Message'>"
    assert tenure.connect.__module__ == "tenure"


def test_names_are_the_public_ones_whichever_was_asked_for_first() -> None:
    line = "import tenure; tenure.connect; import tenure._queue.received as r; print(r.Message)"
    said = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True).stdout
    assert said == "<class 'tenure.Message'>\n"


def test_fields_are_known_to_pydantic() -> None:
    pydantic = pytest.importorskip("pydantic")
    for kind in (tenure.Stats, tenure.QueueSettings, tenure.Failure, tenure.Leader):
        pydantic.TypeAdapter(kind)  # resolves its types
    model = pydantic.create_model("Overview", stats=(tenure.Stats, ...), leader=(tenure.Leader | None, None))
    assert model(stats={"ready": 3}).stats == tenure.Stats(ready=3)


# --- types -----------------------------------------------------------------------------------------------------------


def callables(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public functions and methods of a module; the initialisers only of what users make themselves."""
    for each, value in exported(name).items():
        if inspect.isfunction(value):
            yield f"{name}.{each}", value
        elif isinstance(value, type):
            made = dataclasses.is_dataclass(value) or issubclass(value, Exception)
            for verb, function in vars(value).items():
                if isinstance(function, property):
                    function = function.fget
                elif isinstance(function, (classmethod, staticmethod)):
                    function = function.__func__
                if inspect.isfunction(function) and (verb[0] != "_" or (verb == "__init__" and made)):
                    yield f"{name}.{each}.{verb}", function


@pytest.mark.parametrize("name", FACE)
def test_every_hint_can_be_evaluated(name: str) -> None:
    for value in exported(name).values():
        if isinstance(value, type):
            typing.get_type_hints(value)
    for _, function in callables(name):
        typing.get_type_hints(function)


@pytest.mark.parametrize("name", FACE)
def test_every_type_in_a_public_signature_is_public(name: str) -> None:
    public = [value for each in PUBLIC if each in sys.modules for value in exported(each).values()]
    hidden: set[str] = set()
    for where, function in callables(name):
        function = inspect.unwrap(function)
        for annotation in function.__annotations__.values():
            for used in names_in(annotation):
                kind = getattr(function, "__globals__", {}).get(used, getattr(builtins, used, None))
                if is_ours(used, kind) and not any(kind is each for each in public):
                    hidden.add(f"{used}, of {where}")
    assert not hidden, "export them"


def names_in(annotation: object) -> set[str]:
    if not isinstance(annotation, str):
        return set()
    return {node.id for node in ast.walk(ast.parse(annotation)) if isinstance(node, ast.Name)}


def is_ours(name: str, kind: object) -> bool:
    """Tell whether *kind* is a class or an alias of tenure's own."""
    if isinstance(kind, (TypeVar, ParamSpec, ModuleType)) or kind is None:
        return False
    home = getattr(kind, "__module__", None)
    if isinstance(kind, type) and not typing.get_args(kind):
        return str(home).partition(".")[0] == "tenure"
    return (
        getattr(sys.modules.get(str(home)), name, None) is not kind
    )  # an alias stands elsewhere than what it is made of
