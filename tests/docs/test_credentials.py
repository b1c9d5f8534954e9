"""The recipes for logins that change, run with stand-ins for the libraries of the clouds."""

from __future__ import annotations

import re
import sys
import time
from datetime import UTC, datetime, timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("asyncpg")
pytest.importorskip("redis")

import tenure
from tenure._logins import Given
from tests.docs.pages import broken_links, text_of

PAGE = "docs/credentials.md"
RECIPES: dict[str, str] = dict(
    re.findall(r"^<!-- example: ([\w-]+) -->\n```python\n(.*?)^```$", text_of(PAGE), re.MULTILINE | re.DOTALL)
)
LASTS = 600.0


class Identity:
    """Of Azure, and of Google."""

    token = "the token"
    expiry: datetime

    def get_token(self, scope: str) -> Any:
        assert scope.endswith("/.default")
        return SimpleNamespace(token=self.token, expires_on=time.time() + LASTS)

    def refresh(self, request: object) -> None:
        self.expiry = datetime.now(UTC).replace(tzinfo=None) + timedelta(seconds=LASTS)


class Signer:
    def __init__(self, *arguments: object) -> None:
        assert arguments[1:4] == ("eu-west-1", "elasticache", "v4")

    def generate_presigned_url(self, request: dict[str, Any], **more: object) -> str:
        assert more == {"operation_name": "connect", "expires_in": LASTS * 1.5, "region_name": "eu-west-1"}
        return f"{request['url']}&X-Amz-Signature=1"


def module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(content)
    return made


@pytest.fixture(autouse=True)
def _clouds(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = SimpleNamespace(generate_db_auth_token=lambda **named: f"{named['DBHostname']}?{named['DBUsername']}")
    answers = {"lease_duration": LASTS, "data": {"username": "v-worker-1", "password": "the token"}}
    database = SimpleNamespace(generate_credentials=lambda name: answers)
    google = module("google.auth", default=lambda scopes: (Identity(), "a project"))
    for made in (
        module(
            "boto3",
            client=lambda name, **named: tokens,
            Session=lambda **named: SimpleNamespace(get_credentials=dict, events=None),
        ),
        module("botocore"),
        module("botocore.model", ServiceId=str),
        module("botocore.signers", RequestSigner=Signer),
        module("azure.identity", DefaultAzureCredential=Identity),
        module("google", auth=google),
        google,
        module("google.auth.transport"),
        module("google.auth.transport.requests", Request=object),
        module("hvac", Client=lambda: SimpleNamespace(secrets=SimpleNamespace(database=database))),
    ):
        monkeypatch.setitem(sys.modules, made.__name__, made)


FOUND = {
    "rds": ("worker", "shop.abc123.eu-west-1.rds.amazonaws.com?worker", None),
    "elasticache": ("worker", "shop-cache/?Action=connect&User=worker&X-Amz-Signature=1", LASTS * 1.5),
    "azure-postgresql": ("worker-identity", "the token", LASTS),
    "azure-redis": ("11111111-2222-3333-4444-555555555555", "the token", LASTS),
    "cloud-sql": ("worker@project.iam", "the token", LASTS),
    "vault": ("v-worker-1", "the token", LASTS),
}


@pytest.mark.parametrize("recipe", FOUND)
async def test_a_recipe_gives_a_login(recipe: str) -> None:
    user, password, lasts = FOUND[recipe]
    names: dict[str, Any] = {}
    exec(compile(RECIPES[recipe], f"{PAGE}, {recipe}", "exec"), names)
    assert isinstance(names["backend"], tenure.Backend)
    found = names["credentials"]()
    assert (found.user, found.secret.reveal()) == (user, password)
    assert found.lasts == (None if lasts is None else pytest.approx(lasts, abs=60.0))


def test_every_recipe_is_run() -> None:
    assert set(RECIPES) == {"function", *FOUND}
    assert text_of(PAGE).count("```python") == len(RECIPES)


async def test_the_function_of_the_page_reads_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    file = tmp_path / "db"
    file.write_text("hush\n")
    names: dict[str, Any] = {}
    exec(compile(RECIPES["function"].replace("/run/secrets/db", str(file)), PAGE, "exec"), names)
    assert names["credentials"]() == tenure.Credentials("hush", user="worker")
    assert Given.keeps == 0.0, "it is asked for each new connection"


def test_links_lead_somewhere() -> None:
    assert broken_links(PAGE) == []
