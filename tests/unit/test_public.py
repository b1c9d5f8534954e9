"""The public names: one list of them, with their modules and types."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import inspect
import pickle
import pkgutil
import pydoc
import subprocess
import sys
import textwrap
import tomllib
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import EllipsisType, ModuleType
from typing import Any, ParamSpec, TypeVar, TypeVarTuple, cast

import pytest

import tenure
from tenure._public import functions_of, is_private

PUBLIC = (
    "tenure",
    "tenure.backends",
    "tenure.backends.azure_storage",
    "tenure.backends.postgres",
    "tenure.backends.rabbitmq",
    "tenure.backends.sqlite",
    "tenure.cli",
    "tenure.errors",
    "tenure.events",
    "tenure.dashboard",
    "tenure.http",
    "tenure.ports",
    "tenure.sync",
    "tenure.telemetry",
    "tenure.testing",
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


def test_the_names_of_tenure_are_in_its_three_lists() -> None:
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


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert tenure.__version__ == project["version"]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_its_public_module(name: str) -> None:
    for each, value in exported(name).items():
        if isinstance(value, type) or inspect.isfunction(value):
            home = value.__module__
            if home.partition(".")[0] != "tenure":
                continue
            assert home in PUBLIC, f"{name}.{each} says that it is of {home}"
            assert getattr(module_of(home), value.__qualname__) is value


@pytest.mark.parametrize("name", PUBLIC)
def test_methods_say_where_their_class_is_imported_from(name: str) -> None:
    for each, value in exported(name).items():
        if not isinstance(value, type) or value.__module__ != name:
            continue
        for verb, member in vars(value).items():
            for function in functions_of(member):
                if function.__module__.partition(".")[0] == "tenure" and function.__name__ == verb:  # and no alias
                    assert (function.__module__, function.__qualname__) == (name, f"{each}.{verb}")


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_found_by_pickle(name: str) -> None:
    for value in exported(name).values():
        if isinstance(value, type) or inspect.isfunction(value):
            assert pickle.loads(pickle.dumps(value)) is value


def test_a_value_survives_pickle() -> None:
    values = (tenure.Stats(ready=3), tenure.QueueSettings(lock=5), tenure.Outgoing(b"x"), tenure.RetryPolicy(initial=1))
    for value in values:
        assert pickle.loads(pickle.dumps(value)) == value


def test_names_in_errors_and_on_screen_are_the_public_ones() -> None:
    assert str(tenure.Message) == "<class 'tenure.Message'>"
    assert str(tenure.sync.Queue) == "<class 'tenure.sync.Queue'>"
    assert str(tenure.sync.Message) == "<class 'tenure.sync.Message'>"
    assert tenure.connect.__module__ == "tenure"


@pytest.mark.parametrize("kind", ["Backend", "DeadLetters", "Election", "Partitions", "Queue", "Session"])
def test_methods_that_block_look_like_those_that_do_not(kind: str) -> None:
    ours, theirs = getattr(tenure.sync, kind), getattr(tenure, kind)
    mirrored = [name for name, value in vars(ours).items() if hasattr(value, "__wrapped__") and name != "campaign"]
    assert mirrored
    for name in mirrored:
        method, model = getattr(ours, name), getattr(theirs, name)
        assert (method.__module__, method.__qualname__) == ("tenure.sync", f"{kind}.{name}")
        assert (model.__module__, model.__qualname__) == ("tenure", f"{kind}.{name}")
        assert not inspect.iscoroutinefunction(method)
        assert inspect.signature(method) == inspect.signature(model)
        assert inspect.signature(method, eval_str=True) == inspect.signature(model, eval_str=True)
        assert typing.get_type_hints(method) == typing.get_type_hints(model)
        assert inspect.getdoc(method) == (inspect.getdoc(model) or "").replace("await ", "")


def test_the_help_of_a_method_that_blocks_is_that_of_a_plain_one() -> None:
    shown = pydoc.plain(pydoc.render_doc(tenure.sync.Queue.send_batch))
    assert "function send_batch in module tenure.sync" in shown
    assert "send_batch(self, messages: 'Iterable[Outgoing]') -> 'list[str]'" in shown
    assert "    queue.send_batch([" in shown
    assert "await" not in shown


def test_names_are_the_public_ones_in_any_order_of_import() -> None:
    line = "import tenure; import tenure._queue.received as r; tenure.connect; print(r.Message)"
    said = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True).stdout
    assert said == "<class 'tenure.Message'>\n"


MET = """
import asyncio, tenure

