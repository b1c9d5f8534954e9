"""The documents are read on a code host as well, so they have no directives: here, the site gets what these would say.

- A link to ``../examples/leader.py`` leads to a page that shows the file, in colours; the link to a folder leads to a
  page that lists its files. So no link leaves the site.
- In the tree of pages, those of a folder are below its README.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from html import escape
from pathlib import PurePosixPath
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.builders.html import StandaloneHTMLBuilder
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)

LANGUAGES = {
    ".css": "css",
    ".js": "javascript",
    ".lua": "lua",
    ".md": "markdown",
    ".py": "python",
    ".service": "ini",
    ".sh": "bash",
    ".sql": "sql",
    ".toml": "toml",
    ".yaml": "yaml",
    ".yml": "yaml",
}
"""The language of a file by its suffix; all others are shown as plain text."""

MADE_BY_RUNS = re.compile(r"^\.|^__pycache__$|^dist$|\.db\b|\.key$|\.egg-info$")
"""Files and folders that are not of the repository, and must not be published: a key, for example."""

LINKED = "linked_files"
"""Where the metadata of a document keep the paths of the files to which it links."""


def add_children(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the other pages of a folder, and the READMEs of the folders in it, below its own README."""
    folder, name = posixpath.split(docname)
    inside = sorted(one.removeprefix(f"{folder}/") for one in app.env.found_docs if one.startswith(f"{folder}/"))
    children = [one for one in inside if one != "README" and ("/" not in one or one.endswith("/README"))]
    if name == "README" and children:
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", "", *children, "```", ""])


def link_pages(app: Sphinx, doctree: nodes.document) -> None:
    """Replace each link to a file that is no document by a link to the page that will show it."""
    here = app.env.docname
    for link in [*doctree.findall(addnodes.download_reference), *doctree.findall(is_to_a_folder)]:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), link["reftarget"]))
        if path.startswith("..") or not (app.srcdir / path).exists():
            LOGGER.warning("there is no file %s in the repository", path, location=link, type="ref")
            continue
        app.env.metadata[here].setdefault(LINKED, set()).add(path)
        link.replace_self(nodes.reference("", "", *link.children, internal=True, refuri=uri(app, here, path)))


def is_to_a_folder(node: nodes.Node) -> bool:
    """Tell whether a *node* is a link to neither a document nor a heading nor a file, as the parser has left it."""
    return isinstance(node, addnodes.pending_xref) and node["reftype"] == "myst" and node.get("refdomain") != "doc"


def uri(app: Sphinx, here: str, path: str) -> str:
    """Return the address, from the page *here*, of the page for a file or folder: its own document, if it has one."""
    documents = [path.removesuffix(".md"), posixpath.join(path, "README")]
    page = next((one for one in documents if one in app.env.found_docs), f"files/{path}")
    return posixpath.relpath(page, posixpath.dirname(here)) + ".html"


def make_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Make a page for each file or folder to which a document links, and for all that is in such a folder."""
    assert isinstance(app.builder, StandaloneHTMLBuilder)  # no other one has such pages
    wanted = {path for metadata in app.env.metadata.values() for path in metadata.get(LINKED, ())}
    made: set[str] = set()
    while wanted:
        path = wanted.pop()
        made.add(path)
        page = f"files/{path}"
        file = app.srcdir / path
        if file.is_dir():
            inside = sorted(f"{path}/{one.name}" for one in file.iterdir() if not MADE_BY_RUNS.search(one.name))
            wanted |= {*inside} - made
            items = [(uri(app, page, one), posixpath.basename(one)) for one in inside]
            shown = "".join(f'<li><a href="{escape(to)}">{escape(name)}</a></li>' for to, name in items)
            shown = f"<ul>{shown}</ul>"
        else:
            text = file.read_text(encoding="utf-8")
            language = LANGUAGES.get(PurePosixPath(path).suffix, "text")
            shown = app.builder.highlighter.highlight_block(text, language, force=True, location=path)
        yield page, {"title": path, "body": f"<h1>{escape(path)}</h1>{shown}"}, "page.html"


class SharedTree:
    """Makes the tree of pages once for all files at one depth: it is slow to make, and the same for them."""

    def __init__(self) -> None:
        self._made: dict[int, str] = {}

    def share(
        self, _app: Sphinx, page: str, _template: str, context: dict[str, Any], _doctree: nodes.document | None
    ) -> None:
        if "toctree" not in context or not page.startswith("files/"):
            return
        make, depth = context["toctree"], page.count("/")

        def tree(**options: Any) -> str:
            if depth not in self._made:
                self._made[depth] = make(**options)
            return self._made[depth]

        context["toctree"] = tree


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", add_children)
    app.connect("doctree-read", link_pages, priority=100)  # before Sphinx copies the targets, as downloads
    app.connect("html-collect-pages", make_pages)
    app.connect("html-page-context", SharedTree().share, priority=100)  # before the theme asks for the tree
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
