"""A Redis Sentinel: monitors one primary, and promotes its replica when the primary is down."""

from __future__ import annotations

from collections.abc import Sequence

from tests.servers.certificates import Authority
from tests.servers.redis import Redis

DOWN_AFTER = 300
"""Milliseconds of silence after which a primary is considered down."""


class Sentinel(Redis):
    """A sentinel that decides alone.

    Args:
        watches: The port of the primary.
        service: Its name.
        password: Of the sentinel itself.
        primary_password: Of the primary, and of its replica.
        authority: Issues its certificate; it then uses TLS only, also with them.
    """

    scheme = "redis+sentinel"

    def __init__(
        self,
        watches: int,
        *,
        service: str = "mymaster",
        password: str = "",
        primary_password: str = "",
        authority: Authority | None = None,
    ) -> None:
        super().__init__(password=password, authority=authority)
        self.watches = watches
        self.service = service
        self.primary_password = primary_password

    def prepare(self) -> None:
        lines = [("bind", "127.0.0.1"), ("dir", str(self.folder)), ("set-proc-title", "no")]
        lines += [("port", "0" if self.authority else str(self.port)), *self.tls()]
        if self.password:
            lines.append(("requirepass", self.password))
        lines += [
            ("sentinel monitor", f"{self.service} 127.0.0.1 {self.watches} 1"),
            ("sentinel down-after-milliseconds", f"{self.service} {DOWN_AFTER}"),
            ("sentinel failover-timeout", f"{self.service} 2000"),
        ]
        if self.primary_password:
            lines.append(("sentinel auth-pass", f"{self.service} {self.primary_password}"))
        self.write("redis.conf", "".join(f"{name} {value}\n" for name, value in lines))

    def argv(self) -> Sequence[str]:
        return [*super().argv(), "--sentinel"]

    @property
    def url(self) -> str:
        return f"{'rediss' if self.authority else 'redis'}+sentinel://127.0.0.1:{self.port}/{self.service}"
