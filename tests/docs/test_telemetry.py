"""The page of metrics names all of them, with their kinds, labels and meanings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tenure._telemetry.families import FAMILIES, LABELS_MAX, OTHER

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "telemetry.md").read_text(encoding="utf-8")


def test_the_table_equals_the_metrics() -> None:
    rows = []
    for name, family in FAMILIES.items():
        shown = f"{name}_total" if family.kind == "counter" else name
        labels = ", ".join(f"`{one}`" for one in family.labels)
        rows.append(f"| `{shown}` | {family.kind} | {labels} | {family.help} |")
    assert re.findall(r"^\| `tenure_.*$", PAGE, re.MULTILINE) == rows


def test_the_page_names_the_bound_of_labels() -> None:
    assert f"{LABELS_MAX} queues, names and schedules" in PAGE
    assert f"`{OTHER}`" in PAGE


def test_the_page_names_each_metric_of_opentelemetry() -> None:
    pytest.importorskip("opentelemetry")
    from tenure._telemetry import opentelemetry

    source = Path(opentelemetry.__file__).read_text(encoding="utf-8")
    names = re.findall(r'create_\w+\(\s*"([\w.]+)"', source)
    assert len(names) > 10
    assert [name for name in names if f"`{name}`" not in PAGE] == []
