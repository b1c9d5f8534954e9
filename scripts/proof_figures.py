"""
Write the tables of docs/proof.md that can be counted, from the lists that the tests themselves use.

``python -m scripts.proof_figures`` writes them, with ``--check`` it only compares. It needs the development tools.
"""

import ast
import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "proof.md"
RUN = "python -m scripts.proof_figures"

PLANTS = {
    "tests/sim/test_sim.py": "elections under faults",
    "tests/sim/test_queue_sim.py": "queues, consumers and sessions under faults",
    "tests/sim/test_peers.py": "fleets of `peers://` under faults",
    "tests/sim/test_partitions.py": "partitions under faults",
    "tests/sim/test_schedules.py": "schedules under faults",
    "tests/sim/test_receiving.py": "RabbitMQ: when consumers are begun and ended",
    "tests/sim/test_fleet.py": "the requests of thousands of candidates",
    "tests/stores/peers/test_models.py": "the votes of peers, as a model for spin",
    "tests/properties/test_queue_machine.py": "the machines of a consumer",
    "tests/properties/test_session_pump.py": "the machine of a consumer of sessions",
    "tests/properties/test_remote_clock.py": "the clock of a store, as it is learned",
    "tests/unit/test_supervisor.py": "the machine of `tenure run`",
    "tests/unit/test_handled.py": "what consumers have noted of messages, under kills",
    "tests/unit/test_schedule_steps.py": "schedules in three steps",
    "tests/unit/test_shared_hints.py": "what brings hints to many listeners",
    "tests/application/test_readiness.py": "the readiness of a service",
    "tests/application/test_early_drains.py": "drains that come before a begin",
    "tests/application/test_durations.py": "durations that are measured, told and shown",
    "tests/application/test_outages.py": "what asks again by itself, while a store is away",
    "tests/conformance/test_planted.py": "stores of leases",
    "tests/conformance/test_planted_waiting.py": "stores of leases with a queue of candidates",
    "tests/conformance/test_planted_observed.py": "stores whose clients observe the end of a lease",
    "tests/conformance/test_planted_queue.py": "brokers",
    "tests/conformance/test_planted_outcomes.py": "brokers: how deliveries end",
    "tests/conformance/test_planted_stored_again.py": "brokers: the largest messages, and the wordiest failures",
    "tests/conformance/test_planted_short_use.py": "brokers: short uses, many of them",
    "tests/conformance/test_planted_live.py": "brokers: messages that are shown and purged",
    "tests/conformance/test_planted_locks.py": "brokers and consumers: the end of a lock",
    "tests/conformance/test_planted_late.py": "stores that carry out a request late",
    "tests/conformance/test_planted_late_answers.py": "who takes an answer for none that comes late, but in time",
    "tests/conformance/test_planted_kills.py": "brokers whose client is killed between two steps",
    "tests/stores/peers/test_keys.py": "members of a fleet whose key is replaced",
    "tests/stores/servicebus/test_private_parts.py": "private parts of a client that are not listed",
    "tests/conformance/test_planted_slow.py": "stores, and clients, that count from a slow answer",
    "tests/conformance/test_planted_away.py": "stores after an outage",
    "tests/conformance/test_planted_hints.py": "clients whose connection was cut",
    "tests/conformance/test_planted_one_way.py": "who takes what it never learns of, while its answers are lost",
    "tests/conformance/test_planted_partitions.py": "members of a group with partitions, while a link works one way",
    "tests/conformance/test_planted_rest.py": "stores that keep those busy who have nothing to do",
    "tests/conformance/test_planted_outages.py": "clients that try to connect while a store is cut off",
    "tests/stores/rabbitmq/test_pauses.py": "RabbitMQ: consumers ended at once, alarms that ring late",
    "tests/stores/rabbitmq/test_restart.py": "RabbitMQ: channels with so many consumers that a restart mixes them up",
    "tests/stores/redis/test_script_settings.py": "Redis: scripts that depend on what other users' scripts have set",
    "tests/stores/redis/test_silence.py": "Redis: how often a silent subscription is checked",
    "tests/stores/nats/test_standing.py": "NATS: pauses of a pull that waits",
    "tests/conformance/test_planted_cancelled.py": "claims whose caller was cancelled",
    "tests/conformance/test_cut_off.py": "connections whose close is cut off",
    "tests/conformance/test_planted_strain.py": "stores that are full or cut off",
    "tests/conformance/test_planted_cost.py": "requests that cost too much",
    "tests/conformance/test_planted_foreign.py": "stores that what others wrote disturbs",
    "tests/conformance/test_planted_changed.py": "brokers that don't tell that others made a queue anew",
    "tests/stores/test_tls.py": "stores that ignore whom their URL trusts",
    "tests/stores/test_certificates.py": "stores that read their certificates once",
    "tests/stores/test_rotation.py": "clients of stores that ask for their password once",
    "tests/stores/test_connect_failures.py": "stores that tell a failure to connect in words of their own",
    "tests/fuzz/test_fuzz.py": "decoders of what others wrote",
    "tests/unit/test_one_line.py": "loggers whose lines others could write",
    "tests/unit/test_foreign.py": "code that would run what was read",
    "tests/stores/servicebus/test_logins.py": "logins of Service Bus",
}
"""The files that have tests of planted bugs, and what has the bug in it."""

