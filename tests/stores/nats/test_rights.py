"""The users that docs/nats.md gives least rights: what each may do works, and what it may not is refused.

In one account, and each in an account of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from typing import Any, NamedTuple

import pytest

pytest.importorskip("nats")

from nats.aio.client import Client as Driver
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

import tenure
from tenure._backends import nats
from tenure._backends.nats.address import Options
from tenure._lease import Granted, Released
from tenure._url import Url
from tests.docs.pages import commands
from tests.durations import stretched, until
from tests.explained import facts_by_name
from tests.servers import Nats, patient, private
from tests.stores.nats.raw import flush
from tests.stores.rights import AT_ONCE, EITHER, LATER, TTL, Act, Refusal, acting, lead, plan, refused


class WithUsers(Nats):
    """A server that has the users of the page, in one account."""

    def configure(self) -> None:
        super().configure()
        settings = json.loads((self.folder / "nats.conf").read_text())
        own = "\n".join(f"{name}: {json.dumps(value)}" for name, value in settings.items())
        self.write("nats.conf", f"{own}\n{self.of_page()}")

    def of_page(self) -> str:
        """Return what the page says to put into the configuration."""
        return commands("docs/nats.md", "Rights", "authorization {\n  users: [\n    # Makes queues")

    def own(self, user: str) -> str:
        """Return what a URL says of the inboxes of *user*."""
        return "" if user in ("owner", "tenure") else f"?inbox=_INBOX_{user}"

    def refusal_of(self, one: Refused) -> str:
        """Return the words of a refusal: the right that is missing."""
        return f'does not permit this user what tenure needs: permissions violation for publish to "{one.subject}'


class WithAccounts(WithUsers):
    """A server that has an account of its own for each of them."""

    def of_page(self) -> str:
        return commands("docs/nats.md", "Rights", "accounts")

    def own(self, user: str) -> str:
        return ""

    def refusal_of(self, one: Refused) -> str:
        if one.subject == LEASE:
            return f"this user's account does not import '{LEASE}'"
        return f"has no JetStream for this user: nothing answers to '{one.in_account or one.subject}'"


class WithOneUser(WithUsers):
    """A server that has one user, which may do all that tenure does."""

    def of_page(self) -> str:
        return commands("docs/nats.md", "Rights", "authorization {\n  users: [\n    # Does all")


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
    assert await anext(opened.leases.hints("job")) is None
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


async def test_a_consumer_can_also_send_to_its_queue(server: WithUsers) -> None:
    async with acting(url_of(server, "consumer")) as backend:
        queue = backend.queue("orders")
        await take_all(queue)
        assert await queue.send(b"its own")
        assert await take_all(queue) == [b"its own"]


async def test_an_empty_message_ends_no_pull_of_a_consumer(server: WithUsers) -> None:
    """In an account of its own, the server takes an answer without body and headers for the end of all answers."""
    async with acting(url_of(server, "producer")) as producer, acting(url_of(server, "consumer")) as backend:
        queue = backend.queue("orders")
        await take_all(queue)
        bodies = [b"1", b"", b"2", b"3"]
        await producer.queue("orders").send_batch([tenure.Outgoing(body) for body in bodies])
        messages = await queue.receive(max=10)
        assert [(one.body, dict(one.headers)) for one in messages] == [(body, {}) for body in bodies]
        for message in messages:
            await message.abandon()
        messages = await queue.receive(max=10)
        assert [(one.body, one.delivery_count) for one in messages] == [(body, 2) for body in bodies]
        for message in messages:
            await message.complete()


async def test_an_empty_message_of_another_program_keeps_no_receive_from_returning(server: WithUsers) -> None:
    """What the server drops behind it comes when its lock ends."""
    async with (
        connected(server, "owner") as owner,
        connected(server, "producer") as other_program,
        acting(url_of(server, "consumer")) as backend,
    ):
        queue = backend.queue("orders")
        await take_all(queue)
        for body in (b"1", b"", b"2"):
            await other_program.request("tenure.orders.theirs", body, timeout=TTL)
        bodies = [one.body for one in await queue.receive(max=10)]
        assert bodies == ([b"1", b""] if type(server) is WithAccounts else [b"1", b"", b"2"])
        await owner.request("$JS.API.STREAM.PURGE.tenure_orders", b"", timeout=TTL)


async def edited(owner: Driver, **changes: object) -> tuple[str, dict[str, Any]]:
    """Change the consumer of the queue as its administrator; return its name, and what it was before."""
    answer = await owner.request("$JS.API.CONSUMER.LIST.tenure_orders", b"", timeout=TTL)
    [found] = json.loads(answer.data)["consumers"]
    wanted = json.dumps({"stream_name": "tenure_orders", "config": found["config"] | changes}).encode()
    answer = await owner.request(f"$JS.API.CONSUMER.DURABLE.CREATE.tenure_orders.{found['name']}", wanted, timeout=TTL)
    config = json.loads(answer.data)["config"]
    assert changes.items() <= config.items()
    return found["name"], {name: found["config"][name] for name in changes}


CHANGES = {
    "ack_wait": (2 * 10**9, "ack_wait is 2 s instead of 30.25 s"),
    "max_deliver": (1, "max_deliver is 1 instead of -1"),
}


@pytest.mark.parametrize("field", CHANGES)
async def test_a_consumer_that_may_not_set_a_change_back_is_refused_until_somebody_does(
    server: WithUsers, field: str
) -> None:
    value, said = CHANGES[field]
    async with connected(server, "owner") as owner:
        name, before = await edited(owner, **{field: value})
        try:
            refusal = f"consumer {name} of tenure_orders was changed: {said}; this user can't set it back"
            opened = nats.open(Url.parse(patient(url_of(server, "consumer"))))
            for _ in range(2):
                with pytest.raises(tenure.ConfigError, match=refusal):
                    await opened.broker.receive("orders", 1, TTL)
            await opened.close()
            async with acting(url_of(server, "consumer")) as backend:
                await backend.queue("orders").settings()  # which works, as the login does: the change may be undone
                with pytest.raises(tenure.Unavailable, match=refusal):
                    await backend.queue("orders").receive()
                await edited(owner, **before)
                await take_all(backend.queue("orders"))
        finally:
            await edited(owner, **before)


async def test_a_change_that_only_makes_messages_wait_is_reported_once(
    server: WithUsers, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(server, "owner") as owner:
        name, before = await edited(owner, max_ack_pending=1)
        try:
            async with acting(url_of(server, "consumer")) as backend:
                for _ in range(3):
                    await backend.queue("orders").receive(max=2)
            said = [one.getMessage() for one in caplog.records if "max_ack_pending" in one.getMessage()]
            [line] = said
            assert f"consumer {name} of tenure_orders: max_ack_pending is 1 instead of -1; this user can't" in line
        finally:
            await edited(owner, **before)


async def take_all(queue: tenure.Queue) -> list[bytes]:
    """Complete all messages that can be received; return their bodies."""
    bodies: list[bytes] = []
    while messages := await queue.receive(max=999):
        for message in messages:
            await message.complete()
            bodies.append(message.body)
    return bodies


async def test_an_observer_sees_leaders_names_and_settings(server: WithUsers) -> None:
    async with acting(url_of(server, "observer")) as backend:
        assert "led" in await backend.leaders()
        assert await backend.queues() == ["orders", "others"]
        assert (await backend.queue("orders").settings()).lock


async def test_the_first_user_does_all() -> None:
    """On a server on which nobody else has made anything."""
    with private(WithOneUser) as own:
        url = url_of(own, "tenure")
        async with acting(url) as backend:
            assert await lead(backend, "led")  # which fails without the right; a campaign asks again
        async with acting(url) as backend:
            with suppress(tenure.TermLost):  # it steps down at once
                async with backend.election("held", ttl=TTL).campaign():
                    assert {"held", "led"} <= set(await backend.leaders())
                    assert await backend.election("held").ask_to_resign()
            queue = backend.queue("orders", max_deliveries=5)
            await queue.declare(lock=99)
            await queue.send_batch([tenure.Outgoing(b"%d" % number) for number in range(5)])
            await queue.send(b"later", id="later", delay=3600)
            [one, two, three, four] = await queue.receive(max=4)
            await one.complete(remember=3600)
            await two.abandon()
            await three.abandon(delay=3600)
            await four.renew()
            await four.dead_letter("bad")
            assert [message.body for message in await queue.dead_letters.peek()] == [b"3"]
            assert await queue.dead_letters.redrive() == 1
            [message] = await queue.receive()
            await message.dead_letter("bad")
            assert await queue.dead_letters.purge() == 1
            assert await queue.peek()
            assert (await queue.stats()).ready == 4
            await plan(backend, "daily", "orders")
            await queue.schedules.remove("daily")
            assert await backend.queues() == ["orders"]
            assert await queue.purge()
            await queue.delete(force=True)
            assert (await backend.diagnose()).traits
        await hear_of_changes(own, "tenure")
        violations = [line for line in own.log().splitlines() if "violation" in line.lower()]
        assert violations == []


class Refused(NamedTuple):
    """What is refused to a user, and the subject to which it may not publish, or the beginning of it."""

    user: str
    act: Act
    subject: str
    in_account: str = ""
    """That in an account of its own, if it is another one: where a message isn't taken, its stream is to be made."""
    error: Refusal = AT_ONCE


