"""Public classes and functions carry the name of the module that they are imported from, and not of the private one.

So errors, ``repr`` and ``help`` say ``tenure.Message``, and so do its methods. Annotations are text that is read with
the names of the module that a class says it is of; they are replaced by what they mean, for ``typing.get_type_hints``,
pydantic and others.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import get_annotations
from sys import modules
from types import FunctionType
from typing import Any, get_type_hints


def publish(module: str, found: Mapping[str, Any]) -> None:
    """Set the ``__module__`` of those *found* that are from a private module, and of their methods, to *module*."""
    for name, value in found.items():
        if not isinstance(value, (type, FunctionType)):
            continue
        if is_private(value.__module__):
            if isinstance(value, type):
                _evaluate(value)
                value.__name__ = value.__qualname__ = name
            value.__module__ = module
        if isinstance(value, type) and value.__module__ == module:
            _publish_methods(value)


def publish_all(module: str) -> None:
    """Do the same for all names that a public *module* exports."""
    namespace = vars(modules[module])
    publish(module, {name: namespace[name] for name in namespace["__all__"]})


def is_private(module: str) -> bool:
    """Tell whether a *module* of tenure is private by its own name or by that of a package around it."""
    first, *parts = module.split(".")
    return first == "tenure" and any(part.startswith("_") for part in parts)


def _publish_methods(kind: type) -> None:
    for name, member in vars(kind).items():
        for function in functions_of(member):
            if function.__module__.partition(".")[0] == "tenure" and function.__name__ == name:  # and no alias
                function.__module__, function.__qualname__ = kind.__module__, f"{kind.__qualname__}.{name}"


def functions_of(member: object) -> list[FunctionType]:
    """Return the functions that a *member* of a class is made of."""
    found: list[object]
    match member:
        case property():
            found = [member.fget, member.fset, member.fdel]
        case classmethod() | staticmethod():
            found = [member.__func__]
        case _:
            found = [member]
    return [one for one in found if isinstance(one, FunctionType)]


def _evaluate(kind: type) -> None:
    own = get_annotations(kind)
    if not own:
        return
    hints = get_type_hints(kind, include_extras=True)
    kind.__annotations__ = {name: hints[name] for name in own}
    fields: dict[str, Any] = kind.__dict__.get("__dataclass_fields__", {})
    for name, field in fields.items():
        field.type = hints[name]