STORES = {
    "Memory": ("memory", "the store itself"),
    "Sqlite": ("SQLite", "files"),
    "Postgres": ("PostgreSQL", "a server"),
    "Redis": ("Redis", "a server; a cluster of three"),
    "Nats": ("NATS", "a server; a cluster of three"),
    "Azure": ("Azure Storage", "Azurite, an emulator"),
    "Rabbit": ("RabbitMQ", "a server"),
    "ServiceBus": ("Azure Service Bus", "**a double**"),
    "Etcd": ("etcd", "a server; a cluster of three"),
    "ZooKeeper": ("ZooKeeper", "a server; an ensemble of three"),
    "Kubernetes": ("Kubernetes", "**a double**; a kube-apiserver if one is named"),
    "Peers": ("peers", "members in one process"),
}
"""Each store of test_kinds.py: its name, and what the suites run on; ``Queued``, ``Observed`` are of the tests only."""


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    counted = page_with_figures(page)
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(counted, encoding="utf-8")
    elif counted != page:
        print(f"docs/proof.md has other figures than the tests; run: {RUN}", file=sys.stderr)
        return 1
    return 0


def page_with_figures(page: str) -> str:
    """Return *page* with each table between its two markers counted anew."""
    for name, rows in (("planted", planted_rows()), ("stores", store_rows()), ("kept", kept_rows())):
        table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
        begin, end = f"<!-- figures: {name} -->\n", "<!-- end of figures -->\n"
        found = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if len(found.findall(page)) != 1:
            raise SystemExit(f"docs/proof.md must have {begin.strip()!r} once, with {end.strip()!r} after it")
        page = found.sub(lambda _, whole=f"{begin}\n{table}\n{end}": whole, page)  # type: ignore[misc]
    return page


# --- planted bugs ---


FINDS_A_BUG = r"test_\w*(planted|bug|harm|a_store_that|a_change_made|a_no_in_place)\w*_(is|are)_found"
"""What a test of planted bugs is named."""


def planted_rows() -> Iterator[list[str]]:
    yield ["A bug planted in", "Bugs", "Found by", "In"]
    yield ["---", "---", "---", "---"]
    every: set[object] = set()
    for file, what in PLANTS.items():
        bugs = set(planted_in(file))
        every |= bugs
        yield [what, str(len(bugs)), f"[{Path(file).name}](../{file})", target_of(file)]
    yield ["all", str(len(every)), "a bug that two files plant counts once", ""]


def target_of(file: str) -> str:
    """Return the target of make that plants the bugs of *file*."""
    has = module_of("tests/targets.py").has
    name = file.removeprefix("tests/")
    found = {
        target for target in ("test", "full") for test in tests_of_planted_bugs(file) if has(target, f"{name}::{test}")
    }
    return " and ".join(f"`make {target}`" for target in ("test", "full") if target in found)


def planted_in(file: str) -> Iterator[object]:
    """Yield the bugs that the tests of *file* plant: the first argument of each test that has to find one."""
    module = module_of(file)
    for name in tests_of_planted_bugs(file):
        (choices,) = (mark.args[1] for mark in getattr(module, name).pytestmark if mark.name == "parametrize")
        for number, choice in enumerate(choices):
            bug = choice[0] if isinstance(choice, tuple) else choice
            yield (file, name, number) if isinstance(bug, str) else bug


