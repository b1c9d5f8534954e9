"""The errors of NATS, of its client and of JetStream, translated in one function."""

from __future__ import annotations

from dataclasses import replace

import nats.errors

from tenure._backends.nats.address import Address
from tenure._backends.nats.login_files import BadLoginFile
from tenure._connect_failures import Target
from tenure._foreign import digits, read_or
from tenure._redaction import redacted, redacting
from tenure._tls_failures import OwnCertificate, TlsAdvice
from tenure.errors import ConfigError, TenureError, Unavailable

# Codes of JetStream's errors
NO_STREAM, NO_CONSUMER, NO_MESSAGE = 10_059, 10_014, 10_037
STREAM_EXISTS, SUBJECTS_TAKEN, NOT_ENABLED, NOT_ENABLED_HERE = 10_058, 10_065, 10_076, 10_039
WRONG_SEQUENCE, SUBJECT_IN_PROCESS, ID_IN_PROCESS = 10_071, 10_164, 10_158
NO_LEADER, NO_RESOURCES, NO_STORAGE, NO_MEMORY, FULL = 10_008, 10_023, 10_047, 10_028, 10_077
REPLICAS_WITHOUT_CLUSTER, NO_PEERS = 10_074, 10_005
LONG_MESSAGE, LONG_HEADERS = 10_054, 10_097


class Refusal(Exception):
    """JetStream refused a request.

    Args:
        code: The code of JetStream, such as 10059.
        text: The reason, as written by the server.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Disconnected(Exception):
    """The connection was lost while the request was under way, or before; *args* says why."""


class NotPermitted(Exception):
    """The server does not permit the user a subject; *args* has its words."""


class WrongConsumer(Exception):
    """Somebody has changed the consumer of a queue, and it can't be set back; *args* says what."""


class TooLarge(Exception):
    """A message can't be stored again: with the headers that it needs, it is larger than the server takes.

    Its text is what the server has answered, if it was asked.
    """


class HeadersTooLong(TooLarge):
    """The headers of a message leave no room for what must be noted with it, however large messages may be."""


class HandshakeFailed(Exception):
    """TLS with *server* has failed; the cause says why."""

    def __init__(self, server: str) -> None:
        super().__init__(server)
        self.server = server


class BadAnswer(Exception):
    """An answer can't be JetStream's: another program has given it, or changed it; *args* says what is wrong."""


class NoJetStream(Exception):
    """Nothing answers to requests for JetStream: it is not enabled, or not for this user, or for this domain.

    Its text is the subject of the request, if that is known.
    """


def is_login_refused(error: Exception) -> bool:
    """Whether the server refuses the login, or has ended a connection because the login is over."""
    text = str(error).lower()
    return isinstance(error, nats.errors.Error | Disconnected) and ("authoriz" in text or "authent" in text)


def is_wrong_sequence(error: Refusal) -> bool:
    """Whether a write was refused because the subject's last message is another."""
    return error.code == WRONG_SEQUENCE


def last_in(error: Refusal) -> int | None:
    """Return the number of the subject's last message, as such a refusal tells it; None if it doesn't."""
    return read_or(digits, error.text.rpartition(" ")[2], None)


def is_too_large(error: Refusal) -> bool:
    """Whether a write was refused for its size, or for that of its headers."""
    return error.code in (LONG_MESSAGE, LONG_HEADERS)


def is_undecided(error: Refusal) -> bool:
    """Whether a write was refused because one with its subject or id is not on enough replicas yet, and may never be.

    So nobody knows yet whether the message is a second one.
    """
    return error.code in (SUBJECT_IN_PROCESS, ID_IN_PROCESS)


_PLAIN = "turn TLS on there; or, if clear text is meant, remove tls, ca, cert and key from the URL"


