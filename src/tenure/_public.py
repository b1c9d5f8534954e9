"""Public classes and functions carry the name of the module that they are imported from, and not of the private one.

So errors, ``repr`` and ``help`` say ``tenure.Message``. Annotations are text that is read with the names of the module
that a class says it is of; they are replaced by what they mean, for ``typing.get_type_hints``, pydantic and others.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import get_annotations
from sys import modules
from types import FunctionType
from typing import Any, get_type_hints


def publish(module: str, found: Mapping[str, Any]) -> None:
    """Make those of what was *found* that are from a private module say that they are from *module*."""
    for name, value in found.items():
        if not isinstance(value, (type, FunctionType)) or not is_private(value.__module__):
            continue
        if isinstance(value, type):
            _evaluate(value)
            value.__name__ = value.__qualname__ = name
        value.__module__ = module


def publish_all(module: str) -> None:
    """Make all that a public *module* exports, and that is from a private one, say that it is from *module*."""
    namespace = vars(modules[module])
    publish(module, {name: namespace[name] for name in namespace["__all__"]})


def is_private(module: str) -> bool:
    """Tell whether a *module* of ours is private by its name, or by that of a package around it."""
    first, *parts = module.split(".")
    return first == "tenure" and any(part.startswith("_") for part in parts)


def _evaluate(kind: type) -> None:
    own = get_annotations(kind)
    if not own:
        return
    hints = get_type_hints(kind, include_extras=True)
    kind.__annotations__ = {name: hints[name] for name in own}
    fields: dict[str, Any] = kind.__dict__.get("__dataclass_fields__", {})
    for name, field in fields.items():
        field.type = hints[name]
