"""The users that docs/nats.md gives least rights: what each may do works, and what it may not is refused.

In one account, and each in an account of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest

pytest.importorskip("nats")

from nats.aio.client import Client as Driver
from nats.aio.msg import Msg

import tenure
from tenure._backends import nats
from tenure._backends.nats.address import Options
from tenure._url import Url
from tests.docs.pages import commands
from tests.durations import until
from tests.servers import Nats, patient, private
from tests.stores.rights import TTL, Act, acting, lead, refused


class WithUsers(Nats):
    """A server that has the users of the page, in one account."""

    says: ClassVar = ("does not permit this user", "permissions violation")
    """What is in each refusal."""

    def configure(self) -> None:
        super().configure()
        settings = json.loads((self.folder / "nats.conf").read_text())
        own = "\n".join(f"{name}: {json.dumps(value)}" for name, value in settings.items())
        self.write("nats.conf", f"{own}\n{self.of_page()}")

    def of_page(self) -> str:
        """Return what the page says to put into the configuration."""
        return commands("docs/nats.md", "Rights", "authorization")

    def own(self, user: str) -> str:
        """Return what a URL says of the inboxes of *user*."""
        return "" if user == "owner" else f"?inbox=_INBOX_{user}"


class WithAccounts(WithUsers):
    """A server that has an account of its own for each of them."""

    says = ("this user", "tenure")

    def of_page(self) -> str:
        return commands("docs/nats.md", "Rights", "accounts")

    def own(self, user: str) -> str:
        return ""


def url_of(server: WithUsers, user: str) -> str:
    return f"nats://{user}:{user}-password@127.0.0.1:{server.port}/{server.own(user)}"


async def prepare(server: WithUsers) -> None:
    """Make two queues, and lead a name."""
    async with acting(url_of(server, "owner")) as owner:
        await owner.queue("orders").send(b"first")
        await owner.queue("others").send(b"x")
        [message] = await owner.queue("orders").receive()
        await message.dead_letter("bad")
        await lead(owner, "led")


@pytest.fixture(scope="module", params=[WithUsers, WithAccounts])
def server(request: pytest.FixtureRequest) -> Iterator[WithUsers]:
    """Yield a server with the users of the page, two queues, and a name that was led."""
    with private(request.param) as own:
        asyncio.run(prepare(own))
        yield own


async def test_a_candidate_leads_and_gets_hints(server: WithUsers) -> None:
    async with acting(url_of(server, "candidate")) as backend:
        tokens = [await lead(backend, "job"), await lead(backend, "job")]
        assert tokens[0] < tokens[1]
        assert "led" in await backend.leaders()
        assert not await backend.election("job").ask_to_resign()
    opened = nats.open(Url.parse(patient(url_of(server, "candidate"))))
    await anext(opened.leases.hints("job"))
    assert opened.leases.traits.hints
    await opened.close()


async def test_a_producer_sends(server: WithUsers) -> None:
    async with acting(url_of(server, "producer")) as backend:
        queue = backend.queue("orders")
        assert await queue.send(b"second", id="second", delay=3600)
        assert len(await queue.send_batch([tenure.Outgoing(b"third"), tenure.Outgoing(b"fourth")])) == 2


async def test_a_consumer_receives_and_settles_in_every_way(server: WithUsers) -> None:
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


async def test_an_observer_sees_leaders_names_and_settings(server: WithUsers) -> None:
    async with acting(url_of(server, "observer")) as backend:
        assert "led" in await backend.leaders()
        assert await backend.queues() == ["orders", "others"]
        assert (await backend.queue("orders").settings()).lock


REFUSED: dict[str, tuple[str, Act]] = {
    "a candidate sends": ("candidate", lambda backend: backend.queue("orders").send(b"x")),
    "a candidate receives": ("candidate", lambda backend: backend.queue("orders").receive()),
    "a candidate peeks": ("candidate", lambda backend: backend.queue("orders").peek()),
    "a candidate declares": ("candidate", lambda backend: backend.queue("orders").declare(lock=99)),
    "a producer receives": ("producer", lambda backend: backend.queue("orders").receive()),
    "a producer peeks": ("producer", lambda backend: backend.queue("orders").peek()),
    "a producer purges": ("producer", lambda backend: backend.queue("orders").purge()),
    "a producer sends elsewhere": ("producer", lambda backend: backend.queue("others").send(b"x")),
    "a producer leads": ("producer", lambda backend: lead(backend, "led")),
    "a producer declares": ("producer", lambda backend: backend.queue("orders").declare(lock=99)),
    "a consumer receives elsewhere": ("consumer", lambda backend: backend.queue("others").receive()),
    "a consumer sends elsewhere": ("consumer", lambda backend: backend.queue("others").send(b"x")),
    "an observer counts": ("observer", lambda backend: backend.queue("orders").stats()),
    "a consumer declares": ("consumer", lambda backend: backend.queue("orders").declare(lock=99)),
    "a consumer purges dead letters": ("consumer", lambda backend: backend.queue("orders").dead_letters.purge()),
    "a consumer leads": ("consumer", lambda backend: lead(backend, "led")),
    "a consumer reads dead letters": ("consumer", lambda backend: backend.queue("orders").dead_letters.peek()),
    "an observer leads": ("observer", lambda backend: lead(backend, "led")),
    "an observer sends": ("observer", lambda backend: backend.queue("orders").send(b"x")),
    "an observer receives": ("observer", lambda backend: backend.queue("orders").receive()),
    "an observer purges": ("observer", lambda backend: backend.queue("orders").purge()),
    "an observer declares": ("observer", lambda backend: backend.queue("orders").declare(lock=99)),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_all_else_is_refused(server: WithUsers, what: str) -> None:
    user, act = REFUSED[what]
    async with acting(url_of(server, user)) as backend:
        await refused(backend, act, *server.says)


async def test_an_observer_can_not_ask_a_leader_to_resign(server: WithUsers) -> None:
    async with (
        acting(url_of(server, "candidate")) as candidate,
        acting(url_of(server, "observer")) as observer,
        candidate.election("held", ttl=TTL).campaign(),
    ):
        await refused(observer, lambda backend: backend.election("held").ask_to_resign(), "this user")


# --- what a program can do without tenure ---


@asynccontextmanager
async def connected(server: WithUsers, user: str, **more: Any) -> AsyncIterator[Driver]:
    """Yield the driver, with the login of *user*."""
    driver = Driver()
    inbox = server.own(user).partition("=")[2] or "_INBOX"
    login = f"nats://{user}:{user}-password@127.0.0.1:{server.port}"
    await driver.connect(login, allow_reconnect=False, inbox_prefix=inbox, **more)
    try:
        yield driver
    finally:
        await driver.close()


async def test_no_user_reads_the_answers_to_another(server: WithUsers) -> None:
    violations: list[str] = []
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def note(error: Exception) -> None:
        violations.append(str(error).lower())

    async def hear(message: Msg) -> None:
        heard.put_nowait(message.subject)

    async with connected(server, "producer", error_cb=note) as driver:
        for subject in ("_INBOX.>", "_INBOX_consumer.>", ">"):
            await driver.subscribe(subject, cb=hear)
        await driver.flush()
        async with acting(url_of(server, "consumer")) as backend:
            await backend.queue("orders").stats()
        if type(server) is WithUsers:
            await until(lambda: len(violations) == 3)
            assert all("permissions violation for subscription" in one for one in violations)
        else:
            await driver.publish("own", b"last")
            assert await heard.get() == "own"  # and nothing before it
            assert violations == []


ANSWERS: dict[str, tuple[str, str, str]] = {
    "a producer into a lease": ("producer", "$JS.API.STREAM.INFO.tenure_orders", "$KV.tenure-leases.victim"),
    "a producer into another queue": ("producer", "$JS.API.STREAM.INFO.tenure_orders", "tenure.others.forged"),
    "a candidate into a queue": ("candidate", "$JS.API.STREAM.INFO.KV_tenure-leases", "tenure.others.forged"),
    "an observer into a lease": ("observer", "$JS.API.STREAM.NAMES", "$KV.tenure-leases.victim"),
    "a consumer into a lease": ("consumer", "$JS.API.STREAM.INFO.tenure_orders", "$KV.tenure-leases.victim"),
    "a consumer with messages": ("consumer", "$JS.API.CONSUMER.MSG.NEXT.tenure_orders.", "tenure.others.forged"),
}
"""By what is tried: who asks for what, and the subject that it names for the answer, to which it may not publish."""


@pytest.mark.parametrize("what", ANSWERS)
async def test_an_answer_lands_where_the_asker_says_unless_it_has_an_account_of_its_own(
    server: WithUsers, what: str
) -> None:
    user, request, reply = ANSWERS[what]
    answered = asyncio.Event()

    async def note_answer(message: Msg) -> None:
        answered.set()

    async with connected(server, "owner") as owner, connected(server, user) as driver:
        if request.endswith("."):
            answer = await owner.request("$JS.API.CONSUMER.NAMES.tenure_orders", b"")
            request += json.loads(answer.data)["consumers"][0]
            await owner.request("tenure.orders.more", b"more")
        before = await sequence_of(owner, reply)
        if type(server) is WithAccounts:
            await driver.subscribe(reply, cb=note_answer)
        await driver.publish(request, b"", reply=reply)
        if type(server) is WithAccounts:
            await answered.wait()  # in its own account
            assert await sequence_of(owner, reply) == before + 1
        else:
            await until(lambda: is_after(owner, reply, before + 1))


async def sequence_of(owner: Driver, subject: str) -> int:
    """Store something beside *subject*, behind all that is on its way there; return the sequence that it gets."""
    answer = await owner.request(f"{subject}-mark", b"mark")
    return int(json.loads(answer.data)["seq"])


async def is_after(owner: Driver, subject: str, expected: int) -> bool:
    """Whether something else was stored beside *subject* since a mark, behind which *expected* would follow."""
    answer = await owner.request("$JS.API.STREAM.MSG.GET." + stream_of(subject), json.dumps({"seq": expected}).encode())
    return "message" in json.loads(answer.data)


def stream_of(subject: str) -> str:
    return "KV_tenure-leases" if subject.startswith("$KV") else "tenure_others"


class WithLess(WithAccounts):
    """A server whose producer doesn't import the information, and whose candidate imports one election only."""

    def of_page(self) -> str:
        text = super().of_page()
        start = text.index("PRODUCER: {")
        info = '{service: {account: TENURE, subject: "$JS.API.INFO"}}'
        text = text[:start] + text[start:].replace(info, "", 1)
        assert text.count('subject: "$KV.tenure-leases.*"') == 1
        return text.replace('subject: "$KV.tenure-leases.*"', 'subject: "$KV.tenure-leases.led"')


async def test_an_account_needs_the_information_and_may_have_one_election_only() -> None:
    with private(WithLess) as own:
        await prepare(own)
        async with acting(url_of(own, "producer")) as backend:
            await refused(backend, lambda backend: backend.queue("orders").send(b"x"), "not enabled for account")
        async with acting(url_of(own, "candidate")) as backend:
            assert await lead(backend, "led")
            await refused(backend, lambda backend: lead(backend, "other"), "this user", "tenure-leases.other")


@pytest.mark.parametrize("inbox", ["", "a.b", "a*", ">", "a b", "x" * 91])
def test_an_inbox_is_one_word(inbox: str) -> None:
    with pytest.raises(tenure.ConfigError, match="inbox must be one word"):
        Url.parse(f"nats://127.0.0.1/?inbox={inbox}").options(Options)


async def test_a_consumer_that_has_received_is_told_to_try_again_when_it_may_not_send(server: WithUsers) -> None:
    """As docs/security.md says: to send and to receive are requests of one kind, and a right may come back."""
    async with acting(url_of(server, "consumer")) as backend:
        await backend.queue("orders").receive()
        for _ in range(2):
            with pytest.raises(tenure.Unavailable, match=server.says[0]):
                await backend.queue("others").send(b"x")
