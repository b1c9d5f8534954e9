"""The page of errors: a section for each error, exit code, failure, reason and warning; its messages and commands."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

import tenure
from scripts import errors_page
from tenure import errors, events
from tenure._backends.nats.message_format import HEADERS_TOO_LONG
from tenure._backends.sqlite.client import DiskFullError
from tenure._cli import codes
from tenure._cli.exits import Exit
from tenure._cli.explanations import Section, code_of, sections
from tenure._cli.group import group
from tenure._cli.work_run import UNFIT_VARIABLE
from tenure._opened import Fact
from tenure._queue.message import EXPIRED, MAX_DELIVERIES, UNDECODABLE
from tenure._queue.requests import REQUEST_ENDED

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tenure"
PAGE = ROOT / "docs" / "errors.md"

NO_FAILURES = {
    "BrokerAnswered",
    "GivenBack",
    "ReleasedUnused",
    "Renewed",
    "SlotSent",
    "StandingBy",
    "TermBegan",
    "TermEnding",
}
"""Events without a section: they report no failure, or a part of one that has its own event."""

LABELS = ["Cause", "Do now", "Meanwhile", "More"]


@cache
def files() -> list[Path]:
    """Return the files of the library, without the parts for tests and demonstrations."""
    return [one for one in SOURCE.rglob("*.py") if not {"testing", "_demo"} & set(one.relative_to(SOURCE).parts)]


@cache
def module(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


# --- owners ----------------------------------------------------------------------------------------------------------


def error_classes() -> list[type[errors.TenureError]]:
    return [getattr(errors, name) for name in errors.__all__] + [DiskFullError]


def event_names() -> list[str]:
    kinds = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, events.Event)]
    return [kind.__name__ for kind in kinds if kind not in (events.Event, events.MessageEvent)]


def advices(name: str, tree: ast.AST) -> Iterator[tuple[ast.Call, ast.AST]]:
    """Yield each call of *name*, a fact or an advice, with the innermost function that it stands in."""
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in inside(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                    yield node, function


def inside(function: ast.AST) -> Iterator[ast.AST]:
    """Yield what is in a function, without the functions in it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
            yield from inside(child)


def codes_of(call: ast.Call, function: ast.AST, place: int) -> set[str] | None:
    """Return the codes that a call may give at *place*; an empty set for that of an error; None if it gives none."""
    if len(call.args) <= place:
        return None
    given = call.args[place]
    if isinstance(given, ast.Constant) and isinstance(given.value, str):
        return {given.value}
    if isinstance(given, ast.Attribute) and given.attr == "code":
        return set()
    assert isinstance(given, ast.Name), ast.unparse(call)
    found: set[str] = set()
    for node in inside(function):
        match node:
            case ast.Assign([ast.Name(name)], ast.Constant(str(value))) if name == given.id:
                found.add(value)
    return found


@cache
def advising() -> list[Path]:
    """Return the files with facts or advice."""
    return [file for file in files() if re.search(r"\b(Fact|Advice)\(", file.read_text(encoding="utf-8"))]


@cache
def warnings() -> dict[str, set[str]]:
    """Return the codes of all warnings, with what they are about, as the source has them."""
    found: dict[str, set[str]] = {}
    for file in advising():
        tree = module(file)
        calls = [(one, function, 3) for one, function in advices("Fact", tree)]
        calls += [(one, function, 2) for one, function in advices("Advice", tree)]
        for call, function, place in calls:
            for code in codes_of(call, function, place) or ():
                found.setdefault(code, set()).add(subject(call.args[0]))
    found.pop("", None)
    return found


