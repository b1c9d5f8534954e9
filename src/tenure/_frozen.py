"""An immutable dict, for plain values that are copied, pickled and written as JSON."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A dict whose items can't be changed.

    Unlike a ``MappingProxyType``, it works as a dict with ``json``, ``dataclasses.asdict``, ``pickle`` and ``copy``.
    ``dict(it)`` and ``it.copy()`` return a mutable copy.
    """

    __slots__ = ()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("this mapping can't be changed; change a copy of it: dict(…)")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict[K, V]], tuple[dict[K, V]]]:
        return type(self), (dict(self),)
