"""docs/security.md: each claim names a test that exists, each list is the program's, and role commands are run."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from tenure._registry import BACKENDS
from tests import targets
from tests.docs.pages import ROOT, broken_links, section, table, text_of

PAGE = "docs/security.md"
UNTESTED = re.compile(r"\*Not tested\*: \S")
PROOF = re.compile(r"\[([^\]]+)\]\(\.\./((?:tests|src/tenure/testing)/[^)#]+\.py)\)")
SEVERAL = re.compile(r"\b(test_\w+): ((?:\[[^\]]+\]\([^)]+\)[,;.]?\s*)+)")
"""A test that several stores have, with a link for each."""


def claims(text: str) -> list[str]:
    """Return the rows of tables and the bullets of a page, each with its proof: what follows a bullet belongs to it."""
    found = []
    for block in re.split(r"\n(?=\n|\||- |#)", text):
        line = " ".join(block.split())
        if line.startswith("- ") or (line.startswith("| ") and not line.endswith("| Proof |")):
            found.append(line)
    return found


def proofs(claim: str) -> list[tuple[str, str]]:
    """Return the tests that a claim names: what the link shows, and the file."""
    return PROOF.findall(claim)


def unproved(text: str) -> list[str]:
    """Return the claims that name no test and don't say why there is none; and the links to tests that don't exist."""
    several = [(name, file) for name, links in SEVERAL.findall(text) for _, file in PROOF.findall(links)]
    return [one for one in claims(text) if not (is_proved(one) or UNTESTED.search(one))] + [
        f"{shown}: {file}" for shown, file in [*PROOF.findall(text), *several] if not is_there(shown, file)
    ]


def is_proved(claim: str) -> bool:
    return bool(proofs(claim))


def is_there(shown: str, file: str) -> bool:
    """Return whether a file has tests, and the test or the suite that a link to it shows, if it shows one."""
    names = [shown] if re.match(r"test_\w+$|[A-Z]\w+(Tests|Suite)$", shown) else []
    if shown.endswith(".py") and shown != Path(file).name:
        return False
    is_suite = file.startswith("src/tenure/testing/_conformance/") and bool(names)
    if not is_suite and not re.match(r"tests/(\w+/)*test_\w+\.py$", file):
        return False
    return targets.is_there("::".join([f"../{file}", *names]))


def test_each_claim_names_a_test_that_exists() -> None:
    text = text_of(PAGE)
    assert len(claims(text)) > 60
    assert unproved(text) == []


@pytest.mark.parametrize(
    "planted",
    [
        "- It can't be broken.\n",
        "| Redis | all is well | |\n",
        "- *Not tested*:\n",
        "- It holds. [test_of_nothing](../tests/docs/test_security.py)\n",
        "- It holds. [test_security.py](../tests/docs/test_insecurity.py)\n",
        "- It holds. [test_proof.py](../tests/docs/test_security.py)\n",
        "- It holds. [on each store](../tests/stores/rights.py)\n",
        "- It holds. [refused](../tests/stores/rights.py)\n",
        "- It holds. [the suites](../src/tenure/testing/_conformance/leases/foreign.py)\n",
        "- It holds. test_of_nothing: [Redis](../tests/stores/redis/test_rights.py)\n",
        "- It holds. test_an_observer_changes_nothing: [Redis](../tests/stores/redis/test_rights.py),\n"
        "  [etcd](../tests/stores/etcd/test_rights.py)\n",
    ],
)
def test_a_claim_without_a_test_is_seen(planted: str) -> None:
    assert unproved(planted)


@pytest.mark.parametrize("page", [PAGE, "SECURITY.md"])
def test_links_lead_somewhere(page: str) -> None:
    assert broken_links(page) == []


# --- lists -------------------------------------------------------------------------------------------------------


def test_each_option_that_switches_a_check_off_is_listed() -> None:
    listed = section(PAGE, "What TLS verifies")
    options = set()
    for module in {module for module, _ in BACKENDS.values()}:
        for part in ("address", "sentinel"):
            try:
                found = importlib.import_module(f"{module}.{part}")
            except ModuleNotFoundError:
                continue
            for kind in (
                one for one in vars(found).values() if isinstance(one, type) and dataclasses.is_dataclass(one)
            ):
                options |= {field.name for field in dataclasses.fields(kind) if is_about_checks(field.name)}
    assert {"check_hostname", "ssl_cert_reqs", "sslmode", "sentinel_tls"} <= options
    assert [one for one in options if f"`{one}" not in listed and one not in NOT_TLS] == []


NOT_TLS = {"insecure"}
"""``peers://…?insecure=true`` is about the key."""


def is_about_checks(name: str) -> bool:
    return bool(re.search(r"hostname|insecure|verify|cert_reqs|sslmode|_tls$", name)) and not name.startswith("is_")


def test_each_store_has_a_row() -> None:
    access = " ".join(row[0] for row in table(PAGE, "Store or surface", "Anyone with access can"))
    rights = " ".join(row[0] for row in table(PAGE, "Store", "Candidate: leads"))
    for title in ("SQLite", "PostgreSQL", "Redis", "NATS", "Azure Storage", "Service Bus", "`peers://`", *ROLES):
        assert title in access, title
        assert title in rights, title


ROLES = {
    "PostgreSQL": "docs/postgresql.md",
    "Redis": "docs/redis.md",
    "NATS": "docs/nats.md",
    "RabbitMQ": "docs/rabbitmq.md",
    "etcd": "docs/etcd.md",
    "ZooKeeper": "docs/zookeeper.md",
    "Kubernetes": "docs/kubernetes.md",
}
"""Stores whose roles are tried on a server, and the page that has their commands."""


def test_commands_of_roles_are_run_from_the_page() -> None:
    rows = {row[0]: row for row in table(PAGE, "Store", "Candidate: leads")}
    for title, page in ROLES.items():
        [file] = [file for shown, file in PROOF.findall(rows[title][-1]) if shown == "test_rights.py"]
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"commands\(\s*['\"]{page}['\"],\s*['\"]Rights['\"]", source), file
        assert section(page, "Rights").count("```") >= 2
