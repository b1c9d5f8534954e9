"""The worksheet of an operator: its times are those of the program and a simulation, its alerts use real metrics."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import pytest

from scripts import timing_tables as tables
from tenure import Timing
from tenure._election import effects as election
from tenure._election.machine import Machine
from tenure._lease import Grant, Granted, HeldBy, Lost, NoAnswer, Released, Vacant
from tenure._queue.options import ConsumeSettings
from tenure._telemetry.families import FAMILIES, OTHER
from tenure._telemetry.metrics import Metrics, election_label
from tenure.events import Reason, StandingBy, TermBegan, TermEnded, TermEnding
from tests.docs.pages import ROOT, broken_links, code, table, text_of

PAGE = "docs/production.md"
SECOND = 0.001
"""What a simulated moment takes, in seconds: the bounds are those of a store that answers at once."""

PHASES = 24
"""How many moments between two renewals are tried."""


def test_the_tables_of_times_are_those_of_the_program() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "timing_tables.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


# --- the bounds, in a simulation of two candidates --------------------------------------------------------------------


@dataclass
class Lease:
    grant: Grant
    ends_at: float


@dataclass(frozen=True)
class Outage:
    """A time in which something does not work."""

    begin: float
    lasts: float

    def is_at(self, now: float) -> bool:
        return self.begin <= now < self.begin + self.lasts


NEVER = Outage(0.0, 0.0)


@dataclass
class World:
    """Two candidates on one store that answers at once, or not at all while it is *silent*; with virtual time."""

    timing: Timing
    seed: int
    hints: bool = True
    tells: bool = True
    silent: Outage = NEVER
    refuses: bool = False
    """Whether a silent store fails at once, instead of giving no answer."""
    blocked: Outage = NEVER
    """When the loop that runs the work is blocked, so that renewals are withheld."""
    now: float = 0.0
    lease: Lease | None = None
    token: int = 0
    leaders: list[tuple[float, Machine]] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.machines = [
            Machine("job", name, self.timing, rng, hints=self.hints, now=0.0) for name in ("first", "second")
        ]

    def run(self, until: float, *, stopped: Machine | None = None) -> None:
        """Let time pass, for all machines but the one that is *stopped*."""
        while True:
            running = [one for one in self.machines if one is not stopped]
            machine = min(running, key=lambda one: one.wake_at)
            if machine.wake_at > until:
                self.now = until
                return
            self.now = max(self.now, machine.wake_at)
            self.feed(machine, election.Tick())

    def feed(self, machine: Machine, event: Any) -> None:
        for effect in machine.handle(event, self.now):
            match effect:
                case election.Acquire(number, holder):
                    self.answer(machine, number, partial(self.acquire, holder))
                case election.Inspect(number):
                    self.answer(machine, number, self.inspect)
                case election.Renew(number, grant):
                    if self.blocked.is_at(self.now):
                        self.feed(machine, election.Answered(number, election.RenewalWithheld("blocked")))
                    else:
                        self.answer(machine, number, partial(self.renew, grant))
                case election.Release(number, grant):
                    self.answer(machine, number, partial(self.release, grant))
                    for other in [one for one in self.machines if one is not machine and self.hints]:
                        self.feed(other, election.Hint())
                case election.StartWork():
                    self.leaders.append((self.now, machine))
                case election.CancelWork(token, _):
                    self.feed(machine, election.WorkEnded(token, True))
                case election.Emit(TermEnding(reason=reason)):
                    self.endings.append(reason)

    def answer(self, machine: Machine, number: int, ask: Callable[[], Any]) -> None:
        if not self.silent.is_at(self.now):
            self.feed(machine, election.Answered(number, ask()))
        elif self.refuses:
            self.feed(machine, election.Answered(number, NoAnswer("away")))

    def inspect(self) -> HeldBy | Vacant:
        if self.lease is None or self.lease.ends_at <= self.now:
            return Vacant("job")
        left = self.lease.ends_at - self.now
        return HeldBy("job", self.lease.grant.holder, self.token, left if self.tells else None)

    def acquire(self, holder: str) -> Granted | HeldBy:
        found = self.inspect()
        if isinstance(found, HeldBy) and found.holder != holder:
            return found
        self.token += 1
        self.lease = Lease(Grant("job", holder, self.token), self.now + self.timing.ttl)
        return Granted(self.lease.grant)

    def renew(self, grant: Grant) -> Granted | Lost:
        if self.lease is None or self.lease.grant != grant or self.lease.ends_at <= self.now:
            return Lost(grant)
        self.lease.ends_at = self.now + self.timing.ttl
        return Granted(grant)

    def release(self, grant: Grant) -> Released | Lost:
        if self.lease is None or self.lease.grant != grant:
            return Lost(grant)
        self.lease = None
        return Released(grant)

    def leader(self) -> Machine:
        return self.leaders[-1][1]


def moments(timing: Timing) -> Iterator[tuple[int, float]]:
    """Return seeds, and moments in a term that has lasted for a while: all phases of a renewal."""
    for seed in range(PHASES):
        yield seed, 5 * timing.ttl + timing.renew_every * seed / PHASES


TIMINGS = [Timing(ttl) for ttl in tables.TTLS]
each_ttl = pytest.mark.parametrize(
    "timing", [pytest.param(one, marks=pytest.mark.sim, id=f"{one.ttl:g}") for one in TIMINGS]
)


def successions(timing: Timing, **options: Any) -> tuple[list[float], list[float]]:
    """Return the seconds to the next leader from the death of one, and from the end of its lease."""
    from_death, from_end = [], []
    for seed, moment in moments(timing):
        world = World(timing, seed, **options)
        world.run(moment)
        dead = world.leader()
        assert world.lease is not None
        ends_at = world.lease.ends_at
        world.run(moment + 3 * timing.ttl, stopped=dead)
        assert world.leader() is not dead
        from_death.append(world.leaders[-1][0] - moment)
        from_end.append(world.leaders[-1][0] - ends_at)
    return from_death, from_end


@each_ttl
def test_a_dead_leader_is_succeeded_within_the_bounds_of_the_page(timing: Timing) -> None:
    bounds = {
        True: tables.succeeded_with_hints(timing) - timing.ttl,
        False: tables.succeeded_by_polls(timing) - timing.ttl,
    }
    for hints, most in bounds.items():
        from_death, from_end = successions(timing, hints=hints, tells=hints)
        assert tables.succeeded_first(timing) <= min(from_death)
        assert most / 2 < max(from_end) <= most + SECOND


@each_ttl
@pytest.mark.parametrize("hints", [True, False])
def test_a_leader_that_resigns_is_succeeded_within_the_bounds_of_the_page(timing: Timing, hints: bool) -> None:
    waits = []
    for seed, moment in moments(timing):
        world = World(timing, seed, hints=hints, tells=hints)
        world.run(moment)
        old = world.leader()
        world.feed(old, election.Resign())
        world.run(moment + timing.ttl)
        assert world.leaders[1][1] is not old
        waits.append(world.leaders[1][0] - moment)
    assert max(waits) <= (0.0 if hints else tables.handed_over_by_polls(timing)) + SECOND


Fault = Literal["silent", "refusing", "blocked"]


def endings(timing: Timing, lasts: float, fault: Fault) -> list[list[str]]:
    """Return why terms ended, for faults of this length at different moments."""
    found = []
    for seed, moment in moments(timing):
        outage = Outage(moment, lasts)
        if fault == "blocked":
            world = World(timing, seed, blocked=outage)
        else:
            world = World(timing, seed, silent=outage, refuses=fault == "refusing")
        world.run(moment + lasts + 2 * timing.ttl)
        found.append(world.endings)
    return found


@each_ttl
@pytest.mark.parametrize("fault", get_args(Fault))
def test_a_term_survives_an_outage_of_the_length_on_the_page(timing: Timing, fault: Fault) -> None:
    assert not any(endings(timing, tables.survived_outage(timing) - SECOND, fault))
    longer = endings(timing, timing.work_window, fault)
    assert all(reasons and reasons[0] in ("unanswered", "stalled") for reasons in longer)


@each_ttl
def test_a_term_survives_a_pause_of_the_length_on_the_page(timing: Timing) -> None:
    def lost(lasts: float) -> list[bool]:
        found = []
        for seed, moment in moments(timing):
            world = World(timing, seed)
            world.run(moment)
            paused = world.leader()
            world.run(moment + lasts, stopped=paused)
            world.run(moment + lasts + timing.ttl)
            found.append(bool(world.endings) or len(world.leaders) > 1)
        return found

    assert not any(lost(tables.survived_pause(timing) - SECOND))
    assert all(lost(timing.ttl + timing.retry_every))


@each_ttl
def test_a_store_that_is_back_has_a_leader_within_the_bound_of_the_page(timing: Timing) -> None:
    for seed, moment in moments(timing):
        away = Outage(moment, 3 * timing.ttl)
        world = World(timing, seed, silent=away)
        world.run(moment + away.lasts + timing.ttl)
        assert world.leaders[-1][0] - (moment + away.lasts) <= tables.back_after_outage(timing) + SECOND


@each_ttl
def test_work_that_hangs_is_succeeded_within_the_bound_of_the_page(timing: Timing) -> None:
    """With ``stall_after``, renewals are withheld so long after the last beat; this work obeys its cancellation."""
    stall_after = timing.ttl / 2
    for seed, beat in moments(timing):
        world = World(timing, seed, blocked=Outage(beat + stall_after, 10 * timing.ttl))
        world.run(beat)
        old = world.leader()
        world.run(beat + 3 * timing.ttl)
        next_at = next(at for at, machine in world.leaders if machine is not old)
        assert next_at - beat <= stall_after + timing.work_window + SECOND
        assert world.endings[0] == "stalled"


# --- what else the page says in numbers -------------------------------------------------------------------------------


def test_times_to_stop_are_those_of_the_examples() -> None:
    yaml = pytest.importorskip("yaml")
    shown = {row[0]: row for row in table(PAGE, "Process", "On SIGTERM")}
    for process, folder in (("`tenure run`", "kubernetes_service"), ("`tenure lead`", "kubernetes")):
        manifests = yaml.safe_load_all((ROOT / "examples" / folder / "deployment.yaml").read_text())
        [deployment] = [one for one in manifests if one["kind"] == "Deployment"]
        grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert f"[{grace} in the Deployment](../examples/{folder}/deployment.yaml)" in shown[process][3]
    unit = (ROOT / "examples" / "systemd" / "shop-worker.service").read_text()
    [stop] = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert f"[{stop} in the unit]" in shown["`tenure run`"][3]
    [prevented] = re.findall(r"^RestartPreventExitStatus=(.+)$", unit, re.MULTILINE)
    assert f"`RestartPreventExitStatus={prevented}`" in text_of(PAGE)
    [consume] = [row for name, row in shown.items() if "consume" in name]
    drained = ConsumeSettings().grace + 2 * Timing(30.0).grace
    assert f"`grace` ({ConsumeSettings().grace:g})" in consume[2]
    assert drained < float(consume[3])


def test_the_defaults_in_the_text_are_those_of_the_program() -> None:
    text = text_of(PAGE)
    assert ConsumeSettings().max_hold == 3600.0
    assert "`max_hold` (an hour)" in text
    assert f"`poll_every` ({ConsumeSettings().poll_every:g} s)" in text
    assert "`ttl − drift·ttl − margin`" in text
    timing = Timing()
    assert tables.survived_outage(timing) == pytest.approx(
        timing.ttl - timing.drift * timing.ttl - timing.margin - timing.grace - timing.renew_every - timing.retry_every
    )


# --- alerts -----------------------------------------------------------------------------------------------------------

FUNCTIONS = {"absent", "histogram_quantile", "increase", "max", "max_over_time", "rate", "sum"}
WORDS = {"by", "on", "unless", "or", "offset"}
STANDARD = {"instance", "job", "le"}


def rules() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    groups = yaml.safe_load((ROOT / "examples" / "prometheus" / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_the_table_of_alerts_equals_the_file() -> None:
    written = []
    for rule in rules():
        severity = rule["labels"]["severity"]
        written.append((rule["alert"], f"{severity}, for {rule['for']}" if "for" in rule else severity, rule["expr"]))
    assert [(row[0], row[1], code(row[2])[0]) for row in table(PAGE, "Alert", "Severity")] == written


def shown_metrics() -> dict[str, set[str]]:
    """Return the names of all series that are scraped, with their labels."""
    found: dict[str, set[str]] = {}
    for name, family in FAMILIES.items():
        suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_count", "_sum"]}[family.kind]
        found |= {f"{name}{suffix}": set(family.labels) for suffix in suffixes}
    return found


def labels_in(expression: str) -> set[str]:
    """Return the labels that an expression selects or groups by."""
    grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
    selected = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression)
    return {one.strip() for group in grouped for one in group.split(",")} | set(selected)


def expressions() -> list[str]:
    """Return the expressions of the file, and those in the text of the page."""
    return [*(rule["expr"] for rule in rules()), *re.findall(r"`(absent\(tenure_.*?)`", text_of(PAGE))]


@pytest.mark.parametrize("expression", expressions())
def test_each_metric_and_label_of_an_alert_exists(expression: str) -> None:
    bare = re.sub(r'"[^"]*"', '""', expression)
    names = set(re.findall(r"\btenure_\w+", bare))
    metrics = shown_metrics()
    assert names
    assert names <= set(metrics)
    others = set(re.findall(r"\b[a-z_]+\b", re.sub(r"\[\w+\]|offset \w+", "", bare))) - names
    assert others - labels_in(expression) <= FUNCTIONS | WORDS, "a misspelt metric or function"
    common = set.intersection(*(metrics[name] for name in names))
    assert labels_in(expression) - STANDARD <= common


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_selects_values_that_its_labels_have(rule: dict[str, Any]) -> None:
    for values in re.findall(r'reason=~"([^"]*)"', rule["expr"]):
        assert set(values.split("|")) <= set(get_args(Reason))
    used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert used <= labels_in(rule["expr"])


def test_a_metric_that_matters_at_night_has_an_alert() -> None:
    text = " ".join(expressions())
    families = {
        name for name in FAMILIES if re.search(r"overr|dead|lost|skipped|oldest|unanswered|crashed|leader", name)
    }
    assert [name for name in families if name not in text] == []


def test_what_the_page_says_of_series_holds() -> None:
    metrics = Metrics()
    metrics.event(StandingBy(0.0, "shop", "a#1", "b", 1))
    assert metrics.snapshot() == {("tenure_leader", ("shop",)): 0.0}
    metrics.event(TermBegan(0.0, "shop", "a#1", 2))
    assert metrics.snapshot() == {("tenure_terms", ("shop",)): 1.0, ("tenure_leader", ("shop",)): 1.0}
    metrics.event(TermEnded(0.0, "shop", "a#1", 2, "stopped", True))
    assert metrics.snapshot()["tenure_leader", ("shop",)] == 0.0
    [expression] = [rule["expr"] for rule in rules() if rule["alert"] == "TenureTwoLeaders"]
    [left_out] = re.findall(r'name!~"([^"]+)"', expression)
    for shared in (election_label("orders.partition-3"), election_label("orders.member-0"), OTHER):
        assert re.fullmatch(left_out, shared)
    assert not re.fullmatch(left_out, "nightly-report")


def test_links_lead_somewhere() -> None:
    assert broken_links(PAGE) == []
