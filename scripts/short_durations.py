"""
Refuse short times that tests write out: a busy machine may be slower than any of them::

    python -m scripts.short_durations            # `make lint` does so, too
    python -m scripts.short_durations --write    # write the list of those that are left anew

A test waits for a condition (``until`` and ``wait_until`` of tests/durations.py), turns a clock, or asks
``stretched``. What is refused:

- a lease, a lock, a timeout, a grace or a wait of less than five seconds, as an argument, a default or a constant;
- a sleep of less than a minute. One that is longer stands for work that never ends;
- an ``until`` of one's own, or the public one, which gives up after a minute;
- ``stretched`` at import, when it measures another moment.

Where no real time passes, any number is right: in files that have nothing to do with clocks, threads, loops, processes
or servers, in the folders of ``SIMULATED``, and in functions that run in virtual time (in a file that uses
``tenure.testing.loop``, or a module of tests that does: all but those that call ``asyncio.run``, and coroutines that
pytest runs). ``time.sleep`` takes real time everywhere. Programs in strings are not read.

The list, tests/short_durations.txt, has how many each file still has. A file must have exactly as many: not more, and
if it has fewer, the list is to be written anew, so that none comes back.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tests", "src/tenure/testing/_conformance")
OWNER = "tests/durations.py"
LIST = "tests/short_durations.txt"
VIRTUAL_LOOP, IN_VIRTUAL_TIME = "tenure.testing.loop", "in_virtual_time"
"""The module, and what marks a coroutine that pytest runs with it: a decorator, or the fixture of tenure's plugin."""
SIMULATED = ("tests/properties/", "tests/scenarios/", "tests/sim/")

ENOUGH = 5.0
"""Seconds from which a lease, a lock or a timeout is not short."""
FOR_EVER = 60.0
"""Seconds from which a sleep stands for work that does not end by itself."""

