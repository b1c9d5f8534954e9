"""The names of ``tenure``: each is available after ``import tenure``, and loads only what it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tenure


@pytest.mark.parametrize("name", [*tenure.__all__, "events", "sync", "events.TermBegan"])
def test_a_name_is_available_after_a_plain_import(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", f"import tenure; tenure.{name}"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tenure' has no attribute 'evnets'"):
        tenure.__getattr__("evnets")
