"""The key of a fleet is replaced while its members run, in three steps, at different times."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure import testing
from tenure._backends.peers.address import Settings
from tenure._backends.peers.keys import KEYS_MAX, KeyFile, KeysOfFleet, keys_in
from tenure._backends.peers.seal import SharedKey
from tenure._backends.peers.tcp import TcpTransport
from tenure._opened import Fact
from tenure._url import Url
from tenure.errors import ConfigError
from tests.durations import stretched, until
from tests.servers.process import free_port

OLD, NEW = "old" * 8, "new" * 8
STEPS = ([OLD], [OLD, NEW], [NEW, OLD], [NEW])
"""What the file of a member has, before and after each step."""
TOO_MANY = [f"{NEW}{number}" for number in range(KEYS_MAX + 1)]
MEMBERS = 3


def write(path: Path, keys: list[str]) -> None:
    new = path.with_suffix(".new")
    new.write_text("".join(f"{key}\n" for key in keys))
    new.chmod(0o600)
    new.rename(path)


class Fleet:
    """Members with a key file each. The first one leads."""

    def __init__(self, members: list[tenure.Backend], files: list[Path], term: tenure.Term) -> None:
        self.members = members
        self.files = files
        self.term = term

    def put(self, step: int, *numbers: int) -> None:
        """Let the files of some members be as after a step; of all, if none is named."""
        for number in numbers or range(MEMBERS):
            write(self.files[number], STEPS[step])

    def transport(self, number: int) -> TcpTransport:
        opened: Any = self.members[number]._connection.opened
        transport = opened.member._transport
        assert isinstance(transport, TcpTransport)
        return transport

    def sealed_with(self, number: int) -> set[bytes]:
        return {key.key for key in self.transport(number)._sealed.values()}

    def accepted_by(self, number: int) -> list[bytes]:
        return [key.key for key in self.transport(number)._secret.latest()]

    def reconnect(self) -> None:
        """Break every connection of every member."""
        for number in range(MEMBERS):
            for writer in list(self.transport(number)._sealed):
                writer.transport.abort()

    async def until_all_see_the_leader(self) -> None:
        async def all_see_it() -> bool:
            try:
                seen = [await one.election("chair").leader() for one in self.members]
            except tenure.Unavailable:  # as long as it has not dialled the others again
                return False
            return all(one is not None and one.token == self.term.token for one in seen)

        await until(all_see_it)
        self.term.check()


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[Fleet]:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(MEMBERS)]
    files = [folder / f"key {number}" for number in range(MEMBERS)]
    for file in files:
        write(file, STEPS[0])
    urls = [
        f"peers://{','.join(addresses)}?me={me}&ttl_max=60&heartbeat=0.2&key_file={file}"
        for me, file in zip(addresses, files, strict=True)
    ]
    async with AsyncExitStack() as stack:
        members = [await stack.enter_async_context(tenure.connect(url)) for url in urls]
        await asyncio.gather(*(member.leaders() for member in members))
        term = await stack.enter_async_context(members[0].election("chair", ttl=60).campaign())
        yield Fleet(members, files, term)


async def replace_in_three_steps(folder: Path) -> None:
    """One member is a step behind at a time, and all connections are made anew then."""
    async with fleet(folder) as one:
        old = one.accepted_by(0)
        for step in (1, 2, 3):
            for number in range(MEMBERS):
                one.put(step, number)
                one.reconnect()
                await one.until_all_see_the_leader()
        new = {key for number in range(MEMBERS) for key in one.accepted_by(number)}
        assert len(new) == 1
        assert [*new] != old
        assert all(one.sealed_with(number) <= new for number in range(MEMBERS))
        assert all("forged" not in one.transport(number).counts.dropped for number in range(MEMBERS))


async def test_a_term_is_kept_while_the_key_is_replaced_in_three_steps(tmp_path: Path) -> None:
    await replace_in_three_steps(tmp_path)


async def test_a_connection_ends_when_its_key_is_left_out(tmp_path: Path) -> None:
    """Nobody breaks it; so who has stolen the old key can't go on with it."""
    async with fleet(tmp_path) as one:
        await one.until_all_see_the_leader()
        for step in (1, 2):
            one.put(step)
            await one.until_all_see_the_leader()
        old = one.accepted_by(1)[1]
        assert old in one.sealed_with(1)
        one.put(3)
        await until(lambda: not any(old in one.sealed_with(number) for number in range(MEMBERS)))
        await one.until_all_see_the_leader()


