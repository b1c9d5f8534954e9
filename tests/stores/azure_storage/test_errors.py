"""Errors of Azure's client, translated; and logins that outlast the request that began them."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("azure.storage.blob")

from azure.core.credentials import AccessToken
from azure.core.exceptions import (
    ClientAuthenticationError,
    HttpResponseError,
    ServiceRequestError,
    ServiceResponseError,
)

from tenure._backends.azure_storage.client import SharedLogin, translate
from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable

URL = Url.parse("azure://mine?sv=2024&sig=c2VjcmV0")


def refused(status: int, code: str) -> HttpResponseError:
    error = HttpResponseError("Signature did not match. String to sign used was c2VjcmV0")
    error.status_code = status
    error.error_code = code  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (TimeoutError(), Unavailable, "no answer within 5 s"),
        (refused(403, "AuthorizationPermissionMismatch"), ConfigError, "Storage Blob Data Contributor"),
        (refused(403, "AuthenticationFailed"), ConfigError, "refused the login: AuthenticationFailed; check the key"),
        (refused(403, "SomethingNew"), ConfigError, "SomethingNew"),
        (refused(503, "ServerBusy"), Unavailable, "status 503, ServerBusy"),
        (refused(500, ""), Unavailable, "status 500, no code"),
        (ClientAuthenticationError("a long letter"), ConfigError, "az login"),
        (ServiceRequestError("c2VjcmV0"), Unavailable, "can't be reached"),
        (ServiceResponseError("c2VjcmV0"), Unavailable, "closed the connection"),
        (OSError("c2VjcmV0"), Unavailable, "failed: OSError"),
    ],
)
def test_errors_have_advice_and_no_secret(error: Exception, kind: type[TenureError], says: str) -> None:
    translated = translate(error, URL, 5.0, worked=False)
    assert type(translated) is kind
    assert says in str(translated)
    assert "c2VjcmV0" not in str(translated)
    later = translate(error, URL, 5.0, worked=True)
    assert type(later) is Unavailable, "what has worked may work again"


def test_a_bug_is_not_translated() -> None:
    with pytest.raises(AssertionError):
        translate(TypeError("ours"), URL, 5.0, worked=False)


class Slow:
    """A slow login."""

    def __init__(self) -> None:
        self.asked = 0
        self.done = asyncio.Event()

    async def get_token(self, *scopes: str) -> AccessToken:
        self.asked += 1
        await self.done.wait()
        return AccessToken("token", 1)


async def test_a_login_outlasts_its_request() -> None:
    slow = Slow()
    async with SharedLogin(slow) as patient:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(patient.get_token("scope"), 0.01)
        slow.done.set()
        assert (await patient.get_token("scope")).token == "token"
        assert slow.asked == 1
        await patient.get_token("scope")
        assert slow.asked == 2  # the next request logs in again
