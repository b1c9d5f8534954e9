"""etcd over TLS, with users, and with several members: logins that end, members that are dead, leaders that change."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure._backends import etcd
from tenure._lease import Granted, HeldBy, Lost, NoAnswer, Vacant
from tenure._opened import Fact
from tenure._url import Url
from tenure.errors import ConfigError, Unavailable
from tenure.testing import until
from tenure.testing.faultproxy import FaultProxy
from tests.explained import facts_by_name
from tests.servers import Authority, Etcd, EtcdCluster, free_port, private
from tests.servers.etcd import end_of, in_base64
from tests.servers.process import release
from tests.stores.etcd.test_etcd import granted, opened, waiting

# A handshake that fails may leave its transport to the garbage collector, deep in asyncio: it is found here.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

ROOT, SECRET = "r00t", "s3:cr@t/%"


@pytest.fixture(autouse=True)
def nothing_left_to_collect() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Etcd]:
    """A server with users."""
    with private(Etcd, password=ROOT) as server:
        server.add_user("app", SECRET, "tenure/")
        yield server


@pytest.fixture(scope="module")
def over_tls(authority: Authority) -> Iterator[Etcd]:
    with private(Etcd, authority=authority, client_certificates=True) as server:
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[EtcdCluster]:
    with private(EtcdCluster) as cluster:
        yield cluster


def url_of_app(server: Etcd, password: str = "s3%3Acr%40t%2F%25") -> str:
    return f"etcd://app:{password}@127.0.0.1:{server.port}/"


# --- users -------------------------------------------------------------------------------------------------------


async def test_a_login_that_has_ended_is_made_again(guarded: Etcd, name: str) -> None:
    async with opened(url_of_app(guarded)) as ann, opened(url_of_app(guarded)) as bob:
        grant = await granted(ann.leases, name, ttl=30.0)
        await waiting(bob.leases, name, ttl=30.0)
        hints = bob.leases.hints(name)
        async with asyncio.timeout(20):
            await anext(hints)
        token = ann._client._token
        # The same password again: that ends all logins of the user, as their time to live does.
        guarded.call("auth/user/changepw", {"name": "app", "password": SECRET}, token=guarded.login())
        assert list(await ann.leases.renew([grant], 30.0)) == [Granted(grant)]
        assert ann._client._token != token
        await ann.leases.release(grant)
        async with asyncio.timeout(20):
            await anext(hints)  # the watch is still permitted
        assert (await granted(bob.leases, name, "bob#1", ttl=30.0)).token > grant.token


async def test_a_watch_ends_with_a_failed_request_to_its_member_and_logs_in_again(guarded: Etcd, name: str) -> None:
    async with opened(url_of_app(guarded)) as ann:
        client, hints = ann._client, ann.leases.hints(name)
        async with asyncio.timeout(20):
            await anext(hints)
        token, member = client._token, client.members[0]
        guarded.call("auth/user/changepw", {"name": "app", "password": SECRET}, token=guarded.login())
        member.retire(member.connections())  # that ends the watch
        await until(lambda: client._token not in (None, token))
        await until(lambda: all(watch.is_live for watch in ann.leases._hints.sources()))


async def test_campaigns_go_on_after_the_server_has_forgotten_their_logins(name: str) -> None:
    with private(Etcd, password=ROOT) as server:
        async with tenure.connect(server.url) as backend:
            election = backend.election(name, ttl=10, renew_every=0.3)
            async with election.campaign() as term:
                before = term.remaining()
                server.kill()
                server.start()
                await until(lambda: term.remaining() > before - 0.5)
                term.check()


@pytest.mark.parametrize(
    ("login", "words"),
    [
        ("app:wrong@", "refused the login"),
        ("nobody:x@", "refused the login"),
        ("", "requires a login, and got none"),
    ],
)
async def test_a_wrong_login_is_refused(guarded: Etcd, name: str, login: str, words: str) -> None:
    async with opened(f"etcd://{login}127.0.0.1:{guarded.port}/") as backend:
        with pytest.raises(ConfigError, match=words) as refused:
            await granted(backend.leases, name)
        assert "wrong" not in str(refused.value)


async def test_a_login_that_is_not_needed_is_not_used(name: str) -> None:
    with private(Etcd) as server:
        async with opened(url_of_app(server)) as backend:
            grant = await granted(backend.leases, name)
            assert {fact.name: fact.value for fact in await backend.describe()}["users"] == "none"
            server.require_login(ROOT)
            with pytest.raises(Unavailable, match="refused the login"):
                await backend.leases.renew([grant], 5.0)
            server.add_user("app", SECRET, "tenure/")
            assert list(await backend.leases.renew([grant], 5.0)) == [Granted(grant)]


async def test_a_prefix_that_is_not_permitted_is_named(guarded: Etcd, name: str) -> None:
    async with opened(url_of_app(guarded), "prefix=other/") as backend:
        with pytest.raises(ConfigError, match=r"does not permit this user the keys that begin with 'other/'"):
            await granted(backend.leases, name)


async def test_rights_that_are_revoked_are_awaited(guarded: Etcd, name: str) -> None:
    async with opened(url_of_app(guarded)) as backend:
        grant = await granted(backend.leases, name, ttl=30.0)
        everything = {"key": in_base64("tenure/"), "range_end": in_base64(end_of("tenure/"))}
        guarded.call("auth/role/revoke", {"role": "app", **everything}, token=guarded.login())
        try:
            with pytest.raises(Unavailable, match="worked before"):
                await backend.leases.renew([grant], 30.0)
        finally:
            permission = {"permType": "READWRITE", **everything}
            guarded.call("auth/role/grant", {"name": "app", "perm": permission}, token=guarded.login())
        assert list(await backend.leases.renew([grant], 30.0)) == [Granted(grant)]


# --- TLS ---------------------------------------------------------------------------------------------------------


async def test_certificates_are_shown_and_checked(over_tls: Etcd, name: str) -> None:
    async with opened(over_tls.url) as backend, tenure.connect(over_tls.url) as other:
        grant = await granted(backend.leases, name, ttl=10.0)
        assert list(await backend.leases.renew([grant], 10.0)) == [Granted(grant)]
        told = facts_by_name(await backend.describe())["TLS"].value
        assert told.startswith("TLS; the server's certificate and name are verified against /")
        hints = backend.leases.hints(name)
        async with asyncio.timeout(10):
            await anext(hints)
        leader = await other.election(name, ttl=10).leader()
        assert leader is not None
        assert leader.token == grant.token


async def test_wrong_certificates_are_named(over_tls: Etcd, name: str, tmp_path: Path) -> None:
    other = Authority("another authority")
    ca, rest = over_tls.url.partition("?")[2].split("&", 1)
    url = over_tls.url.partition("?")[0]
    for options, words in (
        (f"ca={other.certificate}&{rest}", "not trusted.*with ca=FILE"),
        (ca, "client's certificate.*with cert=FILE and key=FILE|check cert and key"),
    ):
        async with opened(url, options) as backend:
            # A refusal of the client's certificate is not always read: older versions of aiohttp fail before that.
            with pytest.raises((ConfigError, Unavailable), match=words):
                await granted(backend.leases, name)
    certificate, key = other.issue(tmp_path, "", usage="clientAuth")
    async with opened(url, f"{ca}&cert={certificate}&key={key}") as backend:
        with pytest.raises((ConfigError, Unavailable), match=r"refuses the client's certificate|check cert and key"):
            await granted(backend.leases, name)
    with pytest.raises(ConfigError, match=rf"files for TLS with .* \(ca={key}\) can't be used"):
        etcd.open(Url.parse(f"{url}?ca={key}"))


async def test_tls_and_none_are_not_mixed_up(over_tls: Etcd, guarded: Etcd, name: str) -> None:
    async with opened(f"etcd://127.0.0.1:{over_tls.port}/") as backend:
        with pytest.raises(Unavailable, match="if these servers require TLS, write etcds://"):
            await granted(backend.leases, name)
    async with opened(f"etcds://127.0.0.1:{guarded.port}/") as backend:
        with pytest.raises(Unavailable, match="if these servers don't use TLS, write etcd://"):
            await granted(backend.leases, name)


async def test_a_common_name_in_place_of_a_user_is_refused(authority: Authority, name: str, tmp_path: Path) -> None:
    certificate, key = authority.issue(tmp_path, "somebody", usage="clientAuth")
    with private(Etcd, authority=authority, client_certificates=True, password=ROOT) as server:
        async with opened(server.url) as backend:  # without a common name, and a password
            await granted(backend.leases, name)
        url = f"etcds://root:{ROOT}@127.0.0.1:{server.port}/?ca={authority.certificate}&cert={certificate}&key={key}"
        async with opened(url) as backend:
            with pytest.raises(ConfigError, match=r"common name.*use a certificate without a common name"):
                await granted(backend.leases, name)


# --- several members ---------------------------------------------------------------------------------------------


@pytest.fixture
async def silent(guarded: Etcd) -> AsyncIterator[FaultProxy]:
    """A member that accepts connections and never answers."""
    async with FaultProxy("127.0.0.1", guarded.port) as proxy:
        proxy.stall()
        yield proxy


async def test_a_request_goes_on_to_the_members_that_answer(
    cluster: EtcdCluster, silent: FaultProxy, name: str
) -> None:
    nobody = free_port()
    hosts = [f"127.0.0.1:{silent.port}", f"127.0.0.1:{nobody}", f"127.0.0.1:{cluster.nodes[0].port}"]
    try:
        async with opened(f"etcd://{','.join(hosts)}/") as backend:
            asked_at = time.monotonic()
            grant = await granted(backend.leases, name, ttl=6.0)  # 2 s for each request
            assert time.monotonic() - asked_at < 2.0
            asked_at = time.monotonic()
            for _ in range(10):
                assert list(await backend.leases.renew([grant], 6.0)) == [Granted(grant)]
            assert time.monotonic() - asked_at < 1.0  # the others are not asked again
        async with opened(f"etcd://{hosts[0]},{hosts[1]}/", "timeout=0.5") as backend:
            asked_at = time.monotonic()
            with pytest.raises(Unavailable):
                await granted(backend.leases, name)
            assert time.monotonic() - asked_at < 2.0
    finally:
        release(nobody)


async def test_a_silent_member_is_asked_after_those_that_have_answered_since(
    cluster: EtcdCluster, silent: FaultProxy, name: str
) -> None:
    async with (
        FaultProxy("127.0.0.1", cluster.nodes[0].port) as one,
        FaultProxy("127.0.0.1", cluster.nodes[1].port) as other,
    ):
        hosts = ",".join(f"127.0.0.1:{proxy.port}" for proxy in (silent, one, other))
        async with opened(f"etcd://{hosts}/", "timeout=6") as backend:  # 2 s for each member
            grant = await granted(backend.leases, name, ttl=20.0)
            for failing, healthy in ((one, other), (other, one)) * 2:
                healthy.heal()
                failing.refuse()
                failing.reset()
                asked_at = time.monotonic()
                assert list(await backend.leases.renew([grant], 20.0)) == [Granted(grant)]
                assert time.monotonic() - asked_at < 2.0


async def test_a_member_that_answers_only_some_requests_is_asked_last(
    cluster: EtcdCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a follower whose disk stands still: it passes keep-alives on to the leader."""
    async with opened(cluster.url, "timeout=3") as backend:  # 1 s for each member
        grant = await granted(backend.leases, name, ttl=20.0)
        member = backend._client.present
        answer = member.post

        async def post(path: str, *args: Any) -> Any:
            if path == "kv/txn":
                while True:
                    await asyncio.sleep(0.1)
                    await answer("lease/keepalive", {"ID": "1"}, "")
            return await answer(path, *args)

        monkeypatch.setattr(member, "post", post)
        assert list(await backend.leases.renew([grant], 20.0)) == [Granted(grant)]
        assert backend._client.present is not member


