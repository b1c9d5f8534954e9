"""What the READMEs of the example projects say of files and packages."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.examples.project_pages import PROJECTS
from tests.examples.projects import Project

ROOT = PROJECTS.parents[1]
NAMES = sorted(folder.name for folder in PROJECTS.iterdir() if (folder / "README.md").exists())
INSTALLED = [name for name in NAMES if (PROJECTS / name / "requirements.txt").exists()]


@pytest.fixture(params=NAMES)
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Project:
    return Project(request.param, tmp_path, {})


def test_each_file_is_in_its_readme(project: Project) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", project.readme)
    listed = [project.folder / link for link in links]
    unnamed = ("__init__.py", "0001_initial.py", "README.md", ".gitignore")
    files = [path for path in project.folder.rglob("*") if path.is_file() and path.name not in unnamed]
    assert [path for path in files if path not in listed and path.parent not in listed] == []


@pytest.mark.parametrize("project", INSTALLED, indirect=True)
def test_its_readme_installs_what_it_needs(project: Project) -> None:
    found = re.search(r"pip install '(\S+)\[(\S+)\]' -r (\S+)$", project.command("pip install"))
    assert found is not None
    path, extras, requirements = found.groups()
    assert (PROJECTS / project.folder.name / path).resolve() == ROOT
    assert {*extras.split(",")} <= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ].keys()
    assert f"tenure[{extras}]>=" in (project.folder / requirements).read_text()