async def test_a_member_that_has_only_the_old_key_is_refused_and_says_so(tmp_path: Path) -> None:
    async with fleet(tmp_path) as one:
        for step in (1, 2, 3):
            one.put(step, 0, 1)
            if step < 3:
                one.put(step - 1, 2)
        one.put(0, 2)

        async def is_refused() -> bool:
            try:
                await one.members[2].election("chair").leader()
            except tenure.Unavailable as error:
                return "refused this member: compare key, member list" in str(error)
            return False

        await until(is_refused)
        one.term.check()
        write(one.files[2], STEPS[3])
        await one.until_all_see_the_leader()


def read_once(file: KeyFile) -> tuple[bytes, ...]:
    return file._keys


async def never(_: TcpTransport) -> None:
    """End no connection."""


def first_only(keys: KeysOfFleet) -> tuple[SharedKey, ...]:
    return (SharedKey.of(keys._file.latest()[0], keys._terms),)


@pytest.mark.parametrize(
    ("where", "name", "plant", "test"),
    [
        (KeyFile, "latest", read_once, replace_in_three_steps),
        (KeysOfFleet, "latest", first_only, replace_in_three_steps),
        (TcpTransport, "_end_sealed_with_old_keys", never, test_a_connection_ends_when_its_key_is_left_out),
    ],
    ids=["reads its file once", "accepts the first key only", "leaves connections alone"],
)
async def test_a_planted_member_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, plant: Any, test: Callable[[Path], Any]
) -> None:
    monkeypatch.setattr(where, name, plant)
    monkeypatch.setattr(f"{__name__}.until", soon)
    with pytest.raises(AssertionError):
        await test(tmp_path)


async def soon(condition: Callable[[], Any]) -> None:
    """As ``until``, for what a planted bug prevents."""
    await testing.until(condition, within=stretched(2.0))


async def test_a_file_that_can_not_be_used_is_reported_once_and_its_keys_are_used(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write(path, [OLD, NEW])
    file, facts = KeyFile(str(path), path.read_bytes()), list[Fact]()
    file.report_to(facts.append)
    both = (OLD.encode(), NEW.encode())
    changes: list[tuple[Callable[[], None], str]] = [
        (lambda: path.unlink(), "it can't be read: No such file or directory"),
        (lambda: write(path, ["short"]), "it must hold at least 16 bytes, not 5"),
        (lambda: write(path, [NEW, "short"]), "it must hold at least 16 bytes in each line, and key 2 has 5"),
        (
            lambda: write(path, [f"{NEW}{one}" for one in range(KEYS_MAX + 1)]),
            "at most 4 keys, one in each line, not 5",
        ),
        (lambda: os.truncate(path, 0), "it must hold at least 16 bytes, not 0"),
    ]
    for change, says in changes:
        change()
        assert file.latest() == file.latest() == both
        assert len(facts) == 1
        assert facts[0].code == "peers-key-not-renewed"
        assert says in facts.pop().value
        write(path, [OLD, NEW])
        assert file.latest() == both
    write(path, [NEW])
    assert file.latest() == (NEW.encode(),)
    assert not facts


def test_keys_of_a_file() -> None:
    assert keys_in(f" {OLD} \n".encode()) == (OLD.encode(),)
    assert keys_in(f"{OLD}\r\n\r\n{NEW}\n{OLD}\n".encode()) == (OLD.encode(), NEW.encode())
    raw = bytes(range(32))  # has a line end, and is no text: one key, as `openssl rand 32` makes it
    assert keys_in(raw + b"\xff") == (raw.strip() + b"\xff",)


def test_a_file_with_too_many_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write(path, TOO_MANY)
    with pytest.raises(ConfigError, match="the key file must hold at most 4 keys, one in each line, not 5; make one"):
        Settings.of(Url.parse(f"peers://a:1,b:1,c:1?key_file={path}"))
