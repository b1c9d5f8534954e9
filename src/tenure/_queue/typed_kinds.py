"""The parts of a type by which a typed body is read: its fields, hints and variables."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NotRequired, Required, TypeVar, Union

from tenure._queue.typed_libraries import constrained_by
from tenure._queue.typed_readers import choice_of
from tenure._queue.typed_values import Read, name_of_type
from tenure.errors import ConfigError


def is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def is_typed_dict(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, dict) and hasattr(kind, "__required_keys__")


def is_record(kind: Any) -> bool:
    """Return whether objects of this *kind* have named fields, if perhaps none yet."""
    kind = typing.get_origin(kind) or kind
    if not isinstance(kind, type) or getattr(kind, "__pydantic_root_model__", False):  # it is what it holds
        return False
    known = dataclasses.is_dataclass(kind) or is_named_tuple(kind) or is_typed_dict(kind)
    return known or hasattr(kind, "model_fields") or hasattr(kind, "__struct_fields__")


def fields_of(kind: Any) -> Mapping[str, object]:
    """Return the names that an object of this *kind* can have; none if it has no named fields."""
    kind = typing.get_origin(kind) or kind
    if dataclasses.is_dataclass(kind):
        of_class = getattr(dataclasses, "_FIELD_CLASSVAR")  # noqa: B009  # it has no public name
        every: dict[str, Any] = kind.__dataclass_fields__  # dataclasses.fields() omits InitVars
        return {name: field for name, field in every.items() if field.init and field._field_type is not of_class}
    if is_named_tuple(kind):
        return dict.fromkeys(kind._fields)
    if is_typed_dict(kind):
        return dict.fromkeys(kind.__annotations__)
    if isinstance(kind, type):
        return getattr(kind, "model_fields", None) or dict.fromkeys(getattr(kind, "__struct_fields__", ()))
    return {}


def keys_of(kind: Any) -> frozenset[str]:
    """Return the keys that an object of this *kind* can have in JSON: its fields, and how its library writes them."""
    kind = typing.get_origin(kind) or kind
    keys = {*fields_of(kind), *getattr(kind, "__struct_encode_fields__", ())}
    described: Mapping[str, Any] = getattr(kind, "__pydantic_fields__", None) or getattr(kind, "model_fields", {})
    for field in described.values():
        alias = field.validation_alias or field.alias
        for choice in getattr(alias, "choices", None) or [alias]:
            keys.add(choice if isinstance(choice, str) else getattr(choice, "path", [""])[0])
    return frozenset(keys)


def discriminators_of(kind: Any) -> dict[str, Read]:
    """Return the readers of those fields of a *kind* that are a ``Literal``, or the tag of a msgspec struct."""
    kind = typing.get_origin(kind) or kind
    try:
        hints = hints_of(kind)
    except ConfigError:  # of a type whose own library can resolve them
        hints = {}
    discriminators = {}
    for name, hint in hints.items():
        _, hint = unmarked(hint)
        if typing.get_origin(hint) is Literal:
            discriminators[name] = choice_of(typing.get_args(hint))
    tagged = getattr(kind, "__struct_config__", None)
    if tagged is not None and tagged.tag is not None:
        discriminators[tagged.tag_field] = choice_of((tagged.tag,))
    return discriminators


def required_keys(kind: Any, hints: Mapping[str, Any]) -> Iterable[str]:
    if is_named_tuple(kind):
        return [name for name in kind._fields if name not in kind._field_defaults]
    if is_typed_dict(kind):
        marks = {name: unmarked(hint)[0] for name, hint in hints.items()}  # given as text, they were not recognised
        return [
            name
            for name in hints
            if Required in marks[name] or (name in kind.__required_keys__ and NotRequired not in marks[name])
        ]
    missing = dataclasses.MISSING
    return [
        name
        for name, field in kind.__dataclass_fields__.items()
        if field.default is missing and field.default_factory is missing
    ]


def is_mark(origin: Any) -> bool:
    """Return whether *origin* is a qualifier of a field, such as ``Required``, around the field's type."""
    if origin in (Required, NotRequired, typing.Final):
        return True
    return getattr(origin, "__name__", "") == "ReadOnly"  # of Python 3.13, or of typing_extensions


def unmarked(hint: Any) -> tuple[list[Any], Any]:
    """Return the marks on a field, and its type without them and without annotations."""
    marks = []
    while is_mark(origin := typing.get_origin(hint)) or origin is Annotated:
        marks.append(origin)
        hint = typing.get_args(hint)[0]
    return marks, hint