@redacting
def translate(
    error: Exception,
    address: Address,
    within: float,
    *,
    worked: bool,
    own: OwnCertificate | None = None,
    timeout: float | None = None,
    source: str = "",
) -> TenureError:
    """Turn an error of the client, of the connection or of JetStream at *address* into one of ours.

    A permanent error is a ``ConfigError``, unless the client *worked* before: then the servers are being changed, and
    may work again.
    """
    target = Target(
        address,
        ",".join(address.servers),
        worked=worked,
        software="NATS",
        tls=TlsAdvice(plain=_PLAIN, own=own),
        timeout=timeout,
        source=source,
    )
    lasting = target.lasting
    text = str(error).removeprefix("nats: ").strip("'") or type(error).__name__
    said = redacted(text)
    match error:
        case Refusal():
            return _refusal(error, address, target)
        case NotPermitted():
            return target.not_permitted(said, "see docs/nats.md for the subjects")
        case WrongConsumer():
            return lasting(f"on {address}, the {said}")
        case BadLoginFile():
            return lasting(f"{text}, so there is no login for {address}")
        case NoJetStream():
            asked = f": nothing answers to {str(error)!r}" if str(error) else ""
            return lasting(
                f"{address} has no JetStream for this user{asked}; start it with -js, enable it for the account, "
                "let the account import what is missing, or name its domain by the option domain"
            )
        case TooLarge():
            said = f": {error}" if str(error) else ""
            return Unavailable(
                f"a message is too large to be stored again on {address}, as it must be unless it is completed at its "
                f"first delivery{said}; raise max_payload there, and max_msg_size of its stream, if that has one"
            )
        case BadAnswer():
            return Unavailable(
                f"{address} gave an answer that can't be JetStream's: {said}; the request may have been executed; "
                "check which programs may publish to the subjects of answers (_INBOX.>)"
            )
        case nats.errors.MaxPayloadError():
            return ConfigError(
                f"the message is larger than {address} takes, headers included; raise max_payload there, or send less"
            )
        case nats.errors.TimeoutError() | TimeoutError():
            return target.no_answer(within)
        case nats.errors.Error() if is_login_refused(error):
            return target.login_refused(said, "check user, password, token, creds or nkey in the URL")
        case HandshakeFailed():
            failed = replace(target, at=error.server).failure(error)
            return failed or Unavailable(f"the TLS handshake with {error.server} failed: {error.__cause__}")
        case OSError():
            return target.unreachable(error)
        case Disconnected() | nats.errors.Error():
            return target.closed(said)
    raise AssertionError("translate() got an error that is not the client's") from error  # a TypeError is a bug


def _refusal(error: Refusal, address: Address, target: Target) -> TenureError:
    said = f"{redacted(error.text)} (code {error.code})"
    if error.code in (NOT_ENABLED, NOT_ENABLED_HERE):
        return target.lasting(
            f"{address} has no JetStream for this user: {said}; enable it for the account, or start it with -js"
        )
    if error.code == REPLICAS_WITHOUT_CLUSTER:
        return ConfigError(f"{address} can't keep a stream on so many servers: {said}; lower the option replicas")
    if error.code == NO_PEERS:  # perhaps the others are just being started
        return Unavailable(
            f"{address} has too few servers at present to keep a stream on so many: {said}; start those that are down, "
            "or lower the option replicas"
        )
    if error.code == SUBJECTS_TAKEN:
        return ConfigError(
            f"{address} has another stream with tenure's subjects: {said}; name another prefix in the URL, or remove "
            "that stream"
        )
    if error.code in (NO_RESOURCES, NO_STORAGE, NO_MEMORY, FULL):
        return Unavailable(f"{address} is full, and stored nothing: {said}; raise its limits, or remove messages")
    if is_too_large(error):
        return Unavailable(
            f"{address} takes no message of this size: {said}; send less, or raise max_msg_size of its stream"
        )
    if is_undecided(error):
        return Unavailable(
            f"{address} has not decided about an earlier write of this message: {said}; check whether enough of its "
            "servers run"
        )
    if error.code == NO_LEADER:
        return Unavailable(f"{address} has no leader for this at present: {said}; check its servers")
    return Unavailable(f"{address} refused the request: {said}")