async def test_a_leader_goes_on_while_members_die(name: str) -> None:
    """Each member is killed in turn, with the one that leads etcd first, and the one that the client uses."""
    with private(EtcdCluster) as cluster:
        async with opened(cluster.url) as ann, opened(cluster.url) as bob:
            leases, ttl = ann.leases, 20.0
            grant = await granted(leases, name, ttl=ttl)
            await waiting(bob.leases, name, ttl=ttl)
            hints = bob.leases.hints(name)
            async with asyncio.timeout(10):
                await anext(hints)
            for dead in (cluster.leader(), cluster.nodes[ann._client.members.index(ann._client.present)]):
                dead.kill()
                answers = [await renewed(leases, grant, ttl)]
                while not isinstance(answers[-1], Granted):
                    assert not isinstance(answers[-1], Lost)
                    answers.append(await renewed(leases, grant, ttl))
                assert (await waiting(bob.leases, name, ttl=ttl)).token == grant.token
                cluster.start()
            await ann.leases.release(grant)
            async with asyncio.timeout(10):
                await anext(hints)
            assert (await granted(bob.leases, name, "bob#1", ttl=ttl)).token > grant.token


async def renewed(leases: etcd.EtcdLeases, grant: tenure.ports.Grant, ttl: float) -> object:
    try:
        (answer,) = await leases.renew([grant], ttl)
    except Unavailable as error:
        return NoAnswer(str(error))
    return answer