def hints_of(kind: Any) -> dict[str, Any]:
    try:
        try:
            return typing.get_type_hints(kind, include_extras=True)
        except NameError:  # the early releases of Python 3.12 don't find type parameters that are named as text
            variables = {one.__name__: one for one in getattr(kind, "__type_params__", ())}
            return typing.get_type_hints(kind, localns={**vars(kind), **variables}, include_extras=True)
    except RecursionError:  # of types without end, which is told of the whole type
        raise
    except Exception as error:  # an annotation is an expression: as text, and from Python 3.14 on, first evaluated here
        raise ConfigError(
            f"a body can't be read as {name_of_type(kind)}, as its annotations can't be resolved ({error}); "
            "define what they name at the top of a module"
        ) from error


def bound_of(variable: TypeVar, bound: Mapping[Any, Any]) -> Any:
    if variable in bound:
        return bound[variable]
    default = getattr(variable, "__default__", None)
    if default is not None and "NoDefault" not in repr(default):
        return default
    if variable.__constraints__:
        return Union[variable.__constraints__]  # noqa: UP007  # they are in a tuple
    return variable.__bound__ or Any


def matched_variables(variables: Iterable[Any], arguments: Iterable[Any], bound: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the types of *variables*, where the arguments may be variables that are *bound* outside."""
    return {variable: closed(argument, bound) for variable, argument in zip(variables, arguments, strict=False)}


def closed(kind: Any, bound: Mapping[Any, Any]) -> Any:
    """Return *kind* with its type variables filled in."""
    if isinstance(kind, TypeVar):
        return bound_of(kind, bound)
    if variables := getattr(kind, "__parameters__", ()):
        return kind[tuple(bound_of(variable, bound) for variable in variables)]
    return kind


def variables_of(kind: Any, arguments: tuple[Any, ...], bound: Mapping[Any, Any]) -> dict[Any, Any]:
    return matched_variables(getattr(kind, "__parameters__", ()), arguments, bound)


def variables_of_fields(kind: Any, own: dict[Any, Any]) -> dict[str, dict[Any, Any]]:
    """Return the types of type variables for each field: in a base, the same variable may be another type."""
    fields = fields_of(kind)
    variables = dict.fromkeys(fields, own)
    for base in reversed(vars(kind).get("__orig_bases__", kind.__bases__)):
        origin = typing.get_origin(base) or base
        if inherited := fields_of(origin):
            of_base = variables_of_fields(origin, variables_of(origin, typing.get_args(base), own))
            for name, field in inherited.items():
                if name in fields and field is fields[name]:  # a dataclass that declares it again has a new one
                    variables[name] = of_base[name]
    return variables


def is_alias(kind: Any) -> bool:
    return type(kind).__name__ == "TypeAliasType"  # of Python 3.12, or of typing_extensions


def aliased(kind: Any, bound: Mapping[Any, Any]) -> tuple[Any, dict[Any, Any]]:
    """Return the type that an alias names, and the types of the variables in it."""
    alias = typing.get_origin(kind) or kind
    matched = matched_variables(getattr(alias, "__type_params__", ()), typing.get_args(kind), bound)
    return alias.__value__, {**bound, **matched}


def bare(kind: Any, bound: Mapping[Any, Any], *, constrained: bool = False) -> Any:
    """Return the type that *kind* is another name for; with *constrained*, that within constraints of a library too."""
    if isinstance(kind, TypeVar):
        return bare(bound_of(kind, bound), bound, constrained=constrained)
    if isinstance(kind, typing.NewType):
        return bare(kind.__supertype__, bound, constrained=constrained)
    if is_alias(typing.get_origin(kind) or kind):
        return bare(closed(*aliased(kind, bound)), bound, constrained=constrained)
    if typing.get_origin(kind) is Annotated and (constrained or not constrained_by(kind.__metadata__)):
        return bare(typing.get_args(kind)[0], bound, constrained=constrained)
    return kind


def flattened(kinds: Iterable[Any], bound: Mapping[Any, Any]) -> Iterable[Any]:
    """Yield the members of a union of *kinds*, and those of the unions that they name."""
    for kind in kinds:
        inner = bare(kind, bound)
        if typing.get_origin(inner) in (Union, types.UnionType):
            yield from flattened(typing.get_args(inner), bound)
        else:
            yield bound_of(kind, bound) if isinstance(kind, TypeVar) else kind


def key_values(text: str) -> Iterable[Any]:
    """Yield the other JSON values that are written as *text*, for which a key may stand."""
    if text in ("true", "false", "null"):
        yield {"true": True, "false": False, "null": None}[text]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    if type(value) in (int, float) and json.dumps(value) == text:
        yield value
