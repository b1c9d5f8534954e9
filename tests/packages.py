"""Packages of which only the metadata are installed, for tests of scripts that read them."""

from __future__ import annotations

from pathlib import Path


def installed(folder: Path, name: str, *headers: str, version: str = "1.0") -> None:
    """Install nothing but the metadata of a package into *folder*."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *headers])
    )