async def main():
    async with tenure.connect("memory:") as backend:
        queue = backend.queue("orders")
        await queue.send(b"x")
        [message] = await queue.receive()
        print(type({met}))

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("met", "name"),
    [
        ("message", "Message"),
        ("queue.dead_letters", "DeadLetters"),
        ("queue.schedules", "Schedules"),
        ("queue.session()", "Session"),
        ("queue.consumer(print)", "Consumer"),
        ("backend.election('chair')", "Election"),
        ("backend.partitions('group', 2)", "Partitions"),
        ("backend.schedule('nightly', 60, queue='orders')", "Schedule"),
        ("await backend.diagnose()", "Diagnosis"),
    ],
)
def test_what_is_loaded_late_has_its_public_name(met: str, name: str) -> None:
    program = MET.replace("{met}", met)
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said == f"<class 'tenure.{name}'>\n"


def test_fields_are_known_to_pydantic() -> None:
    pydantic = pytest.importorskip("pydantic")
    for kind in (tenure.Stats, tenure.QueueSettings, tenure.Failure, tenure.Leader):
        pydantic.TypeAdapter(kind)  # resolves its types
    model = pydantic.create_model("Overview", stats=(tenure.Stats, ...), leader=(tenure.Leader | None, None))
    assert model(stats={"ready": 3}).stats == tenure.Stats(ready=3)


# --- types -----------------------------------------------------------------------------------------------------------