def tests_of_planted_bugs(file: str) -> list[str]:
    """Return the tests of *file* that are called once for each planted bug."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if not re.search(f"{FINDS_A_BUG}\\(", text):  # as in most files, which need not be parsed
        return []
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        node.name
        for node in functions
        if re.fullmatch(FINDS_A_BUG, node.name)
        and any("parametrize" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


# --- stores ---


def store_rows() -> Iterator[list[str]]:
    kinds = module_of("tests/conformance/test_kinds.py")
    peers = module_of("tests/stores/peers/test_suites.py")
    yield ["Store", "Tried on", "Suites", "Tests", "Faults"]
    yield ["---", "---", "---", "---", "---"]
    for store, (title, tried_on) in STORES.items():
        classes: list[Any] = kinds.classes_before(store) if store in kinds.WHERE else classes_of(peers)
        faults = sorted({fault for one in classes for fault in one.harness.faults})
        made = ", ".join(fault.replace("_", " ") for fault in faults) or "none"
        yield [title, tried_on, str(len(kinds.suites_passed(classes))), f"{tests_in(classes):,}", made]


def classes_of(module: ModuleType) -> list[type]:
    """Return the classes of a test module that run a suite on a harness of its own."""
    return [one for one in vars(module).values() if isinstance(one, type) and "harness" in vars(one)]


def tests_in(classes: Iterable[type]) -> int:
    """Return how many tests *classes* have, each with each of its arguments."""
    calls = module_of("tests/conformance/planted.py").calls
    return sum(1 for one in classes for _ in calls(one))


# --- everything else ---


def kept_rows() -> Iterator[list[str]]:
    sim, queues = (importlib.import_module(f"tenure.testing.sim{each}") for each in ("", ".queues"))
    plans = [importlib.import_module(f"tenure.testing._sim.{each}.plan") for each in ("elections", "queues")]
    peers = module_of("tests/sim/peers/plan.py")
    kept = module_of("tests/sim/proof.py").kept_seeds
    clients = module_of("tests/interop/stores.py").PAIRS
    yield ["What", "Count", "Where"]
    yield ["---", "---", "---"]
    yield row("kinds of faults that a seed of elections may draw", [*plans[0].FAULTS, *plans[0].USER_FAULTS], sim_at(0))
    both = [*plans[1].FAULTS, *plans[1].STORE_FAULTS, *plans[1].USER_FAULTS]
    yield row("kinds of faults that a seed of queues may draw", both, sim_at(1))
    natures = {*plans[1].NATURES, *plans[1].USER_NATURES}
    yield row("ways in which a simulated handler may behave", natures, sim_at(1))
    yield row("kinds of faults that a seed of peers may draw", peers.FAULTS, "tests/sim/peers/plan.py")
    yield row("seeds of elections that once failed, run again each time", kept("seeds.txt"), "tests/sim/seeds.txt")
    yield row("seeds of queues, likewise", kept("queue_seeds.txt"), "tests/sim/queue_seeds.txt")
    harmless = [*sim.SURVIVORS, *queues.SURVIVORS]
    yield row("changes that break no promise, and must not be found", harmless, "tests/sim/proof.py")
    for what, folder in (("elections", "tests/scenarios"), ("consumers", "tests/scenarios/queue")):
        yield row(f"scenarios of {what}, as text files", [*(ROOT / folder).glob("*.txt")], folder)
    yield row("foreign clients in the same elections; one, client-go, is a double", clients, "tests/interop")
    golden = [*(ROOT / "tests/interop/golden").glob("*.json")]
    yield row("files with what they and we store, compared byte by byte or field by field", golden, "tests/interop")
    tests = [test for file in (ROOT / "tests").rglob("test_*.py") for test in test_functions(file)]
    rounded = f"{len(tests) // 500 * 500:,}"  # so that not every new test changes the page
    yield ["functions that are tests, at least; many run with many arguments", rounded, "`tests`"]


def sim_at(number: int) -> str:
    return f"src/tenure/testing/_sim/{('elections', 'queues')[number]}/plan.py"


def row(what: str, counted: Iterable[object], where: str) -> list[str]:
    return [what, str(len(list(counted))), f"[{where}](../{where})"]


def test_functions(file: Path) -> Iterator[str]:
    """Yield the names of the tests of a file: of its functions, and of the methods of its classes."""
    left: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    for node in left:
        if isinstance(node, ast.ClassDef):
            left += node.body
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.name


def module_of(file: str) -> ModuleType:
    return importlib.import_module(file.removesuffix(".py").replace("/", "."))


if __name__ == "__main__":
    sys.exit(main())
