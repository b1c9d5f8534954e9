"""
What each test file can reach: the files that it imports, starts, reads or names, and theirs.

Imports are read from the source. What imports don't show is in the rules below; each errs on the side of reaching more:

- A file of tests or examples that names a backend reaches all of it: ``connect`` finds it by a URL.
- Modules of tenure, and the servers that tests start, reach a backend only by importing it; the registry's table of all
  schemes does not count.
- A test file that starts a process reaches the whole of tenure but the backends that it doesn't name.
- A test file reaches what lies beside it and is no test: programs that it starts, and data. It also reaches each
  document that it names, and the ``conftest.py`` of its folders.
- The tests of documents and of example projects compare pages with everything; tests that walk over the source reach it
  all.
- A module reaches the SQL, Lua, Markdown and other files of its folder.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

LIBRARY = "src/tenure/"
BACKENDS = "src/tenure/_backends/"
PUBLIC_BACKENDS = "src/tenure/backends/"  # each imports its private one
REGISTRY = "src/tenure/_registry.py"

WORDS: Mapping[str, tuple[str, ...]] = {
    "azure_storage": ("azur",),
    "etcd": ("etcd",),
    "kubernetes": ("kube",),
    "memory": ("memory",),
    "nats": ("nats",),
    "peers": ("peer",),
    "postgres": ("postgres",),
    "rabbitmq": ("rabbit", "amqp"),
    "redis": ("redis",),
    "servicebus": ("servicebus", "service bus"),
    "sqlite": ("sqlite",),
    "zookeeper": ("zookeeper", "kazoo", "curator"),
}
"""What names a backend, in small letters: schemes, servers, fixtures, foreign clients."""

WITHOUT_A_SERVER = ("memory", "sqlite")
"""Backends that tenure takes by itself, so that a process of it may use them unnamed."""

COMPARED = ("tests/docs/", "tests/examples/")
"""Tests that compare pages and example projects with the code, and run them."""

DOCUMENTS = ("docs/", "examples/", "README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Files that tests read by their names."""

NAMES_ALL = (
    "benchmarks/",
    "docs/",
    "scripts/",
    "tests/conftest.py",
    "tests/durations.py",
    "tests/process_states.py",
    "tests/servers/",
    "tests/targets.py",
)
"""Files outside of the library whose words say nothing about the parts of it that they use."""

WALKS_OVER_SOURCE = re.compile(r"walk_packages|rglob\(\"\*\.py")

STARTS_PROCESSES = re.compile(r"subprocess|Popen|multiprocessing|run_in|os\.fork|forkpty|entry_points|with_name\(")