_WORDS = "ttl|lease|lock|timeout|wait|within|patience|grace|deadline|max_hold|stall_after"
_DURATION = re.compile(rf"(?:^|_)(?:{_WORDS})(?:_|$)", re.IGNORECASE)
_COUNT = re.compile(r"(?:^|_)(?:count|every|number|locks|max_locked|kind)(?:_|$)", re.IGNORECASE)
_LIMITED = {"timeout": 0, "wait_for": 1, "join": 0, "wait": 0, "result": 0}
"""Calls that take a limit by position, and its place."""
_REAL = {"asyncio", "concurrent", "multiprocessing", "select", "signal", "socket", "subprocess", "threading", "time"}
"""Modules without which no time passes in a test; nor does it without servers."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Finding(NamedTuple):
    """A short time in a file, and what to use instead."""

    path: str
    line: int
    found: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.found}; {self.instead}"


_ASK = "wait for a condition, turn a clock, or ask tests.durations.stretched(…) when the test begins"
_WAIT = "use until or wait_until of tests.durations: they have one limit for all tests"
_LATER = "ask when the test begins: another moment is measured at import"


def find(path: str, source: str, root: Path) -> list[Finding]:
    """Return the short times in the *source* of a file, whose path is relative to *root*."""
    tree = ast.parse(source)
    parts = [(top, list(ast.walk(top))) for top in tree.body]
    nodes = [node for _, inner in parts for node in inner]
    imported = set(_imports(nodes))
    virtual = VIRTUAL_LOOP in imported or any(_uses_virtual_loop(root, name) for name in imported)
    if path == OWNER or not (virtual or _is_in_real_time(nodes, imported)):
        return []
    constants = _constants(tree)
    found: list[Finding] = []
    for top, inner in parts:
        simulated = path.startswith(SIMULATED) or (virtual and not _takes_real_time(top, inner))
        for node in inner:
            found += (Finding(path, *each) for each in _check(node, constants, simulated=simulated))
    if not virtual and path.startswith("tests/") and not path.startswith(SIMULATED):
        found += (Finding(path, *each) for each in _untils(nodes))
    found += (Finding(path, line, "stretched(…) at import", _LATER) for line in _asked_at_import(tree))
    return sorted(found)


def _check(node: ast.AST, constants: Mapping[str, float], *, simulated: bool) -> Iterator[tuple[int, str, str]]:
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        name = called.rpartition(".")[2]
        if name == "sleep" and node.args and (called == "time.sleep" or not simulated):
            seconds = _value(node.args[0], constants)
            if seconds is not None and 0 < seconds < FOR_EVER:
                yield node.lineno, f"a sleep of {seconds:g} s", _ASK
        if simulated:
            return
        for keyword in node.keywords:
            yield from _short(keyword.arg, keyword.value, constants)
        place = _LIMITED.get(name)
        if place is not None and len(node.args) == place + 1:
            yield from _short("timeout", node.args[place], constants)
    elif simulated:
        return
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _short(ast.unparse(target).rpartition(".")[2], node.value, constants)
    elif isinstance(node, ast.AnnAssign):
        yield from _short(ast.unparse(node.target).rpartition(".")[2], node.value, constants)
    elif isinstance(node, ast.arguments):
        places = [*node.posonlyargs, *node.args]
        defaults = [*zip(places[len(places) - len(node.defaults) :], node.defaults, strict=True)]
        for argument, default in [*defaults, *zip(node.kwonlyargs, node.kw_defaults, strict=True)]:
            yield from _short(argument.arg, default, constants)
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield from _short(key.value, value, constants)


def _short(name: str | None, value: ast.expr | None, constants: Mapping[str, float]) -> Iterator[tuple[int, str, str]]:
    if name is None or value is None or not _DURATION.search(name) or _COUNT.search(name):
        return
    # A constant is refused where it is written, and not again wherever it is used.
    seconds = _value(value, {})
    if seconds is not None and 0 < seconds < ENOUGH:
        yield value.lineno, f"{name} of {seconds:g} s", _ASK


def _untils(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str, str]]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "tenure.testing":
            if any(alias.name == "until" for alias in node.names):
                yield node.lineno, "tenure.testing.until, which gives up after 10 s", _WAIT
        elif isinstance(node, _Function) and node.name in ("until", "wait_until"):
            yield node.lineno, f"another function {node.name}", _WAIT


def _asked_at_import(tree: ast.Module) -> Iterator[int]:
    """Return the lines of calls that run when the module is imported: outside of functions, or in their defaults."""
    left: list[ast.AST] = list(tree.body)
    while left:
        node = left.pop()
        if isinstance(node, _Function):
            left += [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.decorator_list]
        elif not isinstance(node, ast.Lambda):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "stretched":
                yield node.lineno
            left += ast.iter_child_nodes(node)


def _imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_in_real_time(nodes: Iterable[ast.AST], imported: set[str]) -> bool:
    is_real = any(name.partition(".")[0] in _REAL or name.startswith("tests.servers") for name in imported)
    return is_real or any(isinstance(node, ast.AsyncFunctionDef) for node in nodes)


def _takes_real_time(top: ast.stmt, inner: Iterable[ast.AST]) -> bool:
    """Return whether a function or class of a file with virtual time runs in real time."""
    if any(isinstance(node, ast.Call) and ast.unparse(node.func) == "asyncio.run" for node in inner):
        return True
    members = top.body if isinstance(top, ast.ClassDef) else [top]
    return any(
        isinstance(one, ast.AsyncFunctionDef)
        and one.name.startswith("test_")
        and IN_VIRTUAL_TIME not in {*map(ast.unparse, one.decorator_list), *(each.arg for each in one.args.args)}
        for one in members
    )


def _constants(tree: ast.Module) -> dict[str, float]:
    found: dict[str, float] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            value = _value(node.value, found)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and value is not None:
                    found[target.id] = value
    return found


def _value(node: ast.expr, constants: Mapping[str, float]) -> float | None:
    """Return the number that an expression of numbers and *constants* stands for; None if it is anything else."""
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name(id=name):
            return constants.get(name)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as op, right=right):
            one, other = _value(left, constants), _value(right, constants)
            if one is None or other is None or (isinstance(op, ast.Div) and not other):
                return None
            match op:
                case ast.Add():
                    return one + other
                case ast.Sub():
                    return one - other
                case ast.Mult():
                    return one * other
                case _:
                    return one / other
    return None


def find_all(root: Path) -> dict[str, list[Finding]]:
    """Return the short times of each file that has any."""
    found: dict[str, list[Finding]] = {}
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*.py")):
            path, source = file.relative_to(root).as_posix(), file.read_text()
            if here := find(path, source, root):
                found[path] = here
    return found


@cache
def _uses_virtual_loop(root: Path, name: str) -> bool:
    """Return whether a module is one of the tests, and uses the loop in virtual time."""
    file = root / f"{name.replace('.', '/')}.py"
    return name.startswith("tests.") and file.is_file() and VIRTUAL_LOOP in file.read_text()


def read_list(text: str) -> dict[str, int]:
    """Return how many short times the list leaves to each file.

    Raises:
        ValueError: A line is none of the list; the message has it.
    """
    left: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        path, _, count = line.rpartition(" ")
        if not path or not count.isdecimal():
            raise ValueError(
                f"line {number} of {LIST} is {line!r}, and not a file and a number; --write writes it anew"
            )
        left[path] = int(count)
    return left


def write_list(counts: Mapping[str, int]) -> str:
    """Return the text of the list."""
    head = (
        "# How many short durations each file of tests still writes out: lower a number, and add none.\n"
        "# `python -m scripts.short_durations` compares; with --write, it writes this file anew.\n"
    )
    return head + "".join(f"{path} {count}\n" for path, count in sorted(counts.items()))


def compare(found: Mapping[str, list[Finding]], left: Mapping[str, int]) -> list[str]:
    """Return what is wrong: files with more short times than the list leaves to them, and with fewer."""
    problems: list[str] = []
    for path in sorted({*found, *left}):
        here, allowed = found.get(path, []), left.get(path, 0)
        if len(here) > allowed:
            problems += map(str, here)
            problems.append(f"{path} has {len(here)} short durations, and {LIST} leaves {allowed} to it: add none")
        elif len(here) < allowed:
            problems.append(
                f"{path} has {len(here)} short durations, and {LIST} still leaves {allowed} to it:"
                " run python -m scripts.short_durations --write"
            )
    return problems


def main(arguments: list[str], root: Path = ROOT) -> int:
    if arguments not in ([], ["--write"]):
        print("usage: python -m scripts.short_durations [--write]", file=sys.stderr)
        return 2
    found, file = find_all(root), root / LIST
    try:
        left = read_list(file.read_text()) if file.exists() else {}
    except ValueError as error:
        if not arguments:
            print(error, file=sys.stderr)
            return 2
        left = {}
    if arguments:
        counts = {path: len(here) for path, here in found.items()}
        file.write_text(write_list(counts))
        for path, count in counts.items():
            if left and count > left.get(path, 0):
                print(f"{path} has grown from {left.get(path, 0)} to {count}: only for what was moved there")
        return 0
    problems = compare(found, left)
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
