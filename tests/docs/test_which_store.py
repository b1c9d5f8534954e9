"""The page that helps to choose a store agrees with the traits that the stores declare."""

from __future__ import annotations

import importlib
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest

from tenure import LeaseTraits, QueueTraits
from tenure._registry import BACKENDS
from tests.docs.pages import broken_links, code, table, text_of

PAGE = "docs/which-store.md"

SCHEMES = {
    "SQLite": "sqlite",
    "peers": "peers",
    "PostgreSQL": "postgresql",
    "Redis": "redis",
    "NATS": "nats",
    "Azure Storage": "azure",
    "Service Bus": "servicebus",
    "RabbitMQ": "amqp",
    "etcd": "etcd",
    "ZooKeeper": "zookeeper",
    "Kubernetes": "kubernetes",
    "memory": "memory",
}
"""The scheme of each store, in the order in which the page names them."""

COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "≠": operator.ne,
    "≤": operator.le,
    ">": operator.gt,
}


def module_of(scheme: str) -> Any:
    return importlib.import_module(BACKENDS[scheme][0])


LEASES: dict[str, LeaseTraits] = {
    name: module_of(scheme).TRAITS for name, scheme in SCHEMES.items() if hasattr(module_of(scheme), "TRAITS")
}
QUEUES: dict[str, QueueTraits] = {
    name: module_of(scheme).QUEUE_TRAITS
    for name, scheme in SCHEMES.items()
    if hasattr(module_of(scheme), "QUEUE_TRAITS")
}


def stores_with(condition: str, traits: dict[str, Any]) -> list[str]:
    """Return the stores for which a condition such as ``ttl min ≤ 1`` holds."""
    name, sign, value = re.fullmatch(r"([a-z ]+) ([=≠≤>]) (.+)", condition).groups()  # type: ignore[union-attr]
    wanted: object = {"yes": True, "no": False}.get(value, value)
    if re.fullmatch(r"[\d.,]+", value):
        wanted = float(value.replace(",", ""))
    found = {store: getattr(each, name.replace(" ", "_")) for store, each in traits.items()}
    assert all(isinstance(one, str) == isinstance(wanted, str) for one in found.values()), condition
    return [store for store, one in found.items() if COMPARE[sign](one, wanted)]


def test_each_store_is_in_the_first_table_once() -> None:
    found = [code(row[1])[0].rstrip(":") for row in table(PAGE, "You run", "URL")]
    assert sorted(found) == sorted(SCHEMES.values())
    assert {module_of(one) for one in found} == {module_of(one) for one in BACKENDS}


@pytest.mark.parametrize("row", table(PAGE, "You run", "URL"), ids=lambda row: str(code(row[1])[0]))
def test_the_first_table_says_what_a_store_has(row: list[str]) -> None:
    _, url, elections, queues, without, _ = row
    [name] = [name for name, scheme in SCHEMES.items() if f"`{scheme}:`" == url]
    assert elections == ("yes" if name in LEASES else "no")
    assert queues == ("yes" if name in QUEUES else "no")
    if name not in QUEUES:
        assert not without
        return
    traits = QUEUES[name]
    impossible = [trait for trait in QueueTraits.__dataclass_fields__ if getattr(traits, trait) == "impossible"]
    assert without == (", ".join(impossible).replace("_", " ") or "–")


def needs() -> list[tuple[str, list[str], dict[str, Any]]]:
    """Return the conditions of both tables of needs, with the stores that the page names, and the traits."""
    elections, queues = text_of(PAGE).split("## Queues by need")
    found: list[tuple[str, list[str], dict[str, Any]]] = []
    for section, traits in ((elections, LEASES), (queues, QUEUES)):
        rows = re.findall(r"^\| [^|]+ \| `([^`]+)` \| ([^|]+) \| [^|]+ \|$", section, re.MULTILINE)
        assert len(rows) > 8
        found += [(condition, stores.strip().split(", "), dict(traits)) for condition, stores in rows]
    return found


@pytest.mark.parametrize(
    ("condition", "stores", "traits"), needs(), ids=lambda one: one if isinstance(one, str) else ""
)
def test_a_need_is_met_by_the_stores_that_the_page_names(
    condition: str, stores: list[str], traits: dict[str, Any]
) -> None:
    assert stores == stores_with(condition, traits)
    assert len(stores) < len(traits), "it doesn't help to choose"


def test_each_feature_of_queues_that_some_store_lacks_is_a_need() -> None:
    named = {condition.split(" ≠ ")[0] for condition, _, _ in needs()}
    lacking = {
        trait.replace("_", " ")
        for trait in QueueTraits.__dataclass_fields__
        if any(getattr(each, trait) == "impossible" for each in QUEUES.values())
    }
    assert lacking <= named


def test_the_limits_of_leases_in_the_text_are_those_of_the_traits() -> None:
    text = text_of(PAGE)
    shortest = {name: LEASES[name].ttl_min for name in ("peers", "ZooKeeper", "Azure Storage")}
    assert ", ".join(f"{ttl:g} s ({name})" for name, ttl in shortest.items()) in text
    assert f"Leases of {LEASES['Azure Storage'].ttl_min:g} to {LEASES['Azure Storage'].ttl_max:g} s" in text
    assert f"Bodies of {QUEUES['Azure Storage'].body_max:,} bytes" in text


@pytest.mark.parametrize("head", ["Limits of each store", "If the store itself fails"])
def test_each_store_for_work_has_its_limits_and_its_fail_over(head: str) -> None:
    section = text_of(PAGE).split(f"## {head}\n")[1].split("\n## ")[0]
    named = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)[1:]
    missing = [store for store in SCHEMES if store not in ", ".join(named)]
    assert missing in (["memory"], ["peers", "memory"])  # peers are no store that fails over


def test_links_lead_somewhere() -> None:
    assert broken_links(PAGE) == []
