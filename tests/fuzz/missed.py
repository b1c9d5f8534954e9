"""Which functions read what others may have written: found in the source, and compared with those that were run."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tenure

SOURCE = Path(tenure.__file__).parent
NOT_READ = ("testing/", "_demo/")
"""Folders that read nothing of other programs."""

READERS = {
    "tenure._foreign": "",
    "tenure._queue.notes": "read_",
    "tenure._queue.note_headers": "read_",
    "tenure._queue.headers": "read_headers",
    "tenure._queue.broker": "read_settings",
}
"""By module, how the names of its readers begin."""
NO_READERS = {"Unreadable", "RECORD_MAX", "DIGITS_MAX"}
JSON = {"load", "loads", "JSONDecoder"}
BYTES = {
    "from_bytes",
    "unpack",
    "unpack_from",
    "iter_unpack",
    "b64decode",
    "urlsafe_b64decode",
    "a2b_base64",
    "unhexlify",
}
"""Of the backends only: elsewhere, bytes are bodies, or of processes of ours."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Reader:
    """A function that calls a reader, or reads JSON or bytes by itself."""

    where: str
    """As ``FILE::FUNCTION``: the file below the package, and the function with its classes."""
    reads_json: bool = False
    """Whether it reads JSON without the strict reader."""
    reads_bytes: bool = False
    """Whether it reads bytes, or base64, by itself."""


def readers_in(folder: Path = SOURCE) -> Iterator[Reader]:
    """Yield the functions below *folder* that read what others may have written."""
    for file in sorted(folder.rglob("*.py")):
        path = file.relative_to(folder).as_posix()
        if not path.startswith(NOT_READ):
            yield from _readers_of(ast.parse(file.read_text(encoding="utf-8")), path)


def _readers_of(tree: ast.Module, path: str) -> Iterator[Reader]:
    json_names = {*_imported(tree, "json", JSON), *_json_decoders(tree)}
    bytes_names = {name for module in ("struct", "base64", "binascii") for name in _imported(tree, module, BYTES)}
    strict = {name for module, begin in READERS.items() for name in _imported(tree, module, begin=begin)}
    for name, function in _functions(tree, ""):
        inside = list(_nodes_of(function))
        own = _bound_in(function, inside)
        used = {ast.unparse(one) for one in inside if isinstance(one, ast.Name | ast.Attribute)}
        used = {one for one in used if one.partition(".")[0] not in own or "." in one}
        reads_json = bool(used & json_names)
        methods = {one.rpartition(".")[2] for one in used if "." in one}
        reads_bytes = path.startswith("_backends/") and bool(used & bytes_names or methods & BYTES)
        if reads_json or reads_bytes or used & strict:
            yield Reader(f"{path}::{name}", reads_json, reads_bytes)


def _imported(tree: ast.Module, module: str, names: Collection[str] = (), *, begin: str = "") -> Iterator[str]:
    """Yield how a file writes what it has imported of *module*: these *names*, or all that *begin* so."""
    package, _, last = module.rpartition(".")
    called = [module]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            called += [one.asname for one in node.names if one.name == module and one.asname]
        elif isinstance(node, ast.ImportFrom) and package and node.module == package:
            called += [one.asname or one.name for one in node.names if one.name == last]
        elif isinstance(node, ast.ImportFrom) and node.module == module:
            yield from (one.asname or one.name for one in node.names if _is_reader(one.name, names, begin))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and ast.unparse(node.value) in called
            and _is_reader(node.attr, names, begin)
        ):
            yield ast.unparse(node)


def _is_reader(name: str, names: Collection[str], begin: str) -> bool:
    return name in names if names else name.startswith(begin) and name not in NO_READERS


def _json_decoders(tree: ast.Module) -> Iterator[str]:
    """Yield the names of JSON decoders that a module has made."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and "JSONDecoder" in ast.unparse(node.value):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _functions(node: ast.AST, outer: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield f"{outer}{child.name}", child
            yield from _functions(child, f"{outer}{child.name}.<locals>.")
        else:
            yield from _functions(child, f"{outer}{child.name}." if isinstance(child, ast.ClassDef) else outer)


def _nodes_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is in a function and in no other function inside it; its annotations don't count."""
    for child in node.body if isinstance(node, Function) else ast.iter_child_nodes(node):
        if not isinstance(child, Function):
            yield child
            yield from _nodes_of(child)


def _bound_in(function: Function, inside: Iterable[ast.AST]) -> set[str]:
    """Return the names that mean something else in a function: its arguments, and what it assigns."""
    arguments = function.args
    named = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return named | {one.id for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def executed(run: Callable[[], object], folder: Path = SOURCE) -> set[str]:
    """Return the functions below *folder* that *run* has called, as ``FILE::FUNCTION``."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    prefix = f"{folder}/"
    ours = (code for code in seen if code.co_filename.startswith(prefix))
    return {f"{code.co_filename.removeprefix(prefix)}::{code.co_qualname}" for code in ours}


def missed(
    readers: Iterable[Reader], ran: set[str], elsewhere: Mapping[str, str], direct: Mapping[str, str]
) -> list[str]:
    """Return what is wrong: readers that nothing has tried, and entries that say nothing any more."""
    found = []
    known: set[str] = set()
    for one in readers:
        known.add(one.where)
        if one.reads_json and one.where not in direct:
            found.append(f"{one.where} reads JSON without tenure._foreign; use it, or write the reason into DIRECT")
        if one.where not in ran | elsewhere.keys() | direct.keys():
            found.append(f"{one.where} reads what others may have written, and no decoder of the fuzz runs it")
        if one.where in ran and one.where in elsewhere:
            found.append(f"{one.where} is run by the fuzz; remove it from ELSEWHERE")
        if one.where in direct and not (one.reads_json or one.reads_bytes):
            found.append(f"{one.where} reads neither JSON nor bytes by itself; remove it from DIRECT")
    gone = [one for one in (*elsewhere, *direct) if one not in known]
    return found + [f"{one} reads nothing of others any more; remove it from the lists" for one in gone]
