"""Methods that block: each runs the asynchronous one on the renewal loop, and waits for its result."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from tenure._runtime.renewal_thread import RenewalThread
from tenure.errors import TenureError

P = ParamSpec("P")
T = TypeVar("T")


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return *method* for threads: with the same arguments, result and errors; it blocks until it has its result.

    Its object has the asynchronous one as ``_behind``, and the renewal thread as ``_renewal_thread``. ``await`` is
    removed from the examples in its docstring; :mod:`tenure._public` sets its module and its class.
    """

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        renewal_thread: RenewalThread = self._renewal_thread
        return renewal_thread.call_blocking(lambda: method(self._behind, *args, **kwargs))

    functools.update_wrapper(call, method)
    call.__doc__ = (method.__doc__ or "").replace("await ", "")
    return call


def iterated(renewal_thread: RenewalThread, stream: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Yield the items of *stream* on this thread."""
    try:
        while True:
            try:
                yield renewal_thread.call_blocking(lambda: _next(stream))
            except StopAsyncIteration:
                return
    finally:
        with suppress(
            TenureError
        ):  # the backend was closed, or stayed with the parent process: there is nothing to close
            renewal_thread.call_blocking(lambda: _close(stream))


async def _next(stream: AsyncGenerator[T, None]) -> T:
    return await anext(stream)


async def _close(stream: AsyncGenerator[T, None]) -> None:
    await stream.aclose()
