"""The Lua scripts of Redis, put together from the functions that several of them share."""

import re
from collections import Counter

import pytest

from tenure._backends.redis.scripts import LEASES, QUEUES, Script, scripts

FUNCTION = r"^local function (\w+)"
EVERY = [(files, name) for files in (LEASES, QUEUES) for name in scripts(files)]


def every_script() -> list[Script]:
    return [script for files in (LEASES, QUEUES) for script in scripts(files).values()]


def words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", re.sub(r"'[^'\n]*'", "", text)))


@pytest.mark.parametrize(("files", "name"), EVERY)
def test_a_script_defines_each_shared_function_before_it_uses_it(files: tuple[str, ...], name: str) -> None:
    counted = Counter(
        named for script in scripts(files).values() for named in re.findall(FUNCTION, script.text, re.MULTILINE)
    )
    shared = {function for function, count in counted.items() if count > 1}
    known: set[str] = set()
    for part in re.split(r"^(?=local function )", scripts(files)[name].text, flags=re.MULTILINE):
        known.update(re.findall(FUNCTION, part))
        assert words(part) & shared <= known


def test_a_script_has_no_function_that_it_does_not_use() -> None:
    assert "local function" not in scripts(QUEUES)["idle"].text
    assert re.findall(r"local function (\w+)", scripts(QUEUES)["read_state"].text) == ["session_holds"]
    for script in scripts(QUEUES).values():
        for function in re.findall(r"^local function (\w+)", script.text, re.MULTILINE):
            assert len(re.findall(rf"\b{function}\b", script.text)) > 1


def test_comments_are_not_sent() -> None:
    for files in (LEASES, QUEUES):
        assert not [script for script in scripts(files).values() if "--" in script.text]


def test_a_script_reaches_cjson_only_where_its_settings_are_made() -> None:
    made = re.compile(r"^local function json\(\)\n.*?^end\n", re.MULTILINE | re.DOTALL)
    texts = [made.sub("", script.text) for script in every_script()]
    assert not [text for text in texts if "cjson" in text]
    assert any("json()." in text for text in texts)


def test_in_a_cluster_hints_go_to_the_shard() -> None:
    for files in (LEASES, QUEUES):
        texts = [script.text for script in scripts(files, is_cluster=True).values()]
        assert not [text for text in texts if "'PUBLISH'" in text or "'NUMSUB'" in text]
        assert any("'SPUBLISH'" in text for text in texts)
