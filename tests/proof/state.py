"""The state of a proof: the progress and failures of each part, in a file that survives an interruption."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Part:
    """The progress of one part."""

    unit: str
    done: int = 0
    next_seed: int = 0
    """Every smaller seed has been run."""
    seconds: float = 0.0
    """Time spent on it."""
    failures: list[dict[str, str]] = field(default_factory=list)
    """For each: what was found, and the line that replays it."""
    notes: dict[str, Any] = field(default_factory=dict)
    took: dict[str, list[float]] = field(default_factory=dict)
    """Seconds, by what took them."""

    def failed(self, what: str, replay: str) -> None:
        self.failures.append({"what": what, "replay": replay})


class State:
    """The parts by name, in ``FOLDER/proof.json``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._file = folder / "proof.json"
        self.parts: dict[str, Part] = {}
        if self._file.exists():
            self.parts = {name: Part(**part) for name, part in json.loads(self._file.read_text()).items()}

    def part(self, name: str, unit: str) -> Part:
        return self.parts.setdefault(name, Part(unit))

    def save(self) -> None:
        """Write the file; an interruption leaves the old file or the new one."""
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({name: asdict(part) for name, part in self.parts.items()}, indent=1))
        os.replace(new, self._file)