async def test_no_claim_is_lost_while_the_leader_of_etcd_moves(cluster: EtcdCluster, name: str) -> None:
    async with opened(cluster.url) as backend:
        grant = await granted(backend.leases, name, ttl=20.0)
        moving = asyncio.create_task(asyncio.to_thread(cluster.move_leader))
        answers: list[object] = []
        while not moving.done() or not isinstance(answers[-1], Granted):
            answers.append(await renewed(backend.leases, grant, 20.0))
        await moving
        assert not any(isinstance(answer, Lost) for answer in answers)


async def test_a_member_that_is_behind_catches_up_before_it_is_read(cluster: EtcdCluster, name: str) -> None:
    """It reads the question and the news of the others at the same time; without care, the old answer often wins."""
    leader = cluster.leader()
    behind = next(node for node in cluster.nodes if node is not leader)
    async with opened(leader.url) as ann, opened(behind.url) as bob:
        for each in (f"{name}-{number}" for number in range(15)):
            assert await bob.leases.inspect(each) == Vacant(each, 0)
            behind.pause()
            try:
                grant = await granted(ann.leases, each, ttl=30.0)
                asked = [asyncio.ensure_future(ask(each)) for ask in (bob.leases.inspect, bob.leases.ask_to_resign)]
                await asyncio.sleep(0.05)  # they are sent before it goes on
            finally:
                behind.resume()
            held, was_asked = await asyncio.gather(*asked)
            assert isinstance(held, HeldBy)
            assert (held.token, was_asked) == (grant.token, True)


