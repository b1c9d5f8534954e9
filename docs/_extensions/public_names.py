"""The reference of the public names of tenure, from their docstrings; the build fails if one is on no page.

Public classes say that they are of the public module (``tenure._public``), but their sources, in which Sphinx looks up
the docstrings of attributes and type aliases and the order of members, are in private ones.
"""

from __future__ import annotations

import ast
import pkgutil
from importlib import import_module
from typing import Any, TypeVar

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

import tenure
from tenure._public import is_private

LOGGER = logging.getLogger(__name__)

MODULES = (
    "tenure",
    *(one.name for one in pkgutil.walk_packages(tenure.__path__, "tenure.") if not is_private(one.name)),
)


def read_private_sources(*_: object) -> None:
    """Let Sphinx know what the private modules say about the names that a public one exports."""
    for module in MODULES:
        public = ModuleAnalyzer.for_module(module)
        public.analyze()
        exported = set(import_module(module).__all__)
        for statement in ast.walk(ast.parse(public.code)):
            if isinstance(statement, ast.ImportFrom) and statement.module and statement.module.startswith("tenure"):
                names = {one.name: one.asname or one.name for one in statement.names}
                names = {home: name for home, name in names.items() if name in exported}
                if names:
                    add(public, ModuleAnalyzer.for_module(statement.module), names)


def add(public: ModuleAnalyzer, private: ModuleAnalyzer, names: dict[str, str]) -> None:
    """Add what is known about *names* of the *private* module, under the names of the *public* one."""

    def renamed(path: str) -> str | None:
        first, dot, rest = path.partition(".")
        return f"{names[first]}{dot}{rest}" if first in names else None

    private.analyze()
    after = max(public.tagorder.values(), default=0) + 1
    for path, order in private.tagorder.items():
        if (name := renamed(path)) is not None:
            public.tagorder[name] = after + order
    for (scope, attribute), text in private.attr_docs.items():
        if scope and (name := renamed(scope)) is not None:
            public.attr_docs[name, attribute] = text
        elif not scope and attribute in names:
            public.attr_docs["", names[attribute]] = text


def hide_private_signature(
    _app: Sphinx, kind: str, _name: str, _what: Any, _options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    """Show no arguments of a class that needs private ones: users get its objects from others."""
    return ("", returns) if kind == "class" and signature and "tenure._" in signature else None


class PlainAttributes:
    """Keeps napoleon from reading the docstring of an attribute as *type: description*; ours may have a colon."""

    def __init__(self, app: Sphinx) -> None:
        self._before: dict[str, list[str]] = {}
        app.connect("autodoc-process-docstring", self.keep, priority=400)
        app.connect("autodoc-process-docstring", self.restore, priority=600)

    def keep(self, _app: Sphinx, kind: str, name: str, _what: Any, _options: Any, lines: list[str]) -> None:
        if kind in ("attribute", "data", "property") and "Raises:" not in lines:
            self._before[name] = list(lines)

    def restore(self, _app: Sphinx, _kind: str, name: str, _what: Any, _options: Any, lines: list[str]) -> None:
        lines[:] = self._before.pop(name, lines)


def hide_private_bases(_app: Sphinx, _name: str, _what: Any, _options: Any, bases: list[Any]) -> None:
    bases[:] = [one for one in bases if not is_private(getattr(one, "__module__", ""))] or [object]


def unlinked(_app: Sphinx, _env: Any, link: addnodes.pending_xref, text: nodes.Element) -> nodes.Element | None:
    """Show the name of something private, or of a type variable, without a link."""
    module, _, name = link.get("reftarget", "").rpartition(".")
    if is_private(module) or (module in MODULES and isinstance(vars(import_module(module)).get(name), TypeVar)):
        return text
    return None


def check(app: Sphinx, error: Exception | None) -> None:
    """Warn of each public name that is on no page."""
    if error is not None or app.builder.name != "html":
        return
    documented = app.env.domains.python_domain.objects
    for module in MODULES:
        exported = import_module(module)
        for name in exported.__all__:
            value = getattr(exported, name)
            own = f"{getattr(value, '__module__', module)}.{getattr(value, '__name__', name)}"
            if f"{module}.{name}" not in documented and own not in documented:
                LOGGER.warning("%s.%s is on no page of the reference", module, name, type="reference")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", read_private_sources)
    PlainAttributes(app)
    app.connect("autodoc-process-signature", hide_private_signature)
    app.connect("autodoc-process-bases", hide_private_bases)
    app.connect("missing-reference", unlinked)
    app.connect("build-finished", check)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
