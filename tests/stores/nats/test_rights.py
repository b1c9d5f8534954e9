"""The users that docs/nats.md gives least rights: what each may do works, and what it may not is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

pytest.importorskip("nats")

from nats.aio.client import Client as Driver

import tenure
from tenure._backends import nats
from tenure._backends.nats.address import Options
from tenure._url import Url
from tests.docs.pages import commands
from tests.durations import until
from tests.servers import Nats, patient, private
from tests.stores.rights import Act, acting, lead, refused


class WithRoles(Nats):
    """A server that has the users of the page."""

    def configure(self) -> None:
        super().configure()
        settings = json.loads((self.folder / "nats.conf").read_text())
        own = "\n".join(f"{name}: {json.dumps(value)}" for name, value in settings.items())
        self.write("nats.conf", f"{own}\n{commands('docs/nats.md', 'Rights', 'authorization')}")


def url_of(server: Nats, user: str) -> str:
    own = "" if user == "owner" else f"?inbox=_INBOX_{user}"
    return f"nats://{user}:{user}-password@127.0.0.1:{server.port}/{own}"


@pytest.fixture(scope="module")
def server() -> Iterator[Nats]:
    """Yield a server with the users of the page, two queues, and a name that was led."""

    async def prepare(own: Nats) -> None:
        async with acting(url_of(own, "owner")) as owner:
            await owner.queue("orders").send(b"first")
            await owner.queue("others").send(b"x")
            [message] = await owner.queue("orders").receive()
            await message.dead_letter("bad")
            await lead(owner, "led")

    with private(WithRoles) as own:
        asyncio.run(prepare(own))
        yield own


async def test_a_candidate_leads_and_gets_hints(server: Nats) -> None:
    async with acting(url_of(server, "candidate")) as backend:
        tokens = [await lead(backend, "job"), await lead(backend, "job")]
        assert tokens[0] < tokens[1]
        assert "led" in await backend.leaders()
        assert not await backend.election("job").ask_to_resign()
    opened = nats.open(Url.parse(patient(url_of(server, "candidate"))))
    await anext(opened.leases.hints("job"))
    assert opened.leases.traits.hints
    await opened.close()


async def test_a_producer_sends(server: Nats) -> None:
    async with acting(url_of(server, "producer")) as backend:
        queue = backend.queue("orders")
        assert await queue.send(b"second", id="second", delay=3600)
        assert len(await queue.send_batch([tenure.Outgoing(b"third"), tenure.Outgoing(b"fourth")])) == 2


async def test_a_consumer_receives_and_settles_in_every_way(server: Nats) -> None:
    async with acting(url_of(server, "owner")) as owner:
        await owner.queue("orders").send_batch([tenure.Outgoing(b"%d" % number) for number in range(5)])
    async with acting(url_of(server, "consumer")) as backend:
        queue = backend.queue("orders")
        [one, two, three, *rest] = await queue.receive(max=9)
        await one.complete()
        await two.abandon()
        await three.dead_letter("bad")
        for message in rest:
            await message.renew()
            await message.complete()
        following = await queue.receive(max=9)
        assert [one.delivery_count for one in following if one.body == two.body] == [2]
        for message in following:
            await message.complete()
        assert (await queue.stats()).dead


async def test_an_observer_sees_leaders_names_and_settings(server: Nats) -> None:
    async with acting(url_of(server, "observer")) as backend:
        assert "led" in await backend.leaders()
        assert await backend.queues() == ["orders", "others"]
        assert (await backend.queue("orders").settings()).lock


REFUSED: dict[str, tuple[str, Act]] = {
    "a candidate sends": ("candidate", lambda backend: backend.queue("orders").send(b"x")),
    "a candidate receives": ("candidate", lambda backend: backend.queue("orders").receive()),
    "a producer receives": ("producer", lambda backend: backend.queue("orders").receive()),
    "a producer peeks": ("producer", lambda backend: backend.queue("orders").peek()),
    "a producer sends elsewhere": ("producer", lambda backend: backend.queue("others").send(b"x")),
    "a producer leads": ("producer", lambda backend: lead(backend, "led")),
    "a producer declares": ("producer", lambda backend: backend.queue("orders").declare(lock=99)),
    "a consumer receives elsewhere": ("consumer", lambda backend: backend.queue("others").receive()),
    "a consumer sends elsewhere": ("consumer", lambda backend: backend.queue("others").send(b"x")),
    "an observer counts": ("observer", lambda backend: backend.queue("orders").stats()),
    "a consumer declares": ("consumer", lambda backend: backend.queue("orders").declare(lock=99)),
    "a consumer purges dead letters": ("consumer", lambda backend: backend.queue("orders").dead_letters.purge()),
    "a consumer leads": ("consumer", lambda backend: lead(backend, "led")),
    "an observer leads": ("observer", lambda backend: lead(backend, "led")),
    "an observer sends": ("observer", lambda backend: backend.queue("orders").send(b"x")),
    "an observer receives": ("observer", lambda backend: backend.queue("orders").receive()),
    "an observer declares": ("observer", lambda backend: backend.queue("orders").declare(lock=99)),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_all_else_is_refused_by_the_subject(server: Nats, what: str) -> None:
    user, act = REFUSED[what]
    async with acting(url_of(server, user)) as backend:
        await refused(backend, act, "does not permit this user", "permissions violation")


async def test_no_user_reads_the_answers_to_another(server: Nats) -> None:
    violations: list[str] = []

    async def note(error: Exception) -> None:
        violations.append(str(error).lower())

    driver = Driver()
    await driver.connect(f"nats://producer:producer-password@127.0.0.1:{server.port}", error_cb=note)
    try:
        for subject in ("_INBOX.>", "_INBOX_consumer.>", ">"):
            await driver.subscribe(subject)
        await until(lambda: len(violations) == 3)
    finally:
        await driver.close()
    assert all("permissions violation for subscription" in one for one in violations)


@pytest.mark.parametrize("inbox", ["", "a.b", "a*", ">", "a b", "x" * 91])
def test_an_inbox_is_one_word(inbox: str) -> None:
    with pytest.raises(tenure.ConfigError, match="inbox must be one word"):
        Url.parse(f"nats://127.0.0.1/?inbox={inbox}").options(Options)
