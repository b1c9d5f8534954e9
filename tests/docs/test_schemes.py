"""Every URL scheme in documents and source files has a backend."""

from __future__ import annotations

import re
from pathlib import Path

from tenure._registry import BACKENDS

ROOT = Path(__file__).resolve().parents[2]
OTHERS = {"http", "https", "postgresql+psycopg", "sb"}
"""Schemes that name no store: addresses on the web, SQLAlchemy's own ``postgresql+psycopg``, and ``sb`` inside of
connection strings for Service Bus."""


def test_every_scheme_that_is_named_has_a_backend() -> None:
    pages = [
        *ROOT.glob("*.md"),
        *(page for folder in ("docs", "examples", "src") for page in (ROOT / folder).rglob("*")),
    ]
    named = {
        (scheme, str(page.relative_to(ROOT)))
        for page in pages
        if page.suffix in {".md", ".py", ".sql", ".lua"}
        for scheme in re.findall(r"([a-z]+(?:\+[a-z]+)?)://", page.read_text())
    }
    assert len(named) > 50
    assert {(scheme, page) for scheme, page in named if scheme not in BACKENDS and scheme not in OTHERS} == set()