def functions(value: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield what users call of a public *value*: the initialisers only of what they make themselves, no tests."""
    if isinstance(value, type):
        made = dataclasses.is_dataclass(value) or issubclass(value, Exception)
        for verb, function in members(value):
            if isinstance(function, property):
                function = function.fget
            elif isinstance(function, (classmethod, staticmethod)):
                function = function.__func__
            called = not verb.startswith(("_", "test_")) or (verb == "__init__" and made)
            if inspect.isfunction(function) and called:
                yield f".{verb}", inspect.unwrap(function)
    elif inspect.isfunction(function := inspect.unwrap(cast("Callable[..., Any]", value))):  # or the fixture's
        yield "", function


def members(kind: type) -> Iterator[tuple[str, object]]:
    """Yield what *kind* defines, and what it has from bases of tenure that are private: users see it as its own."""
    for base in kind.__mro__:
        if base is kind or is_private(base.__module__):
            yield from vars(base).items()


def stated_types(name: str) -> Iterator[tuple[str, object, Mapping[str, Any]]]:
    """Yield each type that a public module states: where, the type or its text, and the names that the text uses."""
    for each, value in exported(name).items():
        where = f"{name}.{each}"
        if typing.get_args(value):
            yield where, value, {}
        for verb, function in functions(value):
            for annotation in function.__annotations__.values():
                yield f"{where}{verb}", annotation, function.__globals__
        if isinstance(value, type):
            for field, annotation, names in fields(value):
                yield f"{where}.{field}", annotation, names


def fields(kind: type) -> Iterator[tuple[str, object, Mapping[str, Any]]]:
    """Yield the public attributes that the bodies and initialisers of a class and of its private bases annotate."""
    for base in kind.__mro__:
        if base is not kind and not is_private(base.__module__):
            continue
        names = vars(sys.modules[base.__module__])
        for field, annotation in inspect.get_annotations(base).items():
            if field[0] != "_":
                yield field, annotation, names
        init = vars(base).get("__init__")
        if not inspect.isfunction(init) or dataclasses.is_dataclass(base):
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(init)))):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Attribute)
                and node.target.attr[0] != "_"
            ):
                yield node.target.attr, ast.unparse(node.annotation), init.__globals__


def hidden_types(name: str, public: Collection[object]) -> set[str]:
    """Return the types of tenure's own that a public module uses and that are not *public*."""
    return {
        f"{used}, of {where}"
        for where, annotation, names in stated_types(name)
        for used, kind in types_in(annotation, names)
        if is_ours(used, kind) and not any(kind is each for each in public)
    }


def types_in(annotation: object, names: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield each type in an annotation, with its name; for an alias, the alias."""
    if isinstance(annotation, str):
        for node in outermost(ast.parse(annotation.lstrip("*"))):
            used = ast.unparse(node)
            with suppress(NameError):  # the name of a literal: Literal["up"]
                yield used.rpartition(".")[2], eval(used, {**vars(builtins), **names})
    elif parts := typing.get_args(annotation):
        for part in parts:
            if not isinstance(part, (str, int, EllipsisType)):  # a literal, tuple[int, ...]
                yield from types_in(part, names)
    elif isinstance(annotation, list):  # the arguments of a callable
        for part in annotation:
            yield from types_in(part, names)
    else:
        yield getattr(annotation, "__name__", ""), annotation


def outermost(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the names in *tree*, and the dotted ones as a whole."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            yield node
        else:
            yield from outermost(node)


def is_ours(name: str, kind: object) -> bool:
    """Return whether *kind* is a class or an alias of tenure's own."""
    if isinstance(kind, (TypeVar, TypeVarTuple, ParamSpec, ModuleType)) or kind is None:
        return False
    home = getattr(kind, "__module__", None)
    if isinstance(kind, type) and not typing.get_args(kind):
        return str(home).partition(".")[0] == "tenure"
    return (
        getattr(sys.modules.get(str(home)), name, None) is not kind
    )  # an alias is defined in another module than its parts


@pytest.mark.parametrize("name", PUBLIC)
def test_every_hint_can_be_evaluated(name: str) -> None:
    for value in exported(name).values():
        if isinstance(value, type):
            typing.get_type_hints(value)
        for _, function in functions(value):
            typing.get_type_hints(function)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_type_in_a_public_signature_is_public(name: str) -> None:
    public = [value for each in PUBLIC if each in sys.modules for value in exported(each).values()]
    assert not hidden_types(name, public), "export them"


PLANTED = """
from __future__ import annotations
import dataclasses
import tenure
from collections.abc import Callable
from typing import Literal
from tenure._runtime.clock import Clock
from tenure._lease import Leader

__all__ = ["Alias", "Base", "Made", "Sub", "function"]

Alias = Callable[[Clock], Leader]

class Base:
    def __init__(self) -> None:
        self.clock: Clock | None = None
        self._clock: Clock | None = None

    @property
    def prop(self) -> list[Clock]: ...
    @classmethod
    def made(cls, clock: Clock) -> Leader: ...
    def _private(self) -> Clock: ...
    def test_it(self, clock: Clock) -> None: ...

@dataclasses.dataclass
class Made:
    field: Clock

class Sub(Base): ...

def function(clock: tenure._runtime.clock.Clock, leader: Leader, way: Literal["up"]) -> None: ...
"""


def test_a_private_type_in_a_public_signature_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(PLANTED, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    places = ("Alias", "Base.clock", "Base.made", "Base.prop", "Made.__init__", "Made.field", "function")
    try:
        assert hidden_types("planted", [tenure.Leader]) == {f"Clock, of planted.{place}" for place in places}
    finally:
        sys.modules.pop("planted", None)
