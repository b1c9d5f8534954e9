"""
Write docs/errors.md from src/tenure/_cli/errors.md, which the wheel holds for ``tenure explain``.

Both have the same text; the links begin at their own folder. ``--check`` only compares, and ends with 1 if they differ.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "tenure" / "_cli" / "errors.md"
PAGE = ROOT / "docs" / "errors.md"


def page() -> str:
    """Return what docs/errors.md must have."""
    return SOURCE.read_text(encoding="utf-8").replace("](../../../docs/", "](").replace("](../../../", "](../")


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
            return 0
        print(f"{PAGE.relative_to(ROOT)} is not that of {SOURCE.relative_to(ROOT)}; run: python scripts/errors_page.py")
        return 1
    if arguments:
        print("usage: python scripts/errors_page.py [--check]", file=sys.stderr)
        return 2
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
