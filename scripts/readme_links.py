"""Build hook: make the README's links to files of the repository absolute, for package indexes."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

TO_A_FILE = re.compile(r"\]\((?![a-z]+:|#)([^)]+)\)")


class ReadmeLinks(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        files = f"{metadata['urls']['Homepage']}/blob/v{metadata['version']}"
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": TO_A_FILE.sub(rf"]({files}/\1)", text)}
