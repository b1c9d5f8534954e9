"""The exit codes that reject a message, and their options on the command line."""

from __future__ import annotations

import click
import pytest

from tenure._cli.codes import describe, exit_codes, rejecting


@pytest.mark.parametrize(
    ("text", "codes"), [("2", {2}), ("2,64-66", {2, 64, 65, 66}), (" 1 - 2 , 255", {1, 2, 255}), ("3-3", {3})]
)
def test_codes_and_ranges(text: str, codes: set[int]) -> None:
    assert exit_codes(text) == codes


@pytest.mark.parametrize("text", ["", ",", "0", "0-3", "256", "9-2", "1-", "-1", "1-2-3", "x", "1;2", "²"])
def test_an_invalid_code_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        exit_codes(text)


@pytest.mark.parametrize(
    ("reject_on", "retry_on", "rejected"),
    [
        (None, None, {65}),
        ({2, 3}, None, {2, 3, 65}),
        ({2, 3}, {65}, {2, 3}),
        ({2}, {75}, {2, 65}),
        (None, {75, 255}, set(range(1, 255)) - {75}),
    ],
)
def test_codes_that_reject(reject_on: set[int] | None, retry_on: set[int] | None, rejected: set[int]) -> None:
    assert rejecting(reject_on, retry_on) == rejected


def test_a_code_can_not_do_both() -> None:
    with pytest.raises(click.UsageError, match="both contain 66; put it into one of them"):
        rejecting({1, 66, 67}, {66, 67})


def test_a_code_of_a_signal_is_shown_with_its_name() -> None:
    assert [describe(code) for code in (3, 128, 137, 255)] == ["3", "128", "137 (SIGKILL)", "255"]
