"""Build hook: make the README's links to files of the repository absolute, for package indexes."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

TO_A_FILE = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)]+)\)")


class ReadmeLinks(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        repository, tag = metadata["urls"]["Homepage"], f"v{metadata['version']}"

        def absolute(link: re.Match[str]) -> str:
            image, text, path = link.groups()
            return (
                f"{image}{text}({repository}/{'raw' if image else 'blob'}/{tag}/{path})"  # blob is a page about a file
            )

        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": TO_A_FILE.sub(absolute, text)}