def subject(node: ast.expr) -> str:
    """Return a pattern for what a warning is about."""
    if isinstance(node, ast.Constant):
        return re.escape(str(node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(re.escape(str(one.value)) if isinstance(one, ast.Constant) else ".+" for one in node.values)
    return ".+"


def owned() -> set[str]:
    """Return every code that must have a section."""
    return {
        *(kind.code for kind in error_classes()),
        *(f"exit-{int(code)}" for code in (*Exit, codes.REJECT)),
        *(code_of(name) for name in event_names() if name not in NO_FAILURES),
        *map(code_of, (MAX_DELIVERIES, EXPIRED, UNDECODABLE, REQUEST_ENDED, UNFIT_VARIABLE, HEADERS_TOO_LONG)),
        *warnings(),
    }


def test_each_error_has_a_code_of_its_own() -> None:
    kinds = error_classes()
    assert all("code" in vars(kind) for kind in kinds)
    assert len({kind.code for kind in kinds}) == len(kinds)
    public = [getattr(tenure, name) for name in tenure.__all__ if isinstance(getattr(tenure, name), type)]
    assert {kind for kind in public if issubclass(kind, errors.TenureError)} <= set(kinds)


def test_the_codes_of_errors_stay_the_same() -> None:
    assert [kind.code for kind in error_classes()] == [
        *("not-installed", "config", "decode", "lock-lost", "message-refused", "queue-not-empty", "tenure-error"),
        *("term-lost", "timed-out", "unavailable", "sqlite-disk-full"),
    ]


def test_each_code_has_a_section_and_each_section_an_owner() -> None:
    assert owned() - set(sections()) == set(), "write a section in src/tenure/_cli/errors.md"
    assert set(sections()) - owned() == set(), "nothing has this code any more"


def test_each_event_is_a_failure_or_known_to_be_none() -> None:
    assert set(event_names()) >= NO_FAILURES


@pytest.mark.parametrize("file", advising(), ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_fact_with_advice_names_a_code(file: Path) -> None:
    for call, function in advices("Fact", module(file)):
        assert not call.keywords, ast.unparse(call)
        if len(call.args) > 2:
            assert codes_of(call, function, 3) is not None, f"give a code to {ast.unparse(call)}"
    for call, function in advices("Advice", module(file)):
        assert codes_of(call, function, 2) is not None, ast.unparse(call)


# --- the form of the page --------------------------------------------------------------------------------------------


def test_the_page_is_the_copy_of_the_packaged_one() -> None:
    assert errors_page.main(["--check"]) == 0


def test_a_copy_that_differs_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = errors_page.ROOT / "docs" / "none-of-this-name.md"
    monkeypatch.setattr(errors_page, "PAGE", page)
    assert errors_page.main(["--check"]) == 1
    assert "run: python scripts/errors_page.py" in capsys.readouterr().out
    monkeypatch.setattr(errors_page, "PAGE", tmp_path / "errors.md")
    assert errors_page.main([]) == 0
    assert (tmp_path / "errors.md").read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


def test_each_code_is_an_anchor_once() -> None:
    headings = re.findall(r"^#+ (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len({slug(one) for one in headings}) == len(headings)
    for code in sections():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code)
        assert slug(f"`{code}`") == code
        assert f"`{code}`" in headings


@pytest.mark.parametrize("section", sections().values(), ids=sections())
def test_a_section_says_everything_in_its_order(section: Section) -> None:
    assert re.findall(r"^\*\*([\w ]+):\*\* \S", section.text, re.MULTILINE) == LABELS
    summary, block = section.text.split("\n\n")[:2]
    assert summary.endswith(".")
    assert block.startswith("```text\n")


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_its_links_have_their_targets() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        file, _, anchor = target.partition("#")
        page = PAGE.parent / file if file else PAGE
        assert page.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), target


def test_its_lines_are_short() -> None:
    assert [line for line in PAGE.read_text(encoding="utf-8").splitlines() if len(line) > 120] == []


# --- the messages that it quotes -------------------------------------------------------------------------------------


def quotes(section: Section) -> list[str]:
    """Return the messages in the blocks of a section, each in one line."""
    blocks = re.findall(r"^```text\n(.*?)^```$", section.text, re.MULTILINE | re.DOTALL)
    return [re.sub(r"\n  ", " ", line) for block in blocks for line in re.split(r"\n(?!  )", block.rstrip())]


@cache
def templates() -> list[tuple[str, list[str]]]:
    """Return the constant parts of each text in the source, the longest first: a message without its values."""
    found: list[list[str]] = []
    for tree in map(module, files()):
        inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) for part in node.values if isinstance(part, ast.Constant)]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
                parts = node.value.split("%s")
            else:
                continue
            found.append([part for part in parts if part.strip()])
    return [(max(parts, key=len), parts) for parts in found if sum(map(len, parts)) >= 5]


def unexplained(line: str) -> str:
    """Return *line* with what the texts of the source say of it removed."""
    known = bytearray(len(line))
    for longest, parts in templates():
        if (
            longest in line
            and all(part in line for part in parts)
            and (found := re.search(".*?".join(f"({re.escape(part)})" for part in parts), line))
        ):
            for number in range(1, len(parts) + 1):
                known[found.start(number) : found.end(number)] = b"\1" * (found.end(number) - found.start(number))
    return "".join(letter for letter, is_known in zip(line, known, strict=True) if not is_known)


