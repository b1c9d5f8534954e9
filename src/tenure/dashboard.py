"""The dashboard as an ASGI application, to mount in your own, behind a login of your own.

``tenure dashboard`` serves the same by itself. It needs the extra ``dashboard``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any

from tenure import Backend
from tenure._public import publish_all
from tenure.errors import BackendNotInstalled, ConfigError

__all__ = ["Application", "app"]

Application = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""


def app(
    backend: Backend,
    *,
    allow_changes: bool = False,
    show_bodies: bool = False,
    hosts: Collection[str] | None = None,
    token: str | None = None,
) -> Application:
    """Return the dashboard of a store as an ASGI application.

    Everybody who reaches it sees the names and numbers of the store, and with *allow_changes*, can change it: put it
    behind a login, or give a *token*. Changes are accepted only from its own pages, and are in the log.

    Args:
        backend: The store, open while the application answers.
        allow_changes: Whether dead letters can be put back or removed, leaders asked to step down, schedules paused.
        show_bodies: Whether bodies of messages and tracebacks are shown.
        hosts: The host names under which it may be asked; without, any: then your own application has to check it.
        token: Needed to see anything.

    Raises:
        ConfigError: The token is blank, or *hosts* a single text.
        BackendNotInstalled: ``starlette`` or ``jinja2`` is not installed.

    Example::

        app.mount("/tenure", tenure.dashboard.app(backend))
    """
    if not isinstance(backend, Backend):
        raise ConfigError(f"the dashboard shows a tenure.Backend, not {backend!r:.80}")
    if isinstance(hosts, str):
        raise ConfigError(f"hosts is a collection of names, not one; write hosts=[{hosts!r}]")
    if token is not None and not token.strip():
        raise ConfigError("the token is blank; give one, or None if none is needed")
    try:
        from tenure._dashboard.app import Dashboard
        from tenure._dashboard.guard import Guard
    except ModuleNotFoundError as error:
        raise BackendNotInstalled(
            f"the dashboard needs the package {error.name!r}, which is not installed; run: "
            "pip install 'tenure[dashboard]'"
        ) from error
    guard = Guard(hosts, token)
    return Dashboard(backend, guard, may_change=allow_changes, show_bodies=show_bodies).application()


publish_all(__name__)
