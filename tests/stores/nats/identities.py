"""Keys of NATS's operators, accounts and users, and the tokens (JWT) that they sign."""

from __future__ import annotations

import base64
import json
import os
import time
from dataclasses import dataclass
from typing import Any

import nkeys


@dataclass(frozen=True)
class Identity:
    """The key of an operator, an account or a user."""

    seed: str
    name: str
    """The public key."""

    @classmethod
    def new(cls, kind: int) -> Identity:
        seed = bytes(nkeys.encode_seed(os.urandom(32), kind))
        return cls(seed.decode(), nkeys.from_seed(bytearray(seed)).public_key.decode())

    def issue(self, subject: Identity | str, claims: dict[str, Any], **more: Any) -> str:
        """Return a JWT for *subject*, signed with this key, by the rules of NATS's ``jwt`` library, version 2.

        Args:
            subject: The identity, or its public key.
            claims: What NATS calls so.
            more: Facts beside them, such as the audience ``aud``, or the end ``exp`` in Unix seconds.
        """
        name = subject if isinstance(subject, str) else subject.name
        facts = {
            "jti": base64.b32encode(os.urandom(10)).decode(),
            "iat": int(time.time()),
            "iss": self.name,
            "name": name,
            "sub": name,
            "nats": {"version": 2, **claims},
            **more,
        }
        signed = f"{_encoded({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{_encoded(facts)}"
        signature = nkeys.from_seed(bytearray(self.seed.encode())).sign(signed.encode())
        return f"{signed}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


def _encoded(part: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(part, separators=(",", ":")).encode()).rstrip(b"=").decode()
