"""The SQL files of the folder ``sql``, with the schema's name in place, and the settings of their plans."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

VERSION = 7
"""The version of the schema that this code works with."""


@cache
def text_of(file: str, schema: str) -> str:
    """Return a file of the folder ``sql``, for the tables in *schema*."""
    text = resources.files(__package__).joinpath("sql", file).read_text(encoding="utf-8")
    return text.replace("{schema}", schema)


def works_with(schema: str) -> str:
    """Return the query for the oldest version of the code that works with the schema as it is."""
    # By way of jsonb, as not each version has the column.
    oldest = "pg_catalog.jsonb_extract_path_text(pg_catalog.to_jsonb(newest), 'oldest')"
    return (
        f"SELECT coalesce({oldest}::integer, newest.version) "
        f"FROM {schema}.migration AS newest ORDER BY version DESC LIMIT 1"
    )


PLANS = tuple(
    f"{name} = {value}"
    for name, value in {
        "plan_cache_mode": "force_generic_plan",
        "enable_seqscan": "off",
        "enable_bitmapscan": "off",
        "enable_hashjoin": "off",
        "enable_mergejoin": "off",
        "jit": "off",
    }.items()
)
"""With these settings, each statement about queues has one plan. Without them, the planner would take a bad one when
its statistics are of a time when the table was empty and it is full now, or the reverse."""

SEARCH_PATH = "search_path = pg_catalog, pg_temp"
"""With this setting, names are PostgreSQL's own. Otherwise a function or an operator of another user, in a schema on
the caller's search path, is called with the caller's rights if it fits the types of a call better.

It would cost most of the client's own statements a round trip: in these, names are qualified where something might fit
better."""


@cache
def statements(file: str, schema: str) -> dict[str, str]:
    """Return the statements of *file* by the name in the comment above each."""
    blocks = re.split(r"^-- name: (\w+)\n", text_of(file, schema), flags=re.MULTILINE)
    return dict(zip(blocks[1::2], (block.strip().rstrip(";") for block in blocks[2::2]), strict=True))


def milliseconds(seconds: float) -> str:
    """Return a time limit for the server: a little shorter, so that its answer comes before the client gives up."""
    return str(max(1, int(seconds * 900)))
