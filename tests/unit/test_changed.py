"""`make changed`: a change planted in each layer chooses the tests that can reach it, and not the others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from scripts.changed.__main__ import changed_files, concerns_all, main, project_files, usual_base
from scripts.changed.reach import WORDS, Reach, is_test, read
from scripts.stages import ROOT

SUITES = {
    "azure_storage": "tests/stores/azure_storage/test_suites.py",
    "etcd": "tests/stores/etcd/test_suites.py",
    "kubernetes": "tests/stores/kubernetes/test_suites.py",
    "memory": "tests/stores/memory/test_suites.py",
    "nats": "tests/stores/nats/test_queue_suites.py",
    "peers": "tests/stores/peers/test_suites.py",
    "postgres": "tests/stores/postgres/test_suites.py",
    "rabbitmq": "tests/stores/rabbitmq/test_suites.py",
    "redis": "tests/stores/redis/test_suites.py",
    "servicebus": "tests/stores/servicebus/test_suites.py",
    "sqlite": "tests/stores/sqlite/test_queue_suites.py",
    "zookeeper": "tests/stores/zookeeper/test_suites.py",
}
ALL_SUITES = tuple(SUITES.values())


@cache
def reach() -> Reach:
    return Reach(read(ROOT, project_files(ROOT)))


LAYERS: dict[str, tuple[str, Sequence[str], Sequence[str]]] = {
    # layer: (the changed file, tests that it must choose, tests that it must not choose)
    "values": (
        "src/tenure/_lease.py",
        ["tests/unit/test_lease.py", "tests/properties/test_machine.py", "tests/process/test_lead.py", *ALL_SUITES],
        ["tests/unit/test_timing.py"],
    ),
    "core": (
        "src/tenure/_queue/pump.py",
        ["tests/properties/test_queue_machine.py", "tests/application/test_consumer.py", "tests/sim/test_queue_sim.py"],
        ["tests/unit/test_lease.py", "tests/unit/test_timing.py"],
    ),
    "ports": ("src/tenure/_election/store.py", ["tests/application/test_elector.py", *ALL_SUITES], []),
    "observers": (
        "src/tenure/_telemetry/families.py",
        ["tests/unit/test_metrics.py", "tests/application/test_telemetry.py", "tests/process/test_run_http.py"],
        ["tests/unit/test_lease.py", "tests/unit/test_timing.py"],
    ),
    "application": (
        "src/tenure/_election/elector.py",
        ["tests/application/test_elector.py", "tests/process/test_candidates.py", "tests/docs/test_examples.py"],
        ["tests/unit/test_lease.py", "tests/unit/test_timing.py"],
    ),
    "interfaces": (
        "src/tenure/_http/app.py",
        ["tests/application/test_http.py", "tests/process/test_run_http.py"],
        ["tests/unit/test_lease.py", "tests/unit/test_timing.py"],
    ),
    "a command": (
        "src/tenure/_cli/explain.py",
        ["tests/cli/test_explain.py", "tests/docs/test_commands.py", "tests/process/test_lead.py"],
        ["tests/application/test_elector.py", "tests/properties/test_machine.py"],
    ),
    "a file of data": (
        "src/tenure/_cli/errors.md",
        ["tests/cli/test_explain.py", "tests/docs/test_errors_page.py"],
        ["tests/application/test_elector.py", "tests/properties/test_machine.py"],
    ),
    "a page": ("docs/redis.md", ["tests/docs/test_backends.py"], ["tests/cli/test_help.py", *ALL_SUITES]),
    "an example": (
        "examples/service.py",
        ["tests/docs/test_service_example.py"],
        ["tests/cli/test_help.py", *ALL_SUITES],
    ),
    "a program that a test starts": (
        "tests/process/candidate.py",
        ["tests/process/test_candidates.py"],
        ["tests/application/test_elector.py", *ALL_SUITES],
    ),
    "a conftest": (
        "tests/stores/postgres/conftest.py",
        ["tests/stores/postgres/test_limits.py"],
        [SUITES["redis"], "tests/unit/test_lease.py"],
    ),
    "a test": (
        "tests/unit/test_lease.py",
        ["tests/unit/test_lease.py"],
        ["tests/unit/test_timing.py", *ALL_SUITES],
    ),
    "the servers": ("tests/servers/redis.py", [SUITES["redis"], "tests/application/test_forked.py"], []),
    "the shipped suites": (
        "src/tenure/testing/_conformance/queues/steps.py",
        [SUITES["redis"], SUITES["memory"], "tests/conformance/test_planted_queue.py"],
        ["tests/unit/test_lease.py", "tests/unit/test_timing.py"],
    ),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_change_chooses_what_can_reach_it(layer: str) -> None:
    file, reaching, others = LAYERS[layer]
    assert (ROOT / file).is_file()
    chosen = reach().chosen([file])
    assert reach().places(file)
    assert [test for test in reaching if test not in chosen] == []
    assert [test for test in others if test in chosen] == []


@pytest.mark.parametrize("backend", WORDS)
def test_a_change_of_a_backend_chooses_all_tests_of_its_folder(backend: str) -> None:
    chosen = reach().chosen([f"src/tenure/_backends/{backend}/__init__.py"])
    folder = f"tests/stores/{backend}/"
    assert {test for test in chosen if test.startswith(folder)} == {
        test for test in reach().tests if test.startswith(folder)
    }


@pytest.mark.parametrize(
    ("backend", "file"),
    [
        *((one, f"src/tenure/_backends/{one}/__init__.py") for one in WORDS if one not in ("memory", "sqlite")),
        ("redis", "src/tenure/_backends/redis/lua/leases.lua"),
        ("postgres", "src/tenure/_backends/postgres/queue.py"),
    ],
)
def test_a_change_of_a_backend_chooses_no_suites_of_stores_that_name_it_nowhere(backend: str, file: str) -> None:
    chosen = reach().chosen([file])
    assert SUITES[backend] in chosen
    unnamed = [
        suites
        for store, suites in SUITES.items()
        if store != backend and not any(word in reach().texts[suites].lower() for word in WORDS[backend])
    ]
    assert len(unnamed) >= 9
    assert [suites for suites in unnamed if suites in chosen] == []


@pytest.mark.parametrize("test", ["tests/unit/test_public.py", "tests/stores/sqlite/test_statements.py"])
def test_a_test_that_walks_over_the_source_reaches_all_of_it(test: str) -> None:
    for file in ("src/tenure/_backends/etcd/leases.py", "src/tenure/_cli/explain.py"):
        assert test in reach().chosen([file])


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints/dev.txt", "tests/conftest.py", "src/tenure/new.sql"])
def test_what_no_rule_places_concerns_all(file: str) -> None:
    assert concerns_all(file, reach())


def test_what_no_test_reads_concerns_none() -> None:
    assert not concerns_all("LICENSE", reach())
    assert reach().chosen(["LICENSE"]) == {}


@pytest.mark.parametrize("file", ["tests/unit/test_errors.py", "tests/stores/redis/test_scripts.py"])
def test_whatever_a_test_file_has_loaded_is_reached(file: str) -> None:
    """The graph is compared with what really happens, as an import that it doesn't know would leave tests out."""
    program = """
import sys, pytest
status = pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[1]])
print(*(getattr(module, "__file__", None) for module in [*sys.modules.values()]), sep="\\n")
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", program, file], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    here = [line for line in done.stdout.splitlines() if line.startswith(str(ROOT))]
    loaded = {Path(line).relative_to(ROOT).as_posix() for line in here}
    ours = {one for one in loaded if one in reach().texts}
    assert len([one for one in ours if one.startswith("src/tenure/")]) > 10
    assert [one for one in sorted(ours) if not (concerns_all(one, reach()) or file in reach().chosen([one]))] == []


# --- what has changed -------------------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    named = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *named, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with two commits on a branch, and changes that are not committed."""
    git(tmp_path, "init", "-q", "-b", "main")
    for name in ("kept", "edited", "moved", "deleted", "edited later"):
        (tmp_path / f"{name}.py").write_text(f"{name!r}  # long enough to be found as the same when it is moved\n" * 9)
    (tmp_path / ".gitignore").write_text("ignored.py\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    git(tmp_path, "checkout", "-qb", "branch")
    (tmp_path / "edited.py").write_text("2")
    git(tmp_path, "mv", "moved.py", "moved here.py")
    git(tmp_path, "rm", "-q", "deleted.py")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "two")
    (tmp_path / "edited later.py").write_text("3")
    (tmp_path / "new.py").write_text("4")
    (tmp_path / "ignored.py").write_text("5")
    return tmp_path


