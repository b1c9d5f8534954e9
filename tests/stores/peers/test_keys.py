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
from tenure._backends.peers.keys import BYTES_MAX, KEYS_MAX, KeyFile, KeysOfFleet, keys_in
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
    new.write_text("\n".join(f"{key}\n" for key in keys))
    new.chmod(0o600)
    new.rename(path)


class Fleet:
    """Members with a key file each. The first one leads."""

    def __init__(self, members: list[tenure.Backend], files: list[Path], term: tenure.Term) -> None:
        self.members = members
        self.files = files
        self.term = term

    async def put(self, step: int, *numbers: int) -> None:
        """Let the files of some members be as after a step; of all, if none is named. Return when they use that."""
        for number in numbers or range(MEMBERS):
            write(self.files[number], STEPS[step])
        keys = keys_in(self.files[(numbers or [0])[0]].read_bytes())
        await until(lambda: all(self.key_file(number).keys == keys for number in numbers or range(MEMBERS)))

    def key_file(self, number: int) -> KeyFile:
        secret = self.transport(number)._secret
        assert isinstance(secret, KeysOfFleet)
        return secret._file

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
                await one.put(step, number)
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
            await one.put(step)
            await one.until_all_see_the_leader()
        old = one.accepted_by(1)[1]
        assert old in one.sealed_with(1)
        opened: Any = one.members[1]._connection.opened
        assert "keys: 2 accepted" in [f"{fact.name}: {fact.value}" for fact in await opened.describe()]
        await one.put(3)
        await until(lambda: not any(old in one.sealed_with(number) for number in range(MEMBERS)))
        await one.until_all_see_the_leader()


async def test_a_member_that_has_only_the_old_key_is_refused_and_says_so(tmp_path: Path) -> None:
    async with fleet(tmp_path) as one:
        for step in (1, 2, 3):
            await one.put(step, 0, 1)
            if step < 3:
                await one.put(step - 1, 2)
        await one.put(0, 2)

        async def is_refused() -> bool:
            try:
                await one.members[2].election("chair").leader()
            except tenure.Unavailable as error:
                return "refused this member: compare key, member list" in str(error)
            return False

        await until(is_refused)
        one.term.check()
        await one.put(2, 2)
        await one.until_all_see_the_leader()


async def never(_: KeyFile) -> None:
    """Read the file no more."""


async def look_only(transport: TcpTransport, keys: KeysOfFleet) -> None:
    """End no connection."""
    while True:
        await asyncio.sleep(transport._fleet.heartbeat)
        await keys.look()


def first_only(keys: KeysOfFleet) -> tuple[SharedKey, ...]:
    return (SharedKey.of(keys._file.keys[0], keys._terms),)


@pytest.mark.parametrize(
    ("where", "name", "plant", "test"),
    [
        (KeyFile, "look", never, replace_in_three_steps),
        (KeysOfFleet, "latest", first_only, replace_in_three_steps),
        (TcpTransport, "_follow", look_only, test_a_connection_ends_when_its_key_is_left_out),
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
    both = (OLD.encode(), NEW.encode())
    path.unlink()
    await file.look()
    file.report_to(facts.append)  # a failure before that is told later
    changes: list[tuple[Callable[[], object], str]] = [
        (lambda: None, "it can't be read: No such file or directory"),
        (lambda: write(path, ["short"]), "it must hold at least 16 bytes, not 5"),
        (lambda: write(path, [NEW, "short"]), "it must hold at least 16 bytes for each key, and key 2 has 5"),
        (lambda: write(path, TOO_MANY), "at most 4 keys, with empty lines between them, not 5"),
        (lambda: write(path, [f"\ufeff{OLD}", NEW]), "it must hold ASCII alone, if there are several keys"),
        (lambda: path.write_text("x" * (BYTES_MAX + 1)), "at most 65,536 bytes, not 65,537"),
        (lambda: write(path, ["another" * 4]), "it must hold one of the keys from before, too"),
        (lambda: os.truncate(path, 0), "it must hold at least 16 bytes, not 0"),
    ]
    for change, says in changes:
        change()
        for _ in range(4):
            await file.look()
            assert file.keys == both
        assert len(facts) == 1
        assert facts[0].code == "peers-key-not-renewed"
        assert says in facts.pop().value
        write(path, [OLD, NEW])
        for _ in range(2):
            await file.look()
    assert not facts


async def test_a_file_is_used_when_it_was_found_twice(tmp_path: Path) -> None:
    """It may be half-written."""
    path = tmp_path / "key"
    write(path, [OLD])
    file = KeyFile(str(path), path.read_bytes())
    path.write_text(f"{OLD}\n\n{NEW[:20]}")
    await file.look()
    assert [*file.keys] == [OLD.encode()]
    path.write_text(f"{OLD}\n\n{NEW}")
    await file.look()
    assert [*file.keys] == [OLD.encode()]
    await file.look()
    assert [*file.keys] == [OLD.encode(), NEW.encode()]


def test_keys_of_a_file() -> None:
    old, new = OLD.encode(), NEW.encode()
    assert keys_in(b" " + old + b" \n") == (old,)
    assert keys_in(old + b"\r\n \t\r\n\r\n" + new + b"\n\n" + old + b"\n") == (old, new)
    wrapped = old + b"\n" + new + b"\n"  # as `openssl rand -base64 100` writes one key
    assert keys_in(wrapped) == (wrapped.strip(),)
    raw = bytes(range(0x80, 0x90)) + b"\n\n" + bytes(range(0x80, 0x90))  # as `openssl rand 34` may
    assert keys_in(raw) == (raw,)


def test_a_file_with_too_many_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write(path, TOO_MANY)
    with pytest.raises(ConfigError, match="the key file must hold at most 4 keys, with empty lines between them"):
        Settings.of(Url.parse(f"peers://a:1,b:1,c:1?key_file={path}"))
