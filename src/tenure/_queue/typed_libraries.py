"""Types of pydantic and msgspec in typed bodies. Neither is imported here: a program with their types has done so."""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tenure._queue.failures import text_of
from tenure._queue.typed_values import SHOWN_WHY, Misfit, Read, name_of_type, reason_of, shown_briefly
from tenure.errors import ConfigError

ERRORS_MAX = 1_000
"""Errors of one body that are told apart: pydantic makes an object and a text of each, however many there are."""


def is_of(module: str, name: str, kind: Any) -> bool:
    """Return whether *kind* is the type *name* of *module*, or derived from it, without importing the module."""
    imported = sys.modules.get(module)
    return imported is not None and isinstance(kind, type) and issubclass(kind, getattr(imported, name))


def library_of(kind: Any) -> str | None:
    """Return the library that reads and writes *kind* and its instances, if there is one."""
    if "pydantic" in sys.modules and hasattr(kind, "__get_pydantic_core_schema__"):
        return "pydantic"
    if hasattr(kind, "__pydantic_validator__"):  # a dataclass of pydantic's
        return "pydantic"
    return "msgspec" if hasattr(kind, "__struct_config__") else None


def constrained_by(metadata: tuple[Any, ...]) -> str | None:
    """Return the library that checks the constraints of an ``Annotated``, if it is imported."""
    for one in metadata:
        home = type(one).__module__.partition(".")[0]
        if _only_describes(one):
            continue
        if home in ("annotated_types", "pydantic", "pydantic_core") and "pydantic" in sys.modules:
            return "pydantic"
        if home == "msgspec":
            return "msgspec"
    return None


def _only_describes(one: Any) -> bool:
    """Return whether *one*, in an ``Annotated``, constrains nothing: types unknown to its library may have it."""
    if is_of("msgspec", "Meta", type(one)):
        names = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length", "tz")
        return all(getattr(one, name) is None for name in names)
    field = is_of("pydantic.fields", "FieldInfo", type(one))
    return field and not one.metadata and one.discriminator is None


def library_reader(library: str, kind: Any) -> Read:
    """Return the reader of *kind* by its library.

    Raises:
        ConfigError: The library can't read it.
    """
    try:
        return _by_pydantic(kind) if library == "pydantic" else _by_msgspec(kind)
    except RecursionError:
        raise
    except Exception as error:  # also a NameError of an annotation, and an ImportError of an optional package
        why = str(error).partition("\n")[0]
        raise ConfigError(f"a body can't be read as {name_of_type(kind)}: {library} can't read it ({why})") from error


def library_decoder(library: str, kind: Any) -> Callable[[bytes], Any]:
    """Return what reads a *kind* from JSON, and raises the errors of the library."""
    if library == "pydantic":
        validate: Callable[[bytes], Any] = sys.modules["pydantic"].TypeAdapter(kind).validate_json
        return validate
    decode: Callable[[bytes], Any] = sys.modules["msgspec"].json.Decoder(kind).decode
    return decode


@lru_cache(maxsize=512)
def adapter_of(kind: Any) -> Any:
    return sys.modules["pydantic"].TypeAdapter(kind)


def _by_pydantic(kind: Any) -> Read:
    adapter = _reading_adapter(kind)
    invalid = sys.modules["pydantic"].ValidationError

    def read_with_pydantic(value: Any) -> Any:
        try:
            return adapter.validate_json(value if isinstance(value, bytes) else json.dumps(value))
        except invalid as error:
            if error.error_count() > ERRORS_MAX:
                raise Misfit(f"does not fit, in {error.error_count():,} places") from None
            raise _as_misfit(error) from error
        except RecursionError:
            raise
        except Exception as error:  # of a model's own code, or of pydantic's: a duration beyond a timedelta
            raise Misfit(f"does not fit: {type(error).__name__}: {reason_of(error)}") from error

    return read_with_pydantic


def _reading_adapter(kind: Any) -> Any:
    pydantic = sys.modules["pydantic"]
    base64 = typing.get_origin(kind) is typing.Annotated and not any(
        is_of("pydantic", "EncodedBytes", type(one)) for one in kind.__metadata__
    )
    if base64:  # it is not pydantic that writes the bytes in such types
        try:
            return pydantic.TypeAdapter(kind, config={"val_json_bytes": "base64"})
        except pydantic.PydanticUserError:  # a model, which has a configuration of its own
            pass
    return pydantic.TypeAdapter(kind)  # an Annotated may have no hash


def _as_misfit(error: Any) -> Misfit:
    """Return an error of pydantic, in one line."""
    first, *others = error.errors(include_url=False, include_context=False)
    more = f" (and {len(others)} more)" if others else ""
    at = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    return Misfit(f"does not fit: {first['msg'][:SHOWN_WHY]}, not {shown_briefly(first['input'])}{more}", at)


def _by_msgspec(kind: Any) -> Read:
    msgspec = sys.modules["msgspec"]
    decoder = msgspec.json.Decoder(kind)

    def read_with_msgspec(value: Any) -> Any:
        try:
            if isinstance(value, bytes):
                return decoder.decode(value)
            return msgspec.convert(value, kind, str_keys=True)
        except (msgspec.MsgspecError, ValueError) as error:
            text, _, place = text_of(error).partition(" - at `$")
            raise Misfit(f"does not fit: {text[:SHOWN_WHY]}", place.rstrip("`")) from error
        except RecursionError:
            raise
        except Exception as error:  # of a struct's own code
            raise Misfit(f"does not fit: {type(error).__name__}: {reason_of(error)}") from error

    return read_with_msgspec
