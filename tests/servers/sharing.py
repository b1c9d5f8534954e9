"""One server of a kind for all tests of a process, one given by URL instead, or a private one that may be disturbed.

With pytest-xdist, each worker has its own: they start in well under a second, and need no coordination.
"""

from __future__ import annotations

import atexit
import os
import re
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar, cast

import pytest

from tests.absent import skip_or_fail
from tests.durations import ANSWERED_WITHIN

NO_SERVERS = "TENURE_TEST_NO_SERVERS"
"""Set in the environment of ``make quick``, whose tests start none."""


class Startable(Protocol):
    """A server that can be shared: a ``Server``, or several under one name."""

    install: ClassVar[str]
    scheme: ClassVar[str]

    @classmethod
    def missing(cls) -> str: ...

    def start(self) -> Self: ...

    def stop(self) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...

    @property
    def folder(self) -> Path: ...

    @property
    def url(self) -> str: ...


S = TypeVar("S", bound=Startable)

_running: dict[tuple[type[Any], tuple[str, ...]], Any] = {}


def url_of(kind: type[S]) -> str:
    """Return the URL of a shared server of this *kind*: the one given by the environment, or this process's."""
    return os.environ.get(f"TENURE_TEST_{kind.scheme.upper()}_URL") or shared(kind).url


def patient(url: str) -> str:
    """Return the *url* of a store with a time limit for answers that a busy machine keeps, unless it has one.

    A connection that is lost or refused is noticed at once; only a server that is silent is waited for longer.
    """
    if re.search(r"[?&]timeout=", url):
        return url
    return f"{url}{'&' if '?' in url else '?'}timeout={ANSWERED_WITHIN:g}"


def shared(kind: type[S], **options: Any) -> S:
    """Return this process's server of *kind* with such *options*, started when first needed.

    A test that disturbs it must restore it.
    """
    key = (kind, tuple(f"{name}={value!r}" for name, value in sorted(options.items())))
    if key not in _running:
        if not _running:
            atexit.register(_close_all, os.getpid())
        _running[key] = private(kind, **options)
    return cast(S, _running[key])


def require(kind: type[Startable]) -> None:
    """Skip the test where there can be no server of this *kind*, or fail it if nothing may be missing."""
    if os.environ.get(NO_SERVERS):
        pytest.fail("a test of `make quick` starts no server; name it in NOT_QUICK (tests/targets.py)", pytrace=False)
    if reason := kind.missing():
        skip_or_fail(f"{reason}; to run this test, install {kind.install}")


def private(kind: type[S], **options: Any) -> S:
    """Return a new server of *kind*, started; close it, or use it in a ``with`` block."""
    require(kind)
    server = kind(**options)
    try:
        return server.start()
    except BaseException:
        server.close()
        raise


def _close_all(pid: int) -> None:
    if pid == os.getpid():  # not in a fork, to which they don't belong
        for server in _running.values():
            server.close()