@dataclass
class Reach:
    """The edges between the files of the project; *texts* has each file that can be read as text."""

    texts: Mapping[str, str]
    _modules: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._modules = {name: file for file in self.texts for name in module_names(file)}

    @cached_property
    def tests(self) -> list[str]:
        return sorted(file for file in self.texts if is_test(file))

    def chosen(self, changed: Iterable[str]) -> dict[str, list[str]]:
        """Return the test files that reach one of the *changed* files, each with the way to it."""
        ways: dict[str, list[str]] = {
            file: [file] for file in sorted(changed) if file in self._edges_to or is_test(file)
        }
        found = list(ways)
        for file in found:
            for before in sorted(self._edges_to.get(file, ())):
                if before not in ways:
                    ways[before] = [before, *ways[file]]
                    found.append(before)
        return {file: ways[file] for file in self.tests if file in ways}

    def places(self, file: str) -> bool:
        """Return whether a rule says who reaches *file*; if not, everything may."""
        return file in self._edges_to or is_test(file)

    @cached_property
    def _edges_to(self) -> dict[str, set[str]]:
        edges: dict[str, set[str]] = defaultdict(set)
        for file in self.texts:
            for other in self._edges(file):
                if other != file:
                    edges[other].add(file)
        return dict(edges)

    def _edges(self, file: str) -> Iterator[str]:
        if file.endswith(".py"):
            yield from self._imported(file)
        if file.startswith(LIBRARY):
            yield from self._data_beside(file)
        elif not file.startswith(NAMES_ALL):
            yield from self._named(file)
        if is_test(file):
            yield from self._around(file)

    def _named(self, file: str) -> Iterator[str]:
        """Yield what a file outside of the library names: backends, and the whole library if it starts processes."""
        text = self.texts[file].lower()
        unnamed = WITHOUT_A_SERVER if STARTS_PROCESSES.search(self.texts[file]) else ()
        for backend, words in WORDS.items():
            if backend in unnamed or any(word in text for word in words):
                yield from self._below(f"{BACKENDS}{backend}/")
        if unnamed:
            yield from (one for one in self._below(LIBRARY) if not one.startswith((BACKENDS, PUBLIC_BACKENDS)))

    def _around(self, test: str) -> Iterator[str]:
        """Yield what a test file reaches without an import."""
        folder = f"{PurePosixPath(test).parent}/"
        if folder != "tests/":
            yield from (one for one in self._below(folder) if not is_test(one) and not one.endswith("/conftest.py"))
        for parent in PurePosixPath(test).parents:
            if (conftest := f"{parent}/conftest.py") in self.texts:
                yield conftest
        compares = test.startswith(COMPARED)
        if WALKS_OVER_SOURCE.search(self.texts[test]):
            yield from (one for one in self.texts if one.endswith((".py", ".sql")))
        for one in self.texts:
            if one.startswith(DOCUMENTS):
                if compares or PurePosixPath(one).name in self.texts[test]:
                    yield one
            elif compares and one.startswith((LIBRARY, "scripts/", "benchmarks/")):
                yield one

    def _data_beside(self, file: str) -> Iterator[str]:
        """Yield the files of other kinds in the folder of a module, and in folders below it that have no modules."""
        yield from self._data_of.get(str(PurePosixPath(file).parent), ())

    @cached_property
    def _data_of(self) -> dict[str, list[str]]:
        packages = {str(PurePosixPath(file).parent) for file in self.texts if file.endswith(".py")}
        found: dict[str, list[str]] = defaultdict(list)
        for file in self.texts:
            if file.startswith(LIBRARY) and not file.endswith(".py"):
                found[next(str(one) for one in PurePosixPath(file).parents if str(one) in packages)].append(file)
        return dict(found)

    def _below(self, folder: str) -> Iterator[str]:
        return (one for one in self.texts if one.startswith(folder))

    # --- imports ---

    def _imported(self, file: str) -> Iterator[str]:
        """Yield what a file imports: also in functions, for type checkers, and by a name that it has as text."""
        try:
            tree = ast.parse(self.texts[file])
        except SyntaxError:  # in a file that a test reads, or that is being written
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for name in names_of(node, package_of(file)):
                    yield from self._files_of(name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and file != REGISTRY:
                yield from self._loaded_by(node.value)

    def _loaded_by(self, text: str) -> Iterator[str]:
        """Yield what a text names: a module, as for python -m, or the beginning of the names of a whole package."""
        if text.startswith(("tenure.", "tests.", "scripts.")) and text != "tenure.":
            package = self._modules.get(text.removesuffix("."))
            if package is not None:
                yield package
            if package is not None and text.endswith("."):
                yield from self._below(f"{PurePosixPath(package).parent}/")

    def _files_of(self, name: str) -> Iterator[str]:
        """Yield the file of a module, and the packages that are loaded for it."""
        parts = name.split(".")
        while parts and ".".join(parts) not in self._modules:
            parts.pop()  # a name in a module
        for count in range(1, len(parts) + 1):
            if (file := self._modules.get(".".join(parts[:count]))) is None:
                continue
            if file == f"{LIBRARY}__init__.py" and count < len(parts):
                continue  # a change of this file concerns all tests; its names are for those who import it itself
            yield file


def names_of(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
    """Yield the full names that an import statement loads: modules, or names in them."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*above, *filter(None, [base])])
    yield from (f"{base}.{alias.name}" for alias in node.names)


def module_names(file: str) -> Iterator[str]:
    """Yield the names under which a file can be imported."""
    path = PurePosixPath(file.removeprefix("src/"))
    if path.suffix == ".py":
        parts = path.with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(file: str) -> str:
    return ".".join(PurePosixPath(file.removeprefix("src/")).parent.parts)


def is_test(file: str) -> bool:
    path = PurePosixPath(file)
    return path.parts[0] == "tests" and path.name.startswith("test_") and path.suffix == ".py"


def read(root: Path, files: Iterable[str]) -> dict[str, str]:
    """Return the text of each of *files* that exists; of what is no text, an empty one."""
    texts: dict[str, str] = {}
    for file in files:
        path = root / file
        if path.is_file():
            try:
                texts[file] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                texts[file] = ""
    return texts