# --- doctor ------------------------------------------------------------------------------------------------------


async def test_doctor_asks_for_a_lease_only_if_it_may_write(cluster: EtcdCluster) -> None:
    def leases_granted() -> int:
        return sum(node.requests().get("LeaseGrant", 0) for node in cluster.nodes)

    async with tenure.connect(cluster.url) as backend:
        before = leases_granted()
        looked = await backend.diagnose()
        assert leases_granted() == before
        wrote = await backend.diagnose(write=True)
        assert leases_granted() > before
    assert {fact.name for fact in wrote.facts} - {fact.name for fact in looked.facts} == {"shortest lease"}


async def test_doctor_describes_the_cluster(cluster: EtcdCluster) -> None:
    nobody = free_port()
    try:
        async with opened(f"{cluster.url.rstrip('/')},127.0.0.1:{nobody}/") as backend:
            facts = facts_by_name(await backend.describe())
            assert await backend.describe_by_writing() == [Fact("shortest lease", "1 s")]
    finally:
        release(nobody)
    members = [facts[f"member 127.0.0.1:{node.port}"].value for node in cluster.nodes]
    assert sorted(value.partition(",")[0] for value in members) == ["follower", "follower", "leader"]
    assert all(" of 2147483648 bytes" in value for value in members), members
    assert "can't be reached" in facts[f"member 127.0.0.1:{nobody}"].advice
    assert facts["members"].value.startswith("3: etcd-")
    assert facts["members"].advice == ""
    assert facts["alarms"].value == "none"
    if facts["version"].value.startswith("3.4.23"):
        assert "issue 15247" in facts["version"].advice
        assert "issue 20418" in facts["version"].advice
        assert "CVE-2026-33413" in facts["version"].advice
    assert "require a login" in facts["users"].advice


async def test_doctor_warns_of_a_single_member(guarded: Etcd) -> None:
    async with opened(url_of_app(guarded)) as backend:
        facts = facts_by_name(await backend.describe())
    assert facts["members"].value.startswith("1: ")
    assert "run three members" in facts["members"].advice
    assert facts["users"].value == "this program has logged in"


async def test_a_majority_that_is_lost_is_unavailable(name: str) -> None:
    with private(EtcdCluster) as cluster:
        async with opened(cluster.url, "timeout=1") as backend:
            grant = await granted(backend.leases, name, ttl=20.0)
            left = cluster.leader()
            for node in cluster.nodes:
                if node is not left:
                    node.kill()
            with pytest.raises(Unavailable):
                await backend.leases.renew([grant], 20.0)
            with pytest.raises(Unavailable):
                await backend.leases.inspect(name)
            cluster.start()
            cluster.leader()
            await until_granted(backend.leases, grant)
            assert isinstance(await backend.leases.inspect(name), HeldBy)


async def until_granted(leases: etcd.EtcdLeases, grant: tenure.ports.Grant) -> None:
    async with asyncio.timeout(15):
        while not isinstance(answer := await renewed(leases, grant, 20.0), Granted):
            assert not isinstance(answer, Lost)
