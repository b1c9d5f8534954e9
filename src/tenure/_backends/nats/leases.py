"""Leases in a key-value bucket of JetStream: one key for each election, which ``nats kv`` can read, too.

House rules:

- A write names the revision that its key must have: the server refuses it if anything was written since. So every verb
  is decided by one write, and one that is executed late, when it was given up long ago, changes nothing that is newer.
- A read grants nothing. It may be old: a server that was cut off from the others still answers as the leader of its
  stream. A write that is made of it is refused then; at worst, a leader takes its claim for lost, and resigns early.
- A candidate claims what it has just seen to be free, and writes after it has read only if the answer can come in time.
  Another write may arrive although no answer does: then its process would keep the name from others, and not know it.
- "Changed meanwhile" is no loss. The key is read again: perhaps that was our own write, whose answer was lost.
- A lease has expired when its record has not been renewed for its own ttl, on our monotonic clock, counted from when
  this process first saw it. A server stamps each message with its own time; the next server to lead the stream may have
  another, and before 2.10 it tells nobody.
- The token is the revision of the write that acquired it.
- Others may write to the bucket. A key with another program's value, or with one that was edited so that it can't be
  right, is taken by nobody: its tokens might fall. It is told, and disturbs no other lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from secrets import token_hex
from weakref import WeakSet

from tenure._backends.nats.client import Client, Json, part_of, stored_in
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.errors import (
    NO_LEADER,
    NO_MESSAGE,
    NO_STREAM,
    NoJetStream,
    NotPermitted,
    Refusal,
    is_wrong_sequence,
)
from tenure._backends.nats.hints import Hints, Renewals
from tenure._backends.nats.lease_records import (
    TTL_MAX,
    TTL_MIN,
    Record,
    acquired,
    asked_to_resign,
    read,
    released,
    renewed,
    written,
)
from tenure._backends.nats.names import is_cut, name_by, short_word_of
from tenure._backends.nats.observations import Observation, Observations
from tenure._election.observed import JUST_SEEN, Promises
from tenure._election.store import Hint, LeaseTraits, require_name, require_ttl, usable_names
from tenure._foreign import a_count, an_object, read_or
from tenure._lease import NO_METADATA, TOKEN_MAX, Grant, Granted, HeldBy, Lost, Metadata, NoAnswer, Released, Vacant
from tenure._runtime.clock import Clock
from tenure._runtime.closing import close_together
from tenure._runtime.together import together
from tenure.errors import ConfigError, TenureError, Unavailable

TRAITS = LeaseTraits(
    ttl_min=TTL_MIN,
    ttl_max=TTL_MAX,
    fencing="native",
    expiry="observed",
    hints=True,
    survives_restart=True,
    tells_remaining=False,
    follows_renewals=True,
)

TRIES = 20
"""How often a verb begins anew after a concurrent change."""
PAUSE = 0.002
"""Seconds by which each such pause is longer than the one before: a replicated write may not be visible yet."""
SERIALIZABLE = (2, 9, 21)
"""Older versions may accept two writes that name the same revision, if the bucket has replicas (issue 4320)."""
HEARD_AFTER = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Seconds to wait, one after the other, until the servers of a cluster know that a new bucket listens."""
READ_AT_ONCE = 200
"""How many keys are read at once, over one connection."""


class ForeignRecord(ConfigError):
    """A key holds what tenure can't have written."""


