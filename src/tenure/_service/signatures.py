"""How a handler of a service is called, by its signature: with the body, the message, or both."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Union

import tenure
from tenure import ConfigError, Message, Received, Reject, Reply, Retry
from tenure._queue.handlers import is_async_function
from tenure._service.bodies import members_of, name_of
from tenure.errors import refuse_generator

Argument = Literal["body", "message"]


class Unknown(Enum):
    """A type that is not written."""

    UNKNOWN = "unknown"


UNKNOWN = Unknown.UNKNOWN


@dataclass(frozen=True, slots=True)
class Signature:
    """How a handler is called, and what its result means."""

    arguments: tuple[Argument, ...]
    body: Any
    """The type of the body, if it takes one."""
    reply: Any
    """The type of what it returns; None if it returns nothing, ``UNKNOWN`` if that is not written, or anything."""


def name_of_function(function: object) -> str:
    """Return what messages call *function*."""
    function = _without_partial(function)
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _without_partial(function: object) -> object:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def check_callable(what: str, function: object, takes: str) -> None:
    """Refuse, when it is declared, an object that can't be called with the arguments that *takes* names.

    Raises:
        ConfigError: It is no function, or takes more or fewer.
    """
    if not callable(function):
        raise ConfigError(f"{what} must be a function that takes {takes}, not {function!r:.80}")
    refuse_generator(what, function)


def required(function: Callable[..., object]) -> list[inspect.Parameter]:
    """Return the parameters that a caller must give.

    Raises:
        ConfigError: They can't be read, as of some functions that are written in C.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the parameters of {name_of_function(function)} can't be read ({error}); write a function around it"
        ) from error
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one for one in parameters if one.default is inspect.Parameter.empty and one.kind not in optional]


def check_parameters(function: Callable[..., object]) -> None:
    """Refuse a handler, when it is declared, that can't be called with a body, a message, or both.

    Raises:
        ConfigError: It needs none, more than two, or one by name.
    """
    if (needs := _unfit(function, least=1)) is not None:
        raise ConfigError(
            f"the handler {name_of_function(function)} needs {needs}; a handler takes the body, the message, or both: "
            "async def serve(order: Order, message: tenure.Message)"
        )


def check_parameters_at_times(function: Callable[..., object]) -> None:
    """Refuse a handler, when it is declared, that can't be called with the time of a slot, a message, both or none.

    Raises:
        ConfigError: It needs more than two, or one by name.
    """
    if (needs := _unfit(function, least=0)) is not None:
        raise ConfigError(
            f"the handler {name_of_function(function)} needs {needs}; a handler that is called at times takes nothing, "
            "the time of the slot, the message, or both: async def tidy(slot: datetime, message: tenure.Message)"
        )


def _unfit(function: Callable[..., object], least: int) -> str | None:
    """Return the parameters of *function* by name, if they are fewer than *least*, more than two, or by keyword."""
    parameters = required(function)
    named = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
    if not named and least <= len(parameters) <= 2:
        return None
    return ", ".join(one.name for one in parameters) or "nothing"


def signature_of(function: Callable[..., object], kind: Any, run_in: str) -> Signature:
    """Return how a handler is called.

    Args:
        function: The handler.
        kind: The type of the queue's bodies, if the queue has one; else ``UNKNOWN``.
        run_in: Where it runs, as for ``Queue.consume``.

    Raises:
        ConfigError: Its annotations can't be resolved, or don't fit the queue.
    """
    name = name_of_function(function)
    hints = _hints_of(function, kind)
    parameters = required(function)
    arguments: list[Argument] = []
    body: Any = UNKNOWN
    for parameter in parameters:
        hint = hints.get(parameter.name, UNKNOWN)
        if _is_message(hint):
            _check_message(name, hint, function, run_in)
            arguments.append("message")
        elif hint is UNKNOWN and "body" in arguments:
            arguments.append("message")
        else:
            arguments.append("body")
            body = _body_kind(name, parameter.name, hint, kind)
    if len(set(arguments)) < len(arguments):
        twice = " and ".join(one.name for one in parameters)
        raise ConfigError(
            f"the handler {name} takes {twice}, both as the {arguments[0]}; annotate the one that is to be the message "
            "as tenure.Message"
        )
    return Signature(tuple(arguments), body, _reply_kind(hints.get("return", UNKNOWN)))


