"""The handlers of a service as a consumer calls them: with a message. They can be sent to a process."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tenure import Message, Received, Reject, Reply, Retry
from tenure._queue.handlers import is_async_function
from tenure._service.bodies import body_of, message_of
from tenure._service.signatures import UNKNOWN, Signature


def called(function: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    """Return the handler that calls *function* with what its *signature* takes, and replies with what it returns."""
    if signature.arguments == ("message",) and signature.reply is None:
        return function
    return AsyncCall(function, signature) if is_async_function(function) else PlainCall(function, signature)


@dataclass(frozen=True, slots=True)
class AsyncCall:
    """A handler that is an async function."""

    function: Callable[..., Awaitable[Any]]
    signature: Signature

    async def __call__(self, message: Message) -> object:
        return _outcome_of(message, await self.function(*_arguments(message, self.signature)), self.signature)


@dataclass(frozen=True, slots=True)
class PlainCall:
    """A handler that is a plain function."""

    function: Callable[..., Any]
    signature: Signature

    def __call__(self, message: Received) -> object:
        result = self.function(*_arguments(message, self.signature))
        if inspect.isawaitable(result):  # of a plain function around an async one
            return self._outcome_of_later(message, result)
        return _outcome_of(message, result, self.signature)

    async def _outcome_of_later(self, message: Received, result: Awaitable[Any]) -> object:
        return _outcome_of(message, await result, self.signature)


def _arguments(message: Received, signature: Signature) -> list[Any]:
    return [message if one == "message" else body_of(message, signature.body) for one in signature.arguments]


def _outcome_of(message: Received, result: Any, signature: Signature) -> object:
    """Return the outcome for the consumer: the handler's verdict, or a reply with its result, if one is asked for."""
    if issubclass(type(result), (Retry, Reject, Reply)):  # by its type: an object may claim to be of any class
        return result
    kind = signature.reply
    if message.reply_to is None or kind is None or (kind is UNKNOWN and result is None):
        return None
    if kind is UNKNOWN:
        kind = bytes | str | object
    answer = message_of(result, kind, {})
    return Reply(answer.body, headers=answer.headers)
