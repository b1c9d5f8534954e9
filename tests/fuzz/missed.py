"""Which functions read what others may have written: found in the source, and compared with those that were run."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    "tenure._queue.headers": "read_headers",
    "tenure._queue.broker": "read_settings",
}
"""By module, how the names of its readers begin."""
NO_READERS = {"Unreadable", "RECORD_MAX", "DIGITS_MAX"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Reader:
    """A function that calls a reader, or reads JSON by itself."""

    where: str
    """As ``FILE::FUNCTION``: the file below the package, and the function with its classes."""
    directly: bool
    """Whether it reads JSON without the strict reader."""


def readers_in(folder: Path = SOURCE) -> Iterator[Reader]:
    """Yield the functions below *folder* that read what others may have written."""
    for file in sorted(folder.rglob("*.py")):
        path = file.relative_to(folder).as_posix()
        if not path.startswith(NOT_READ):
            yield from _readers_of(ast.parse(file.read_text(encoding="utf-8")), path)


def _readers_of(tree: ast.Module, path: str) -> Iterator[Reader]:
    strict, raw = set(_readers_imported(tree)), set(_json_decoders(tree))
    for name, function in _functions(tree, ""):
        inside = list(_nodes_of(function))
        used = {one.id for one in inside if isinstance(one, ast.Name)} - _bound_in(function, inside)
        directly = bool(used & raw) or any(map(_is_json, inside))
        if directly or used & strict:
            yield Reader(f"{path}::{name}", directly)


def _readers_imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (begin := READERS.get(node.module or "")) is not None:
            for one in node.names:
                if one.name.startswith(begin) and one.name not in NO_READERS:
                    yield one.asname or one.name


def _json_decoders(tree: ast.Module) -> Iterator[str]:
    """Yield the names of JSON decoders that a module has made."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and "JSONDecoder" in ast.unparse(node.value):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _is_json(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.loads", "json.load", "json.JSONDecoder")


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
        if one.directly and one.where not in direct:
            found.append(f"{one.where} reads JSON without tenure._foreign; use it, or write the reason into DIRECT")
        if one.where not in ran | elsewhere.keys() | direct.keys():
            found.append(f"{one.where} reads what others may have written, and no decoder of the fuzz runs it")
        if one.where in ran and one.where in elsewhere:
            found.append(f"{one.where} is run by the fuzz; remove it from ELSEWHERE")
        if one.where in direct and not one.directly:
            found.append(f"{one.where} reads no JSON by itself; remove it from DIRECT")
    gone = [one for one in (*elsewhere, *direct) if one not in known]
    return found + [f"{one} reads nothing of others any more; remove it from the lists" for one in gone]