@pytest.mark.parametrize("section", sections().values(), ids=sections())
def test_its_messages_are_those_of_the_source(section: Section) -> None:
    for line in quotes(section):
        text = re.sub(r"^tenure: (error: |warning: )?|^! [^:]+: | \[[a-z-]+\]$", "", line)
        if section.code == "tenure-error":
            assert text == f"{errors.TenureError.__module__}.{errors.TenureError.__qualname__}"
            continue
        rest = unexplained(text)
        assert len(rest) <= 0.5 * len(text), f"no message of the source is like this: {line!r}; left: {rest!r}"


def test_a_message_that_was_changed_is_found() -> None:
    [line] = quotes(sections()["nats-no-subscribe"])
    text = line.partition(": ")[2].rpartition(" [")[0]
    assert len(unexplained(text)) <= 0.5 * len(text)
    changed = text.replace("this user may not", "nobody is allowed to")
    assert len(unexplained(changed)) > 0.5 * len(changed)


def test_each_warning_is_quoted_as_doctor_prints_it() -> None:
    quoted = [(code, about, line) for code, about in warnings().items() for line in quotes(sections()[code])]
    assert {code for code, _, _ in quoted} == set(warnings())
    for code, about, line in quoted:
        named = re.fullmatch(r"! ([^:]+(?::\d+)?): .+ \[([a-z-]+)\]", line)
        assert named is not None, line
        assert named[2] == code
        assert any(re.fullmatch(pattern, named[1]) for pattern in about), (named[1], about)


def facts() -> Iterator[Fact]:
    """Yield facts that stores would give in these states, of those whose functions need no server."""
    pytest.importorskip("redis")
    pytest.importorskip("nats")
    pytest.importorskip("aiohttp")
    pytest.importorskip("aiormq")
    from tenure._backends.etcd import diagnosis as etcd
    from tenure._backends.nats import diagnosis as nats
    from tenure._backends.redis import diagnosis as redis

    cache_like = {"maxmemory": "100", "maxmemory-policy": "allkeys-lru"}
    for used in (10, 95, 100):
        yield from redis._memory(cache_like, {"used_memory": used})
    for policy in ("no", "everysec", "always"):
        yield redis._durability({"appendonly": "yes", "appendfsync": policy})
    yield redis._durability({"appendonly": "no"})
    yield redis._version({"redis_version": "6.2.1"})
    yield redis._role({"role": "slave"})
    yield redis._role({"role": "master", "connected_slaves": 2})
    yield from redis._persistence_errors({"aof_last_write_status": "err"})
    for version in ("3.3.0", "3.4.10", "3.5.28"):
        yield from etcd._versions([version])
    for number in ((2, 9, 10), (2, 12, 8), (2, 14, 0)):
        yield nats._versions([number], 3)
    for config in ({"storage": "memory"}, {"max_age": 60_000_000_000}, {"max_bytes": 1}):
        yield Fact("leases", "", "; ".join(nats._wrong(config)), "nats-lease-bucket")
    yield nats._rollup([{"name": "KV_tenure-leases", "allow_rollup_hdrs": True}])


def test_what_diagnoses_say_is_on_the_page_word_by_word() -> None:
    seen = set()
    for fact in facts():
        if not fact.advice:
            continue
        seen.add(fact.code)
        quoted = quotes(sections()[fact.code])
        known = [line.partition(": ")[2].rpartition(" [")[0] for line in quoted]
        assert any(one in fact.advice for one in known), (fact.advice, known)
    assert len(seen) == 13


# --- its commands ----------------------------------------------------------------------------------------------------


def commands() -> list[tuple[str, str]]:
    blocks = [(one.code, block) for one in sections().values()
              for block in re.findall(r"^```sh\n(.*?)^```$", one.text, re.MULTILINE | re.DOTALL)]  # fmt: skip
    return [(code, line) for code, block in blocks for line in block.splitlines()]


@pytest.mark.parametrize(("code", "line"), commands(), ids=[f"{code}: {line}" for code, line in commands()])
def test_its_commands_exist_with_these_options(code: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENURE_URL", "sqlite:///work.db")
    program, *arguments = shlex.split(line)
    assert program == "tenure"
    if arguments in (["--help"], ["--version"]):
        return
    context = group.make_context("tenure", arguments)
    command: click.Command = group
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        command, context = found, found.make_context(name, rest, parent=context)