NAMES, READ, CREATE = "$JS.API.CONSUMER.NAMES.tenure_", "$JS.API.STREAM.MSG.GET.", "$JS.API.STREAM.CREATE."
RECORD, LEASE = "$KV.tenure-queues.orders", "$KV.tenure-leases.led"
RECORDS, LEASES, DEAD = f"{READ}KV_tenure-queues", f"{READ}KV_tenure-leases", f"{READ}tenure_orders=24dead"
NO_RECORD = f"{CREATE}KV_tenure-queues"

REFUSED: dict[str, Refused] = {
    "a candidate sends": Refused("candidate", lambda backend: backend.queue("orders").send(b"x"), RECORDS),
    "a candidate receives": Refused("candidate", lambda backend: backend.queue("orders").receive(), RECORDS),
    "a candidate peeks": Refused("candidate", lambda backend: backend.queue("orders").peek(), f"{NAMES}orders"),
    "a candidate declares": Refused("candidate", lambda backend: backend.queue("orders").declare(lock=99), RECORDS),
    "a producer receives": Refused(
        "producer", lambda backend: backend.queue("orders").receive(), f"{NAMES}orders", error=LATER
    ),
    "a producer peeks": Refused("producer", lambda backend: backend.queue("orders").peek(), f"{NAMES}orders"),
    "a producer purges": Refused("producer", lambda backend: backend.queue("orders").purge(), f"{NAMES}orders"),
    "a producer sends elsewhere": Refused(
        "producer",
        lambda backend: backend.queue("others").send(b"x"),
        "tenure.others.=m.",
        f"{CREATE}tenure_others",
        error=LATER,
    ),
    "a producer leads": Refused("producer", lambda backend: lead(backend, "led"), LEASES),
    "a producer declares": Refused(
        "producer", lambda backend: backend.queue("orders").declare(lock=99), RECORD, NO_RECORD
    ),
    "a consumer receives elsewhere": Refused(
        "consumer", lambda backend: backend.queue("others").receive(), f"{NAMES}others", error=LATER
    ),
    "a consumer sends elsewhere": Refused(
        "consumer",
        lambda backend: backend.queue("others").send(b"x"),
        "tenure.others.=m.",
        f"{CREATE}tenure_others",
        error=LATER,
    ),
    "a consumer declares": Refused(
        "consumer", lambda backend: backend.queue("orders").declare(lock=99), RECORD, NO_RECORD
    ),
    "a consumer purges dead letters": Refused(
        "consumer", lambda backend: backend.queue("orders").dead_letters.purge(), DEAD
    ),
    "a consumer reads dead letters": Refused(
        "consumer", lambda backend: backend.queue("orders").dead_letters.peek(), DEAD
    ),
    "a consumer leads": Refused("consumer", lambda backend: lead(backend, "led"), LEASES),
    "an observer counts": Refused("observer", lambda backend: backend.queue("orders").stats(), f"{NAMES}orders"),
    "an observer leads": Refused("observer", lambda backend: lead(backend, "led"), LEASE, error=EITHER),
    "an observer sends": Refused(
        "observer",
        lambda backend: backend.queue("orders").send(b"x"),
        "tenure.orders.=m.",
        f"{CREATE}tenure_orders",
        error=LATER,
    ),
    "an observer receives": Refused(
        "observer", lambda backend: backend.queue("orders").receive(), f"{NAMES}orders", error=LATER
    ),
    "an observer purges": Refused("observer", lambda backend: backend.queue("orders").purge(), f"{NAMES}orders"),
    "an observer declares": Refused(
        "observer", lambda backend: backend.queue("orders").declare(lock=99), RECORD, NO_RECORD
    ),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_all_else_is_refused(server: WithUsers, what: str) -> None:
    one = REFUSED[what]
    async with acting(url_of(server, one.user)) as backend:
        await refused(backend, one.act, server.refusal_of(one), error=one.error)


async def test_a_campaign_without_the_right_goes_on_if_looking_has_worked(server: WithUsers) -> None:
    one = REFUSED["an observer leads"]
    async with acting(url_of(server, one.user)) as backend:
        assert "led" in await backend.leaders()
        await refused(backend, one.act, server.refusal_of(one), error=LATER)


async def test_an_observer_can_not_ask_a_leader_to_resign(server: WithUsers) -> None:
    async with (
        acting(url_of(server, "candidate")) as candidate,
        acting(url_of(server, "observer")) as observer,
        candidate.election("held", ttl=TTL).campaign(),
    ):
        # An account that doesn't import the subject isn't refused: nobody takes what it publishes.
        error = LATER if type(server) is WithAccounts else AT_ONCE
        await refused(observer, lambda backend: backend.election("held").ask_to_resign(), "this user", error=error)


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


STREAMS = ("tenure_orders", "tenure_orders=24dead", "tenure_others", "KV_tenure-leases", "KV_tenure-queues")
CONSUMER = "<consumer>"
"""In a subject: the name of the consumer of the queue ``orders``."""

SUBJECTS = [
    *(f"$JS.API.{of_all}" for of_all in ("INFO", "STREAM.NAMES", "STREAM.LIST", "ACCOUNT.PURGE.TENURE")),
    *("$JS.API.META.LEADER.STEPDOWN", "$JS.API.SERVER.REMOVE", "$SYS.REQ.USER.INFO"),
    *(
        f"$JS.API.{of_stream}.{stream}"
        for stream in STREAMS
        for of_stream in (
            *("STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE", "STREAM.INFO", "STREAM.SNAPSHOT"),
            *("STREAM.RESTORE", "STREAM.MSG.GET", "STREAM.MSG.DELETE", "STREAM.LEADER.STEPDOWN", "STREAM.PEER.REMOVE"),
            *("DIRECT.GET", "CONSUMER.CREATE", "CONSUMER.NAMES", "CONSUMER.LIST"),
        )
    ),
    *(
        f"$JS.API.{of_consumer}.{stream}.{CONSUMER}"
        for stream in STREAMS
        for of_consumer in (
            *("CONSUMER.CREATE", "CONSUMER.DURABLE.CREATE", "CONSUMER.DELETE", "CONSUMER.INFO", "CONSUMER.MSG.NEXT"),
            *("CONSUMER.PAUSE", "CONSUMER.RESET", "CONSUMER.UNPIN", "CONSUMER.LEADER.STEPDOWN"),
        )
    ),
    *(f"$JS.API.CONSUMER.CREATE.{stream}.{CONSUMER}.tenure.trial" for stream in STREAMS),
    *(f"$JS.API.DIRECT.GET.{stream}.tenure.trial" for stream in STREAMS),
    *(f"$JS.ACK.{stream}.{CONSUMER}.1.999999.999999.1.0" for stream in STREAMS),
    *("tenure.orders", "tenure.orders.trial", "tenure.orders=24dead", "tenure.orders=24dead.trial"),
    *("tenure.others", "tenure.others.trial", "tenure.others=24dead.trial", "tenure.trial"),
    *("$KV.tenure-leases.trial", "$KV.tenure-leases.trial.deep", "$KV.tenure-queues.trial", "$KV.tenure-inbox.trial"),
    *("tenure-leases.trial", "_INBOX.trial", "_INBOX_candidate.trial", "_INBOX_consumer.trial", "_R_.trial", "trial"),
]
"""What a user of NATS may publish to: one subject for each thing that the server does, also with queues of others."""

PERMITTED: dict[str, set[str]] = {
    "candidate": {
        *("$KV.tenure-leases.trial", "$JS.API.STREAM.MSG.GET.KV_tenure-leases", "$JS.API.STREAM.INFO.KV_tenure-leases"),
    },
    "producer": {
        *("tenure.orders.trial", "$JS.API.STREAM.INFO.tenure_orders", "$JS.API.STREAM.MSG.GET.KV_tenure-queues"),
    },
    "consumer": {
        *("tenure.orders.trial", "tenure.orders=24dead.trial", f"$JS.ACK.tenure_orders.{CONSUMER}.1.999999.999999.1.0"),
        *("$JS.API.CONSUMER.NAMES.tenure_orders", f"$JS.API.CONSUMER.INFO.tenure_orders.{CONSUMER}"),
        *(f"$JS.API.CONSUMER.MSG.NEXT.tenure_orders.{CONSUMER}", "$JS.API.STREAM.INFO.tenure_orders"),
        *("$JS.API.STREAM.MSG.GET.tenure_orders", "$JS.API.STREAM.MSG.DELETE.tenure_orders"),
        *("$JS.API.STREAM.INFO.tenure_orders=24dead", "$JS.API.STREAM.MSG.GET.KV_tenure-queues"),
    },
    "observer": {
        *("$JS.API.STREAM.NAMES", *(f"$JS.API.STREAM.INFO.{stream}" for stream in STREAMS)),
        *("$JS.API.STREAM.MSG.GET.KV_tenure-leases", "$JS.API.STREAM.MSG.GET.KV_tenure-queues"),
    },
}
"""By user: to which of them it may publish; in an account of its own, also to ``$JS.API.INFO``."""

HEARD = ["tenure-leases.trial", *(f"_INBOX_{user}.trial" for user in PERMITTED), "_INBOX.trial", "trial"]
HEARD += ["tenure.orders.trial", "tenure.orders=24dead.trial", "$KV.tenure-leases.trial", "$KV.tenure-queues.trial"]
HEARD += ["$JS.EVENT.ADVISORY.trial", "$JS.API.CONSUMER.MSG.NEXT.tenure_orders.trial", "$JS.ACK.tenure_orders.trial"]
"""What others publish to, by what it is."""


async def ignore(error: Exception) -> None:
    """Take a violation for what it is: the message was not passed on."""


@pytest.fixture(scope="module", params=[WithUsers, WithAccounts])
def apart(request: pytest.FixtureRequest) -> Iterator[WithUsers]:
    """Yield a server as ``server``, on which what is tried may leave something behind."""
    with private(request.param) as own:
        asyncio.run(prepare(own))
        yield own


@pytest.mark.parametrize("user", PERMITTED)
async def test_no_user_publishes_to_more_than_it_needs(apart: WithUsers, user: str) -> None:
    """What is permitted reaches the account that has the streams, where the owner hears all."""
    body = f"a trial by {user}".encode()
    async with connected(apart, "owner") as owner, connected(apart, user, error_cb=ignore) as driver:
        answer = await owner.request("$JS.API.CONSUMER.NAMES.tenure_orders", b"")
        [consumer] = json.loads(answer.data)["consumers"]
        everything = await owner.subscribe(">")
        await flush(owner)
        for subject in SUBJECTS:
            await driver.publish(subject.replace(CONSUMER, consumer), body)
        await flush(driver)
        await flush(owner)
        heard = set()
        while everything.pending_msgs:
            message = await everything.next_msg()
            if message.data == body:
                heard.add(message.subject.replace(consumer, CONSUMER))
        if user == "candidate":
            heard.remove("tenure-leases.trial")  # which the server publishes
        assert heard == PERMITTED[user] | ({"$JS.API.INFO"} if type(apart) is WithAccounts else set())


@pytest.mark.parametrize("user", PERMITTED)
async def test_no_user_hears_more_than_it_needs(apart: WithUsers, user: str) -> None:
    async with connected(apart, "owner") as owner, connected(apart, user, error_cb=ignore) as driver:
        subscriptions = {subject: await driver.subscribe(subject) for subject in HEARD}
        await flush(driver)
        for subject in HEARD:
            await owner.publish(subject, b"")
        await flush(owner)
        await flush(driver)
        heard = {subject for subject, subscription in subscriptions.items() if subscription.pending_msgs}
        own = {f"_INBOX_{user}.trial"} if type(apart) is WithUsers else set()
        assert heard == own | ({"tenure-leases.trial"} if user == "candidate" else set())


ASKS: dict[str, Act] = {
    "owner": lambda backend: backend.queue("orders").stats(),
    "candidate": lambda backend: backend.leaders(),
    "producer": lambda backend: backend.queue("orders").settings(),
    "consumer": lambda backend: backend.queue("orders").stats(),
    "observer": lambda backend: backend.leaders(),
}
"""By user: what it may ask."""


@pytest.mark.parametrize("user", [one for one in ASKS if one != "owner"])
async def test_no_user_reads_the_answers_to_another(server: WithUsers, user: str) -> None:
    violations: list[str] = []
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def note(error: Exception) -> None:
        violations.append(str(error).lower())

    async def hear(message: Msg) -> None:
        heard.put_nowait(message.subject)

    others = [one for one in ASKS if one != user]
    subjects = ["_INBOX.>", *(f"_INBOX_{one}.>" for one in others), ">"]
    async with connected(server, user, error_cb=note) as driver:
        for subject in subjects:
            await driver.subscribe(subject, cb=hear)
        await driver.flush()
        for other in others:
            async with acting(url_of(server, other)) as backend:
                await ASKS[other](backend)
        if type(server) is WithUsers:
            await until(lambda: len(violations) == len(subjects))
            for subject in subjects:
                assert any(
                    f'permissions violation for subscription to "{subject.lower()}"' in one for one in violations
                )
            assert heard.empty()
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


class Forger:
    """As a producer, sends what might be taken for the copy of any message of others."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._own_subjects: set[str] = set()
        self._own_numbers: set[int] = set()

    async def forge(self) -> None:
        """Send copies, by their subjects and by their ids, of the messages that are there."""
        wanted = json.dumps({"subjects_filter": ">", "deleted_details": True}).encode()
        answer = await self._driver.request("$JS.API.STREAM.INFO.tenure_orders", wanted, timeout=TTL)
        state = json.loads(answer.data)["state"]
        gone = self._own_numbers.union(state.get("deleted", ()))
        numbers = [one for one in range(state["first_seq"], state["last_seq"] + 1) if one not in gone]
        subjects = state.get("subjects", {}).keys() - self._own_subjects
        keys = {f"n{number}" for number in numbers}
        keys |= {subject.rpartition("=m.")[2] for subject in subjects if "=m." in subject}
        for key in list(keys):
            dead = f"orders$dead/tenure.orders=24dead.=m.{key}"
            keys.add(f"r{sha256(dead.encode()).hexdigest()[:32]}")
        ids = [f"tenure-tenure_orders-{number}-{key}" for number in numbers for key in keys]
        ids += [f"tenure-{number}-{first}-{'0' * 32}" for number in numbers for first in numbers]
        for id_ in ids:
            await self._driver.publish("tenure.orders.forged", b"forged", headers={"Nats-Msg-Id": id_})
        state_of_a_copy = {"Tenure-State": json.dumps({"sequence": min(numbers, default=1), "deliveries": 1})}
        for key in keys:
            await self._driver.publish(f"tenure.orders.=m.{key}", b"forged", headers=state_of_a_copy)
        # The others are stored before it.
        answer = await self._driver.request("tenure.orders.forged", b"forged", timeout=TTL)
        self._own_numbers |= set(range(state["last_seq"] + 1, json.loads(answer.data)["seq"] + 1))
        self._own_subjects |= {"tenure.orders.forged", *(f"tenure.orders.=m.{key}" for key in keys)}


@pytest.mark.parametrize("is_served", [False, True], ids=["what it sends waits", "what it sends is served"])
@pytest.mark.parametrize("sender", ["tenure", "another program"])
async def test_a_producer_can_send_nothing_that_is_taken_for_a_copy(
    server: WithUsers, sender: str, is_served: bool
) -> None:
    """Of its messages, it knows all that one with its rights can learn: the number of each, and the subject."""
    async with (
        acting(url_of(server, "owner")) as owner,
        acting(url_of(server, "consumer")) as backend,
        connected(server, "owner") as other_program,
        connected(server, "producer") as producer,
    ):
        queue, dead, attacker = backend.queue("orders"), owner.queue("orders").dead_letters, Forger(producer)

        async def receive_true(forged: list[tenure.Message]) -> tenure.Message:
            received = await queue.receive(max=999)
            forged += [one for one in received if one.body != b"true"]
            [found] = [one for one in received if one.body == b"true"]
            return found

        async def attack(forged: list[tenure.Message]) -> None:
            await attacker.forge()
            if is_served:
                forged += await queue.receive(max=999)
                for one in forged:
                    await one.complete()
                forged.clear()

        await dead.purge()
        await take_all(queue)
        if sender == "tenure":
            await owner.queue("orders").send(b"true")
        else:
            await other_program.request("tenure.orders.theirs", b"true", timeout=TTL)
        forged: list[tenure.Message] = []
        message = await receive_true(forged)
        await attack(forged)
        await message.abandon()
        message = await receive_true(forged)
        assert message.delivery_count == 2
        await attack(forged)
        await message.renew()
        await message.dead_letter("bad")
        assert [one.body for one in await dead.peek()] == [b"true"]
        await attack(forged)
        assert await dead.redrive() == 1
        message = await receive_true(forged)
        await message.complete()
        for one in forged:
            await one.complete()
        assert set(await take_all(queue)) <= {b"forged"}
        assert not await dead.peek()


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
            await refused(
                backend, lambda backend: lead(backend, "other"), "this user", "tenure-leases.other", error=LATER
            )


@pytest.fixture(scope="module")
def less() -> Iterator[WithUsers]:
    """Yield a server whose candidate may write to the election ``led`` only."""
    with private(WithLess) as own:
        asyncio.run(prepare(own))
        yield own


OTHER = "$KV.tenure-leases.other"

HEADERS: dict[str, dict[str, str]] = {
    "a roll-up of all": {"Nats-Rollup": "all"},
    "a roll-up of its own": {"Nats-Rollup": "sub"},
    "as nats kv purge": {"Nats-Rollup": "sub", "KV-Operation": "PURGE"},
    "a purge": {"KV-Operation": "PURGE"},
    "a deletion": {"KV-Operation": "DEL"},
    "an age": {"Nats-TTL": "1"},
    "a marker": {"Nats-Marker-Reason": "MaxAge"},
    "another stream": {"Nats-Expected-Stream": "tenure_orders"},
    "the last of another": {
        "Nats-Expected-Last-Subject-Sequence": "1",
        "Nats-Expected-Last-Subject-Sequence-Subject": OTHER,
    },
    "the last of all": {"Nats-Expected-Last-Sequence": "1"},
    "a schedule": {"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": OTHER},
    "a schedule by another": {
        "Nats-Schedule": "@every 1s",
        "Nats-Schedule-Target": OTHER,
        "Nats-Schedule-Source": OTHER,
        "Nats-Schedule-Rollup": "sub",
    },
    "the end of a schedule": {"Nats-Scheduler": OTHER, "Nats-Schedule-Next": "purge"},
    "a batch": {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"},
    "a counter": {"Nats-Incr": "+1"},
    "a trace": {"Nats-Trace-Dest": OTHER},
}
"""By what is tried: the headers of a message to the own election."""


@pytest.mark.parametrize("what", HEADERS)
async def test_a_candidate_of_one_election_ends_no_other(less: WithUsers, what: str) -> None:
    opened = nats.open(Url.parse(patient(url_of(less, "owner"))))
    try:
        answer = await opened.leases.acquire("other", f"by {what}", TTL)
        assert isinstance(answer, Granted)
        async with connected(less, "candidate") as driver, connected(less, "owner") as owner:
            before = await newest(owner, OTHER)
            with suppress(TimeoutError, NatsError):  # one that is only traced has no answer
                await driver.request("$KV.tenure-leases.led", b"{}", headers=HEADERS[what], timeout=stretched(1.0))
            assert await newest(owner, OTHER) == before
        assert list(await opened.leases.renew([answer.grant], TTL)) == [Granted(answer.grant)]
        assert await opened.leases.release(answer.grant) == Released(answer.grant)
    finally:
        await opened.close()


async def newest(owner: Driver, subject: str) -> object:
    """Return the newest message to *subject*, with its number; None if there is none."""
    request = json.dumps({"last_by_subj": subject}).encode()
    answer = await owner.request("$JS.API.STREAM.MSG.GET." + stream_of(subject), request)
    return json.loads(answer.data).get("message")


async def config_of(owner: Driver, stream: str) -> dict[str, Any]:
    answer = await owner.request(f"$JS.API.STREAM.INFO.{stream}", b"")
    return dict(json.loads(answer.data)["config"])


async def test_no_stream_of_tenure_lets_a_header_reach_other_subjects(less: WithUsers) -> None:
    async with acting(url_of(less, "owner")) as backend:
        queue = backend.queue("more")
        await queue.declare(lock=30)
        await queue.send(b"x", id="x")
        [message] = await queue.receive()
        await message.complete(remember=3600)
    async with connected(less, "owner") as owner:
        answer = await owner.request("$JS.API.STREAM.NAMES", b"")
        names = json.loads(answer.data)["streams"]
        kinds = {"KV_tenure-leases", "KV_tenure-queues", "KV_tenure-inbox", "tenure_orders", "tenure_orders=24dead"}
        assert kinds <= set(names)
        for name in names:
            config = await config_of(owner, name)
            assert not config.get("allow_rollup_hdrs"), name
            assert not config.get("allow_msg_schedules"), name


async def test_a_bucket_of_an_early_version_is_told_and_takes_no_roll_up_from_now_on(server: WithUsers) -> None:
    stream = "KV_tenure-leases"
    async with connected(server, "owner") as owner, connected(server, "candidate") as driver:
        early = await config_of(owner, stream) | {"allow_rollup_hdrs": True}
        await owner.request(f"$JS.API.STREAM.UPDATE.{stream}", json.dumps(early).encode())
        assert (await config_of(owner, stream))["allow_rollup_hdrs"]
        await hear_of_changes(server, "candidate")  # may not change the bucket, and has its hints all the same
        assert (await config_of(owner, stream))["allow_rollup_hdrs"]
        backend = nats.open(Url.parse(patient(url_of(server, "owner"))))
        told = facts_by_name(await backend.describe())["roll-ups"]
        await backend.close()
        assert told.code == "nats-rollup"
        assert told.advice.endswith(f"run nats stream edit {stream} --no-allow-rollup")
        await hear_of_changes(server, "owner")
        assert await config_of(owner, stream) == early | {"allow_rollup_hdrs": False}
        answer = await driver.request("$KV.tenure-leases.led", b"{}", headers={"Nats-Rollup": "all"})
        assert "rollup" in json.loads(answer.data)["error"]["description"]


async def hear_of_changes(server: WithUsers, user: str) -> None:
    """Wait for a hint about an election as *user*."""
    backend = nats.open(Url.parse(patient(url_of(server, user))))
    assert await anext(backend.leases.hints("led")) is None
    await backend.close()


@pytest.mark.parametrize("inbox", ["", "a.b", "a*", ">", "a b", "x" * 91])
def test_an_inbox_is_one_word(inbox: str) -> None:
    with pytest.raises(tenure.ConfigError, match="inbox must be one word"):
        Url.parse(f"nats://127.0.0.1/?inbox={inbox}").options(Options)


async def test_a_consumer_that_has_received_is_told_to_try_again_when_it_may_not_send(server: WithUsers) -> None:
    """As docs/security.md says: what has worked shows that the login is right, and a right may come back."""
    async with acting(url_of(server, "consumer")) as backend:
        await backend.queue("orders").receive()
        for _ in range(2):
            with pytest.raises(tenure.Unavailable, match="this user"):
                await backend.queue("others").send(b"x")