class NatsLeases:
    """A ``LeaseStore`` in the bucket ``PREFIX-leases``, which is made when the first lease is acquired."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._observed = Observations(clock)
        self._bucket = f"{client.options.prefix}-leases"
        self._stream = f"KV_{self._bucket}"
        self._hints = Hints(client, self._observed, self._bucket, self._has_reports)
        self._renewals = Renewals(client, self._observed, self._bucket, self._has_reports)
        self._promises = Promises()
        self._reports = False
        self._required: WeakSet[Connection] = WeakSet()

    @property
    def traits(self) -> LeaseTraits:
        """What the store can do."""
        return TRAITS

    # --- a new term ---

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        """Claim *name* if it is free; a holder that repeats the request gets the same grant, extended."""
        require_name(name)
        require_name(holder, of="holder")
        require_ttl(ttl, TRAITS)

        async def acquire(connection: Connection) -> Granted | HeldBy:
            seen = self._observed.find(name)
            if seen is None or not self._was_just_released(seen):
                seen = await self._read_in_time(connection, name, ends_at)  # otherwise it is refused if it has changed
            for number in range(TRIES):
                now = self._observed.now
                if seen.record is None or seen.has_expired(now):
                    after = self._observed.newest_token(name)
                    if after == TOKEN_MAX:
                        raise self._foreign(name)
                    self._promises.extend(name, holder, ttl, now=now)
                    record = acquired(name, holder, ttl, metadata, after=after, stamp=_new_stamp())
                elif seen.record.holder == holder:
                    record = self._renewed(seen.record, ttl, recorded=seen.left(now))
                else:
                    return _held_by(seen.record, seen.left(now))
                stored = await self._write(connection, record, seen.revision)
                if stored is not None:
                    return Granted(stored.grant, stored.resign_asked)
                seen = await self._read_again(connection, name, number)
            raise self._changed_too_often(name)

        within = self._patience(ttl)
        ends_at = asyncio.get_running_loop().time() + within
        return await self._client.run(acquire, within=within)

    def _was_just_released(self, seen: Observation) -> bool:
        is_free = seen.record is not None and not seen.record.holder
        return is_free and self._observed.now - seen.since <= JUST_SEEN

    # --- an existing term ---

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        """Extend many claims to *ttl* seconds from now, concurrently over one connection.

        A claim that has expired is renewed, too, if nobody has taken the name since: the write would be refused
        otherwise. Whose record was overwritten gets ``NoAnswer``: nobody else can take the name either.
        """
        require_ttl(ttl, TRAITS)

        async def renew(grant: Grant) -> Granted | Lost | NoAnswer | TenureError:
            try:
                return await self._client.run(
                    lambda connection: self._renew(connection, grant, ttl, ends_at), within=within
                )
            except ForeignRecord as error:
                return NoAnswer(str(error))
            except TenureError as error:
                return error

        within = self._patience(ttl)
        ends_at = asyncio.get_running_loop().time() + within
        answers = await asyncio.gather(*map(renew, grants))
        unanswered = [answer for answer in answers if isinstance(answer, TenureError)]
        if unanswered and len(unanswered) == len(answers):
            raise unanswered[0]
        return [NoAnswer(str(answer)) if isinstance(answer, TenureError) else answer for answer in answers]

    async def _renew(self, connection: Connection, grant: Grant, ttl: float, ends_at: float) -> Granted | Lost:
        seen = self._observed.find(grant.name)
        if seen is None or not _is_about(seen, grant):
            seen = await self._read_in_time(connection, grant.name, ends_at)
        for number in range(TRIES):
            if seen.record is None or seen.record.grant != grant:
                self._promises.end(grant.name, grant.holder)
                return Lost(grant)
            record = self._renewed(seen.record, ttl, recorded=seen.left(self._observed.now))
            stored = await self._write(connection, record, seen.revision)
            if stored is not None:
                return Granted(grant, stored.resign_asked)
            seen = await self._read_again(connection, grant.name, number)
        raise self._changed_too_often(grant.name)

    def _renewed(self, record: Record, ttl: float, *, recorded: float) -> Record:
        left = self._promises.extend(record.name, record.holder, ttl, now=self._observed.now, recorded=recorded)
        return renewed(record, ttl, left=left, stamp=_new_stamp())

    async def release(self, grant: Grant) -> Released | Lost:
        """Release a claim; its token is kept. One that has expired, and nobody took, is released."""
        self._promises.end(grant.name, grant.holder)

        async def release(connection: Connection) -> Released | Lost:
            seen = self._observed.find(grant.name)
            if seen is None or not _is_about(seen, grant):
                seen = await self._read(connection, grant.name)
            for number in range(TRIES):
                if seen.record is None or seen.record.grant != grant:
                    return Lost(grant)
                if await self._write(connection, released(seen.record, stamp=_new_stamp()), seen.revision) is not None:
                    return Released(grant)
                seen = await self._read_again(connection, grant.name, number)
            raise self._changed_too_often(grant.name)

        return await self._client.run(release)

    # --- questions ---

    async def inspect(self, name: str) -> HeldBy | Vacant:
        """Return the holder of *name*, without changing anything. A process that asks for the first time can't know
        whether the holder is still alive, so ``remaining`` is None then."""
        require_name(name)
        seen = await self._client.run(lambda connection: self._read(connection, name))
        return self._told(name, seen, self._observed.now)

    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        """Return the holders of many names, by requests for each key that are sent together.

        The answer to one request for many keys may come from a server that is behind the leader of the stream. A key
        that holds no record of tenure has no holder.
        """
        for name in names:
            require_name(name)
        distinct, seen = list(dict.fromkeys(names)), dict[str, Observation | None]()
        for start in range(0, len(distinct), READ_AT_ONCE):
            some = distinct[start : start + READ_AT_ONCE]
            seen |= zip(some, await self._read_many(some), strict=True)
        now = self._observed.now
        return [self._told(name, seen[name], now) for name in names]

    async def _read_many(self, names: Sequence[str]) -> Sequence[Observation | None]:
        async def look(connection: Connection) -> Sequence[Observation | None]:
            return await together(partial(self._read_any, connection), names, READ_AT_ONCE)

        return await self._client.run(look)

    async def _read_any(self, connection: Connection, name: str) -> Observation | None:
        try:
            return await self._read(connection, name)
        except ForeignRecord:
            return None

    def _told(self, name: str, seen: Observation | None, now: float) -> HeldBy | Vacant:
        if seen is None:
            return Vacant(name, self._observed.newest_token(name))
        if seen.record is None or seen.has_expired(now):
            return Vacant(name, self._observed.newest_token(name), seen.vacant_for(now))
        held = _held_by(seen.record, None if seen.is_first else seen.left(now))
        return replace(held, resign_asked=seen.record.resign_asked)

    async def names(self) -> Sequence[str]:
        """List every name that was ever claimed, sorted."""
        return usable_names(sorted(await self._client.run(self._listed)))

    async def _listed(self, connection: Connection) -> set[str]:
        """Read the list of keys in pages, and the names of those that are cut."""
        names: set[str] = set()
        offset, total = 0, 1
        while offset < total:
            body = {"subjects_filter": f"$KV.{self._bucket}.*", "offset": offset}
            try:
                answer = await self._client.call(connection, f"STREAM.INFO.{self._stream}", body)
            except Refusal as error:
                if error.code == NO_STREAM:
                    return names
                raise
            subjects = read_or(an_object, part_of(answer, "state").get("subjects"), {})
            for subject in subjects:
                key = subject.rpartition(".")[2]
                name = await self._name_in(connection, subject) if is_cut(key) else name_by(key)
                if name is not None:
                    names.add(name)
            offset, total = offset + len(subjects), read_or(a_count, answer.get("total"), 0) if subjects else 0
        return names

    async def _name_in(self, connection: Connection, subject: str) -> str | None:
        body, revision = await self._last(connection, subject)
        record = read(body, revision or 0)
        return record.name if record and subject == self._subject_of(record.name) else None

    async def ask_to_resign(self, name: str) -> bool:
        """Request that the present holder resigns; False if there is none."""
        require_name(name)

        async def ask(connection: Connection) -> bool:
            for number in range(TRIES):
                seen = await self._read_again(connection, name, number - 1)
                if seen.record is None or seen.has_expired(self._observed.now):
                    return False
                if seen.record.resign_asked:
                    return True
                if await self._write(connection, asked_to_resign(seen.record), seen.revision) is not None:
                    return True
            raise self._changed_too_often(name)

        return await self._client.run(ask)

    def hints(self, name: str) -> AsyncIterator[Hint]:
        """Yield when something changed for *name*; a mere renewal gives no hint."""
        require_name(name)
        return self._hints.listen(name)

    def follow_renewals(self, prefix: str) -> AsyncIterator[object]:
        """Note each renewal of the leases whose names begin with *prefix*, if this user may hear of all."""
        return self._renewals.listen(prefix)

    async def close(self) -> None:
        """End every hint."""
        await close_together(self._hints.close, self._renewals.close)

    # --- requests ---

    def _subject_of(self, name: str) -> str:
        return f"$KV.{self._bucket}.{short_word_of(name)}"

    async def _last(self, connection: Connection, subject: str) -> tuple[bytes, int | None]:
        """Return the newest message to *subject*, and its revision.

        The message is empty if there is none, or it was deleted. The revision is None if there is no bucket.
        """
        try:
            answer = await self._client.call(connection, f"STREAM.MSG.GET.{self._stream}", {"last_by_subj": subject})
        except Refusal as error:
            if error.code in (NO_STREAM, NO_MESSAGE):
                return b"", None if error.code == NO_STREAM else 0
            raise
        one = stored_in(answer)
        return one.body, one.number

    async def _read(self, connection: Connection, name: str) -> Observation:
        """Read the record of *name*.

        Raises:
            ForeignRecord: Another program has written its key.
        """
        body, revision = await self._last(connection, self._subject_of(name))
        if not body or revision is None:
            return self._observed.note_missing(name, revision)
        record = read(body, revision)
        if record is None or record.name != name:
            self._observed.doubt(name)
            raise self._foreign(name)
        return self._observed.note(record, revision)

    async def _read_in_time(self, connection: Connection, name: str, ends_at: float) -> Observation:
        """Read the record of *name*, to write it then.

        Raises:
            Unavailable: If the write takes as long, its answer comes after *ends_at*, by the clock of the loop.
        """
        now = asyncio.get_running_loop().time
        began = now()
        seen = await self._read(connection, name)
        took = now() - began
        if began + 2 * took > ends_at:
            raise Unavailable(
                f"{self._client.address} took {took:.3g} s to answer, so the lease {name!r} is not asked for: the next "
                "answer would come too late; tenure tries again"
            )
        return seen

    def _foreign(self, name: str) -> ForeignRecord:
        key = short_word_of(name)
        return ForeignRecord(
            f"the key {key!r} of the bucket {self._bucket!r} on {self._client.address} holds no record of tenure: "
            f"another program has written it; delete that key (nats kv del {self._bucket} {key}), or name another "
            "prefix in the URL"
        )

    async def _read_again(self, connection: Connection, name: str, number: int) -> Observation:
        """Read it after so many refused writes."""
        if number > 0:
            await asyncio.sleep(number * PAUSE)
        return await self._read(connection, name)

    async def _write(self, connection: Connection, record: Record, last: int | None) -> Record | None:
        """Write a record, and return it as stored; None if another message than *last* is the newest of its key."""
        if connection.version < SERIALIZABLE and connection not in self._required:
            await self._require_one_replica(connection)
        if last is None:  # don't rely on the server to say so: anybody may listen to the key, as `nats sub ">"` does
            await self._make_bucket(connection)
        try:
            revision = await self._put(connection, record, last or 0)
        except BaseException:
            self._observed.doubt(record.name)
            raise
        if revision is None:
            return None
        stored = record.at(revision)
        self._observed.note(stored, revision)
        return stored

    async def _put(self, connection: Connection, record: Record, last: int) -> int | None:
        """Publish a record, and return its revision; None if it was refused, or there is no bucket."""
        subject = self._subject_of(record.name)
        if self._client.options.domain:  # requests of JetStream lead there
            subject = f"{self._client.api}.{subject}"
        for pause in HEARD_AFTER:
            await asyncio.sleep(pause)
            try:
                answer = await self._client.store(connection, self._stream, subject, written(record), last=last)
            except Refusal as error:
                if is_wrong_sequence(error):
                    return None
                raise
            except NoJetStream:
                if last:
                    return None  # the bucket was deleted, or has no leader: reading it will tell
            else:
                return int(answer["seq"])
        raise Refusal(NO_LEADER, f"no server takes {subject!r}, or this user's account does not import it")

    async def _require_one_replica(self, connection: Connection) -> None:
        """Refuse a bucket that is kept on several servers, of a version on which one name may be granted twice."""
        replicas = self._client.options.replicas
        try:
            answer = await self._client.call(connection, f"STREAM.INFO.{self._stream}")
            replicas = read_or(a_count, part_of(answer, "config").get("num_replicas"), 1)
        except Refusal as error:
            if error.code != NO_STREAM:
                raise
        if replicas > 1:
            raise ConfigError(
                f"{self._client.address} runs NATS {'.'.join(map(str, connection.version))}, which may grant one name "
                f"to two candidates if the bucket {self._bucket!r} has replicas, and it has {replicas} (nats-server "
                "issue 4320); upgrade to 2.9.21 or newer, or keep it on one server (replicas=1)"
            )
        self._required.add(connection)

    async def _has_reports(self, connection: Connection) -> bool:
        """Return whether the bucket reports what it stores; also if it isn't made yet."""
        if not self._reports:
            try:
                answer = await self._client.call(connection, f"STREAM.INFO.{self._stream}")
            except Refusal as error:
                if error.code != NO_STREAM:
                    raise
                return True
            config = part_of(answer, "config")
            self._reports = is_reporting(config, self._bucket)
            if self._reports and takes_rollup(config):  # an older version of tenure has made it
                await self._refuse_rollup(connection, config)
        return self._reports

    async def _refuse_rollup(self, connection: Connection, config: Json) -> None:
        """Let the bucket refuse ``Nats-Rollup``, if this user may change it; otherwise ``doctor`` tells."""
        with suppress(Refusal, NotPermitted, NoJetStream):
            await self._client.call(connection, f"STREAM.UPDATE.{self._stream}", {**config, "allow_rollup_hdrs": False})

    async def _make_bucket(self, connection: Connection) -> None:
        """Make the bucket as other clients of NATS do, but for roll-ups, unless it is there."""
        settings: Json = {
            "name": self._stream,
            "subjects": [f"$KV.{self._bucket}.>"],
            "retention": "limits",
            "discard": "new",
            "max_msgs_per_subject": 1,
            "max_msgs": -1,
            "max_bytes": -1,
            "max_age": 0,
            "max_msg_size": -1,
            "max_consumers": -1,
            "storage": "file",
            "num_replicas": self._client.options.replicas,
            "duplicate_window": 120 * 10**9,
            "allow_rollup_hdrs": False,  # who may write to one key could empty the bucket (Nats-Rollup: all)
            "deny_delete": True,
            "deny_purge": False,
            "allow_direct": True,
            "republish": {"src": f"$KV.{self._bucket}.>", "dest": f"{self._bucket}.>"},
        }
        await self._client.make_stream(connection, settings)

    def _patience(self, ttl: float) -> float:
        """Return the seconds to wait for an answer about a lease of *ttl* seconds: there must be time to repeat it."""
        return min(self._client.options.timeout, max(1.0, ttl / 3))

    def _changed_too_often(self, name: str) -> Unavailable:
        return Unavailable(
            f"the lease {name!r} was changed {TRIES} times while it was written, or {self._client.address} has no "
            f"leader for the bucket {self._bucket!r}, or this user's account does not import "
            f"{self._subject_of(name)!r}; tenure tries again"
        )


def is_reporting(config: Json, bucket: str) -> bool:
    """Return whether a *bucket* with this configuration reports what it stores, as hints need it."""
    found = read_or(an_object, config.get("republish"), {})
    return found.get("dest") == f"{bucket}.>" and not found.get("headers_only")


def takes_rollup(config: Json) -> bool:
    """Return whether one message may empty a whole stream with this configuration: by its header ``Nats-Rollup``."""
    return config.get("allow_rollup_hdrs") is True


def _new_stamp() -> str:
    return token_hex(8)


def _is_about(seen: Observation, grant: Grant) -> bool:
    return seen.record is not None and seen.record.grant == grant


def _held_by(record: Record, remaining: float | None) -> HeldBy:
    return HeldBy(record.name, record.holder, record.token, remaining, record.metadata)
