"""``tenure partitions``, on an SQLite file: its tables, JSON and errors; and lists of elections beside groups."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import tenure.sync
from tenure._overview import in_ranges
from tenure.cli import main
from tests.sharing import sharing

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    monkeypatch.setenv("TENURE_URL", url)
    return url


def run_cli(capsys: Captured, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    return (code, *capsys.readouterr())


def cells(out: str) -> list[list[str]]:
    return [re.split(r"\s\s+", line) for line in out.splitlines()]


def test_groups_and_members_are_listed(url: str, capsys: Captured) -> None:
    with sharing(url, partitions=5), sharing(url, "bills", ["us", "eu"], ["joe"]):
        code, out, err = run_cli(capsys, "partitions")
        assert (code, err) == (0, "")
        assert cells(out) == [
            ["GROUP", "PARTITIONS", "OWNED", "MEMBERS", "BALANCED"],
            ["bills", "2", "2", "1", "yes"],
            ["orders", "5", "5", "2", "yes"],
        ]
        code, out, err = run_cli(capsys, "partitions", "orders")
        assert (code, err) == (0, "")
        titles, ann, bob = cells(out)
        assert titles == ["MEMBER", "WEIGHT", "OWNED", "PARTITIONS", "METADATA"]
        assert re.fullmatch("ann-[0-9a-f]{16}", ann[0].split()[0])
        assert (ann[-3], ann[-1]) == ("3 of 3", "addr=ann:1")
        assert (bob[-3], bob[-1]) == ("2 of 2", "addr=bob:1")
        # Whether it was asked or looked by itself decides which partitions the first member has given.
        assert (ann[-2], bob[-2]) in (("1-3", "0, 4"), ("0-2", "3-4"))
        assert cells(run_cli(capsys, "partitions", "bills")[1])[1][-2] == "eu, us"


def test_the_json_has_the_same(url: str, capsys: Captured) -> None:
    with sharing(url):
        code, out, err = run_cli(capsys, "partitions", "--json")
        assert (code, err) == (0, "")
        assert json.loads(out) == [{"name": "orders", "partitions": 4, "owned": 4, "members": 2, "balanced": True}]
        group = json.loads(run_cli(capsys, "partitions", "orders", "--json")[1])
    assert (group["name"], group["balanced"]) == ("orders", True)
    ann, bob = group["members"]
    assert (ann["weight"], ann["share"], ann["metadata"]) == (1, 2, {"addr": "ann:1"})
    assert sorted(ann["owned"] + bob["owned"]) == [one["partition"] for one in group["partitions"]]
    for one in group["partitions"]:
        member = ann if one["partition"] in ann["owned"] else bob
        assert one["owner"].startswith(f"{member['identity']}-")
        assert 0 < one["remaining"] <= 5


def test_partitions_without_an_owner_are_listed_last(url: str, capsys: Captured) -> None:
    with sharing(url, labels=["ann"]):
        pass
    assert cells(run_cli(capsys, "partitions")[1])[1] == ["orders", "4", "0", "0", "no"]
    code, out, err = run_cli(capsys, "partitions", "orders")
    assert (code, err) == (0, "")
    assert cells(out)[1:] == [["(none)", "4", "0-3"]]
    assert json.loads(run_cli(capsys, "partitions", "orders", "--json")[1])["partitions"][3] == {
        "partition": "partition-3",
        "owner": None,
        "token": None,
        "remaining": None,
    }


def test_owners_that_are_no_members_are_listed_below_them(url: str, capsys: Captured) -> None:
    with sharing(url, labels=["ann"]):
        pass
    old = f"old-{'0' * 16}"
    with tenure.sync.connect(url) as backend, backend.election("orders.partition-2", label=old).campaign():
        assert cells(run_cli(capsys, "partitions", "orders")[1])[1:] == [
            [old, "1, no member", "2"],
            ["(none)", "3", "0-1, 3"],
        ]


def test_lists_of_elections_leave_them_out(url: str, capsys: Captured) -> None:
    with tenure.sync.connect(url) as backend, backend.election("orders.report").campaign(), sharing(url):
        code, out, err = run_cli(capsys, "status")
        assert (code, err) == (0, "tenure: 1 group of partitions not shown; see: tenure partitions\n")
        assert [line[0].split()[0] for line in cells(out)] == ["NAME", "orders.report"]
        assert [one["name"] for one in json.loads(run_cli(capsys, "status", "--json")[1])] == ["orders.report"]
        code, out, err = run_cli(capsys, "status", "orders.partition-1")
        assert (code, err) == (0, "")
        assert "orders.partition-1" in out
    code, out, err = run_cli(capsys, "status", "--all")
    assert (code, "1 group of partitions" in err) == (3, True)
    assert "partition" not in out


def test_a_store_without_groups_has_an_empty_list(url: str, capsys: Captured) -> None:
    with tenure.sync.connect(url) as backend, backend.election("orders").campaign():
        pass
    assert run_cli(capsys, "partitions") == (0, "", "")
    assert run_cli(capsys, "partitions", "--json") == (0, "[]\n", "")
    code, out, err = run_cli(capsys, "partitions", "orders")
    assert (code, out) == (3, "")
    assert "there is no group 'orders' on this store; it has none: a program makes one with backend.partitions" in err


def test_an_unknown_group_is_refused_with_those_that_exist(url: str, capsys: Captured) -> None:
    for name in ("orders", "bills"):
        with sharing(url, name, 1, ["ann"]):
            pass
    code, out, err = run_cli(capsys, "partitions", "ordrs")
    assert (code, out) == (3, "")
    assert "there is no group 'ordrs' on this store; did you mean 'orders'?; its groups are: bills, orders" in err
    assert "did you mean" not in run_cli(capsys, "partitions", "x")[2]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("orders", "more"), 2, "unexpected extra argument"),
        (("--jsn",), 2, "No such option"),
        (("--on", "memory:"), 78, "exists inside one process only"),
        (("--on", "nostore:"), 78, "nostore"),
        ((), 78, "there is no file"),
    ],
)
def test_wrong_input_is_refused(arguments: tuple[str, ...], code: int, said: str, capsys: Captured) -> None:
    got, out, err = run_cli(capsys, "partitions", *arguments)
    assert (got, out) == (code, "")
    assert said in err


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 3, 7], "0-3, 7"), ([1, 3, 5, 6], "1, 3, 5-6"), (range(10_000), "0-9999")],
)
def test_numbers_are_written_as_ranges(numbers: list[int], text: str) -> None:
    assert in_ranges([f"partition-{number}" for number in numbers]) == text


def test_names_are_written_as_they_are() -> None:
    assert in_ranges(["eu", "partition-1", "us"]) == "eu, partition-1, us"