def _hints_of(function: Callable[..., object], kind: Any) -> dict[str, Any]:
    """Return the types of the parameters and of the result that are written, each resolved by itself.

    With a typed queue, a parameter whose annotation is the name of its type needs no resolving: the type may be local.

    Raises:
        ConfigError: That of a parameter can't be resolved.
    """
    inner: Any = _without_partial(function)
    written = inner if inspect.isroutine(inner) else type(inner).__call__
    scope = {one.__name__: one for one in getattr(written, "__type_params__", ())}
    names = getattr(inspect.unwrap(written), "__globals__", {})
    hints: dict[str, Any] = {}
    for name, annotation in getattr(written, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            hints[name] = typing.get_type_hints(alone, names, scope, include_extras=True)[name]
        except Exception as error:  # an annotation is an expression
            if kind is not UNKNOWN and annotation == name_of(kind):
                hints[name] = kind
            elif name != "return":  # of that, the value will tell
                raise ConfigError(
                    f"the annotation {annotation!r} of {name}, of the handler {name_of_function(function)}, can't be "
                    f"resolved ({error}); define what it names at the top of the module, outside of TYPE_CHECKING"
                ) from error
    return hints


def _is_message(hint: Any) -> bool:
    return inspect.isclass(hint) and not hasattr(hint, "__origin__") and issubclass(hint, Received)


def _check_message(name: str, hint: type[Received], function: object, run_in: str) -> None:
    gets: type[Received] = Message if is_async_function(function) else tenure.sync.Message
    if run_in == "process":
        gets = Received
    if not issubclass(gets, hint):
        kind = "async" if is_async_function(function) else "a plain function"
        where = " in a process" if run_in == "process" else ""
        raise ConfigError(
            f"the handler {name} is {kind}{where}, and gets a {gets.__module__}.{gets.__qualname__}, not a "
            f"{hint.__module__}.{hint.__qualname__}"
        )


def _body_kind(name: str, parameter: str, hint: Any, kind: Any) -> Any:
    """Return the type of the body: that of the queue, or else that of the parameter."""
    if kind is UNKNOWN:
        if hint is UNKNOWN:
            raise ConfigError(
                f"the parameter {parameter} of the handler {name} has no type; annotate it with the type of the body, "
                "or as tenure.Message"
            )
        return hint
    if hint in (UNKNOWN, Any, object) or hint == kind:
        return kind
    if inspect.isclass(hint) and inspect.isclass(kind) and _is_subclass(kind, hint):
        return kind
    raise ConfigError(
        f"the parameter {parameter} of the handler {name} is {name_of(hint)}, but the bodies of its queue are "
        f"{name_of(kind)}"
    )


def _is_subclass(kind: type, of: type) -> bool:
    try:
        return issubclass(kind, of)
    except TypeError:  # a protocol, or a generic alias: type checkers know more
        return True


_VERDICTS = (Retry, Reject, Reply)


def _reply_kind(hint: Any) -> Any:
    """Return the type of the answer: the result without the verdicts that a handler may return in its place."""
    if typing.get_origin(hint) in (Awaitable, Coroutine):  # of a plain function around an async one
        hint = typing.get_args(hint)[-1]
    if hint in (UNKNOWN, Any, object):
        return UNKNOWN
    answers = [one for one in members_of(hint) if not (inspect.isclass(one) and issubclass(one, _VERDICTS))]
    if all(one in (None, type(None), typing.NoReturn, typing.Never) for one in answers):
        return None
    return Union[tuple(answers)]  # noqa: UP007  # they are in a list


def check_leader(function: Callable[..., object]) -> None:
    """Refuse a leader that can't be called with a term, or that is annotated to take a term of the other kind.

    Raises:
        ConfigError: It can't be the work of a leader.
    """
    name = name_of_function(function)
    if len(parameters := required(function)) != 1:
        raise ConfigError(f"the leader {name} must take the term and nothing else: async def lead(term: tenure.Term)")
    if inspect.isroutine(function) and is_async_function(inspect.unwrap(function)) and not is_async_function(function):
        raise ConfigError(
            f"the leader {name} is a plain function around an async one, whose coroutine would never run; "
            "let the decorator return an async function"
        )
    gets = tenure.Term if is_async_function(function) else tenure.sync.Term
    written = getattr(function, "__annotations__", {}).get(parameters[0].name)
    if isinstance(written, str):
        known = getattr(function, "__globals__", {})
        with suppress(Exception):  # it can't be resolved here: type checkers know more
            written = eval(written, known)  # noqa: S307  # the user's own annotation
    if inspect.isclass(written) and written is not gets and written in (tenure.Term, tenure.sync.Term):
        what = "async" if is_async_function(function) else "a plain function"
        raise ConfigError(
            f"the leader {name} is {what}, and gets a {gets.__module__}.{gets.__qualname__}, not a "
            f"{written.__module__}.{written.__qualname__}"
        )
