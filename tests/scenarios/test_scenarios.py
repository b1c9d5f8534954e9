"""Golden scenarios: the steps of one candidate, as text. ``TENURE_UPDATE_GOLDEN=1`` rewrites them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tenure import ConfigError
from tenure.testing._sim.elections.script import play

SCENARIOS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_machine_does_what_the_scenario_says(path: Path) -> None:
    expected = path.read_text(encoding="utf-8")
    played = play(expected)
    if os.environ.get("TENURE_UPDATE_GOLDEN"):
        path.write_text(played, encoding="utf-8")
        return
    assert played.splitlines() == expected.splitlines(), (
        "if this is as wanted: TENURE_UPDATE_GOLDEN=1, and read the diff"
    )


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 20


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("at 0 dance", "nothing like 'dance' can happen"),
        ("at 0 answer 1 granted 7", "nothing was asked under number 1"),
        ("at 0 tick\nat 1 answer 1 perhaps", "no store answers 'perhaps'"),
        ("then tick", "it knows 'timing', 'hints', 'queued', 'at TIME WHAT'"),
    ],
)
def test_an_unreadable_line_is_shown(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        play(text)


def test_settings_can_be_given() -> None:
    played = play("timing ttl=30 renew_every=6\nat 0 tick\nat 0.1 answer 1 granted 7\n")
    assert "trusted until 27.5, wakes at 6" in played
