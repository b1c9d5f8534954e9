"""The rules that ``make layers`` checks beside import-linter's own: each can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

grimp = pytest.importorskip("grimp")
pytest.importorskip("importlinter")

from scripts.contracts import NoCyclesContract, PublicNamesContract, cycles  # noqa: E402  # needs both

ROOT = Path(__file__).resolve().parents[2]


def graph_of(*imports: str) -> Any:
    graph = grimp.ImportGraph()
    for number, line in enumerate(imports, start=1):
        importer, imported = line.split(" -> ")
        graph.add_import(importer=importer, imported=imported, line_number=number, line_contents=f"import {imported}")
    return graph


def checked(kind: type[Any], graph: Any, **options: Any) -> Any:
    contract = kind(name="a rule", session_options={}, contract_options=options)
    return contract, contract.check(graph, verbose=False)


def test_modules_without_a_cycle_are_accepted() -> None:
    _, check = checked(NoCyclesContract, graph_of("a -> b", "b -> c", "a -> c", "d -> a"))
    assert check.kept


def test_a_planted_cycle_is_found_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    graph = graph_of("a -> b", "b -> c", "c -> d", "d -> b", "d -> e", "e -> f", "f -> e")
    contract, check = checked(NoCyclesContract, graph)
    assert not check.kept
    assert check.metadata["cycles"] == [["b", "c", "d", "b"], ["e", "f", "e"]]
    contract.render_broken_contract(check)
    assert "c -> d (l.3)" in capsys.readouterr().out


def test_each_module_of_a_tangle_is_in_one_of_its_cycles() -> None:
    tangle = {"a": {"b"}, "b": {"a", "c"}, "c": {"a"}, "d": {"a"}, "e": set[str]()}
    assert cycles(tangle) == [["a", "b", "a"], ["c", "a", "b", "c"]]


def test_an_exception_opens_its_cycle_and_no_other() -> None:
    graph = graph_of("a -> b", "b -> a", "c -> d", "d -> c")
    _, check = checked(NoCyclesContract, graph, exceptions=["a -> b"])
    assert check.metadata["cycles"] == [["c", "d", "c"]]
    _, check = checked(NoCyclesContract, graph, exceptions=["a -> b", "d -> c"])
    assert check.kept


@pytest.mark.parametrize("line", ["a -> c", "c -> a", "x -> y"])
def test_an_exception_that_no_cycle_needs_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    contract, check = checked(NoCyclesContract, graph_of("a -> b", "b -> c", "a -> c"), exceptions=[line])
    assert not check.kept
    contract.render_broken_contract(check)
    assert f"the exception {line} closes no cycle" in capsys.readouterr().out


def test_imports_for_type_checkers_and_inside_of_functions_count(tmp_path: Path) -> None:
    package = tmp_path / "planted"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "first.py").write_text("def lazy():\n    from planted import second\n")
    (package / "second.py").write_text("import typing\nif typing.TYPE_CHECKING:\n    from planted.first import lazy\n")
    script = "import grimp; g = grimp.build_graph('planted', cache_dir=None); from scripts.contracts import cycles;"
    script += "print(cycles({each: g.find_modules_directly_imported_by(each) for each in sorted(g.modules)}))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[['planted.first', 'planted.second', 'planted.first']]"


def test_a_private_import_of_an_interface_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    graph = graph_of("tenure.face -> tenure._inner", "tenure.face -> tenure.open", "tenure._inner -> tenure._deep")
    options = {"interfaces": ["tenure.face"], "public": ["tenure.open"]}
    contract, check = checked(PublicNamesContract, graph, **options)
    assert not check.kept
    contract.render_broken_contract(check)
    assert "tenure.face is not allowed to import tenure._inner (l.1)" in capsys.readouterr().out
    _, check = checked(PublicNamesContract, graph, **options, exceptions=["tenure.face -> tenure._inner"])
    assert check.kept
    contract, check = checked(
        PublicNamesContract,
        graph,
        **options,
        exceptions=["tenure.face -> tenure._inner", "tenure.face -> tenure._deep"],
    )
    assert not check.kept
    contract.render_broken_contract(check)
    assert "no import needs the exception tenure.face -> tenure._deep" in capsys.readouterr().out
