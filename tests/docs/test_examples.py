"""Every example runs, ends by itself, and prints what it should; every Python block in the documents is one of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest

from tests import warm
from tests.examples.project_pages import PROJECTS, is_left_behind
from tests.servers import Etcd, Kubernetes, Nats, Postgres, RabbitMQ, ZooKeeper, url_of

ROOT = Path(__file__).resolve().parents[2]
SERVED = {"azure_worker", "service", "servicebus_worker"}  # run by tests of their own
WEB = {
    "web_dashboard",
    "web_django",
    "web_fastapi",
    "web_flask",
    "web_starlette",
}  # these need a framework: see test_frameworks.py
TESTS = sorted((ROOT / "examples").glob("test_*.py"))  # run by pytest
EXAMPLES = sorted(one for one in (ROOT / "examples").glob("*.py") if one.stem not in SERVED | WEB and one not in TESTS)
DOCUMENTS = sorted(
    str(page.relative_to(ROOT))
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"))
    if not is_left_behind(page, ROOT)
)
RUN_BY_OTHERS = {"docs/tutorial.md", "docs/credentials.md"}  # see test_tutorial.py and test_credentials.py

PRINTS = {
    "leader": r"page 1 of the report, written in term 1\npage 2 .* term 1\npage 3 .* term 1\n",
    "leader_block": r"elected: term 1, trusted for 1\d s .*\ndone; now the leader is None\n",
    "leader_threads": r"page 1 of the report, written in term 1\npage 2 .* term 1\npage 3 .* term 1\n",
    "fenced_write": r"refused: token 1 .*\nterm 2: the second leader's line\nterm 1: the first leader's line\n",
    "consume": r"(order \d is served, delivery 1\n){3}",
    "consume_threads": r"order 1 is served\norder 3 is served\norder-2 is dead: no such customer; order 2 .*\n",
    "consume_settings": r"(plain is served, delivery 1\n|busy is served, delivery 3\n){2}"
    r"\['ValueError', 'unreadable'\]\nthe sum of the first 10,001 squares is 333,383,335,000\n",
    "events": r"nightly-report: .* ended: ended\norders: a message is dead: no such customer\n1 term, 1 dead letter\n",
    "exactly_once": r"2 receipts\nthe balance is 12\n",
    "leader_settings": r"(10\.0\.0\.1:8080 leads\n|page written in term 1\n)+now the leader is None\n",
    "kubernetes_leader": r"leading nightly-report in term \d+\nled by None\n",
    "limits": r"2 at once; 20 calls took more than a second: True\nhello, anna\nhello, ben\n"
    r"five seconds later: 2 letters\npaused: 0 received, 1 ready\nresumed: 1 received\n",
    "nats_worker": r"order (17|19) is served, delivery 1\norder (17|19) is served, delivery 1\n"
    r"dead: eighteen, not a number \(the order was 'eighteen'\)\n",
    "etcd_leader": r"leading nightly-report in term \d+, a revision of etcd\nled by None\n",
    "zookeeper_leader": r"leading nightly-report in term \d+, a zxid of ZooKeeper\nled by None\n",
    "main_job": r"the sum of the first 10,000 squares is 333,283,335,000\n",
    "queue_by_hand": r"kettle, delivery 1\n0 ready, 2 delayed, 1 dead\nfor a minute: too late, .*\n1 put back\n",
    "partitions": r"first: anna has \d+\nthe first owns 4, the second 4\n"
    r"((first|second): (anna|ben|cleo) has \d+\n){3}first: ben has \d+\n",
    "rabbitmq_worker": r"two kettles is served, delivery 1\n"
    r"no such customer is dead: unknown customer; no customer of this name\n",
    "request_reply": r"kettle: 12\.5\n",
    "schedules": r"beat 1, delivery 1\nbeat 2, delivery 1\nbeat 3, delivery 1\n"
    r"tidy, 0 3 \* \* \*: paused\n",
    "service_settings": r"a cup costs 3\.0\n(\d letters posted\n(dead: unknown item, spoon\n){0,2}){2}",
    "shards": r"6 14 4 messages wait in the stores\n(\w+ 1 2 3 4\n){6}",
    "telemetry": r"tenure_messages_sent_total\{queue=\"orders\"\} 1\.0\n(tenure_messages_.*\n)+"
    r"send orders: 0 links\nprocess orders: 1 links\n",
    "two_stores": r"(order \d is served\n){3}led by None, and the queue has nothing\n",
    "typed_bodies": r"tea for 5\.00\ncup for 4\nundecodable: the body\.lines\[0\]\.price must be a Decimal, .*\n",
    "session": r"anna has 7\nben has 7\n",
    **dict.fromkeys(
        ("postgres_asyncpg", "postgres_psycopg", "postgres_sqlalchemy"),
        r"invoiced 17 and (nothing|1 locked)\nwritten by the leader; an older leader is refused\n",
    ),
    "observe": r"(no leader\n)?anna leads, term 1\n(no leader\n)?ben leads, term 2\nno leader\n",
}

PASS = {"test_takeover": 20, "test_handlers": 5}
"""How many tests of an example of a test pass, with 20 seeds."""

LOGS = {
    "nats_worker": r"orders: message .*: moved to the dead letters \(not a number\)\n",
    "service_settings": r"questions: message 'of-spoon', delivery 1: moved to the dead letters \(unknown item\)\n",
    "consume_settings": r"((calls: message |Traceback |  |ValueError: ).*\n)+",
    "consume_threads": r"orders: message 'order-2', delivery 1: moved to the dead letters .*\n",
    "typed_bodies": r"orders: message .*: its handler failed .*\norders: message .*: moved to the dead letters .*\n",
    "queue_by_hand": r"orders: message .*: moved to the dead letters .*\n",
    "rabbitmq_worker": r"orders: message .*: moved to the dead letters .*\n",
    "events": r"orders: message .*: moved to the dead letters .*\n",
}
"""The log of tenure on standard error, by example; all others write nothing."""


def test_each_example_has_an_expectation() -> None:
    assert {example.stem for example in EXAMPLES} == set(PRINTS)


def test_each_example_is_in_the_list_of_examples() -> None:
    listed = re.findall(r"\]\(([^)]+)\)", (ROOT / "examples" / "README.md").read_text())
    first = {target.removesuffix("/README.md") for target in listed}
    folder = ROOT / "examples"
    files = [one for one in (*folder.iterdir(), *PROJECTS.iterdir()) if not is_left_behind(one, folder)]
    found = {str(one.relative_to(folder)) for one in files} - {"README.md", "projects"}
    assert found == {target for target in first if not target.startswith("..")}


@pytest.mark.parametrize("example", TESTS, ids=lambda example: example.stem)
def test_an_example_of_a_test_passes_with_every_seed(example: Path, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "pytest", "-p", "tenure.testing.pytest_plugin", "--seeds", "20", str(example)]
    run = subprocess.run(
        [*line, "--rootdir", str(tmp_path), "-c", "/dev/null", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(rf"\b{PASS[example.stem]} passed in", run.stdout)


def environment_of(example: Path) -> dict[str, str]:
    """Return the environment that an example is run in; start its server."""
    environment = dict(os.environ)
    if example.stem.startswith("postgres_"):
        pytest.importorskip(example.stem.removeprefix("postgres_"))
        environment["TENURE_URL"] = url_of(Postgres)
    if example.stem == "kubernetes_leader":
        environment["TENURE_URL"] = url_of(Kubernetes)
    if example.stem == "etcd_leader":
        environment["TENURE_URL"] = f"{url_of(Etcd)}?prefix=jobs/"
    if example.stem == "nats_worker":
        environment["TENURE_URL"] = f"{url_of(Nats)}?prefix=shop"
    if example.stem == "rabbitmq_worker":
        environment["TENURE_URL"] = url_of(RabbitMQ)
    if example.stem == "zookeeper_leader":
        environment["TENURE_URL"] = url_of(ZooKeeper).replace("/?", "/jobs?")
    return environment


def assert_prints_what_it_should(example: Path, done: subprocess.CompletedProcess[str]) -> None:
    assert re.fullmatch(LOGS.get(example.stem, ""), done.stderr), done.stderr
    assert done.returncode == 0
    assert re.fullmatch(PRINTS[example.stem], done.stdout), done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    environment = environment_of(example)
    done = warm.run([example], cwd=tmp_path, env=environment, timeout=60)
    assert_prints_what_it_should(example, done)
    again = warm.run([example], cwd=tmp_path, env=environment, timeout=60)
    assert again.returncode == 0, again.stderr  # with the data of the first run


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_runs_in_a_cold_process(example: Path, tmp_path: Path) -> None:
    """It imports what it needs itself, and nothing is said when Python takes its modules down."""
    done = subprocess.run(
        [sys.executable, example],
        cwd=tmp_path,
        env=environment_of(example),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert_prints_what_it_should(example, done)


def python_in(document: str) -> list[str]:
    found: list[str] = re.findall(r"^```python\n(.*?)^```$", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)
    return found


@pytest.mark.parametrize("document", sorted({*DOCUMENTS} - RUN_BY_OTHERS))
def test_python_in_the_documents_is_a_piece_of_an_example(document: str) -> None:
    files = [one for one in (ROOT / "examples").rglob("*.py") if not is_left_behind(one, ROOT)]
    sources = ["\n" + one.read_text() for one in files]
    for block in python_in(document):
        pieces = ["\n" + indent(block, " " * deep) for deep in (0, 4, 8, 12)]  # of a module, or of a function in it
        assert any(piece in source for piece in pieces for source in sources), (
            f"{document} shows Python that is no piece of a file of examples/:\n{block}"
        )


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_in_the_documents_exist(document: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", (ROOT / document).read_text()):
        assert ((ROOT / document).parent / target).exists(), f"{document} links to {target}, which does not exist"