def test_commits_and_what_is_not_committed_count(project: Path) -> None:
    base = usual_base(project)
    assert base == git(project, "rev-parse", "main")
    committed = ["deleted.py", "edited.py", "moved here.py", "moved.py"]
    assert changed_files(project, base) == sorted([*committed, "edited later.py", "new.py"])
    assert changed_files(project, "HEAD") == ["edited later.py", "new.py"]
    git(project, "checkout", "-qf", "main")  # there, only what is not committed
    assert changed_files(project, usual_base(project)) == ["new.py"]


def test_a_deleted_file_of_the_library_concerns_all_and_a_deleted_test_none() -> None:
    assert concerns_all("src/tenure/deleted.py", reach())
    assert is_test("tests/unit/test_deleted.py")
    assert not concerns_all("tests/unit/test_deleted.py", reach())


def test_a_wrong_base_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--base", "no-such-commit"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("git can't compare with no-such-commit: ")


def test_the_way_from_a_test_to_a_change_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scripts.changed.__main__.changed_files", lambda root, base: ["src/tenure/_lease.py"])
    monkeypatch.setattr("scripts.changed.__main__.Reach", lambda texts: reach())  # of the same texts: made once
    assert main(["--base", "HEAD", "--why", "tests/unit/test_lease.py"]) == 0
    assert capsys.readouterr().out == "tests/unit/test_lease.py\n  → src/tenure/_lease.py\n"
    assert main(["--base", "HEAD", "--why", "tests/unit/test_timing.py"]) == 0
    assert "reaches none" in capsys.readouterr().out
    assert main(["--base", "HEAD", "--why", "tests/unit/test_nothing.py"]) == 2
    assert "is no test file" in capsys.readouterr().err
    assert main(["--base", "HEAD", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert "tests/unit/test_lease.py" in listed
    assert "tests/unit/test_timing.py" not in listed
