"""The command line, here its front door, and nothing slow.

Elections: ``tenure lead|status|watch|resign``. Queues: ``tenure send|work|queue|dead``. Stores: ``tenure
doctor|migrate``. To see it all: ``tenure sim|demo``.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]

NOT_INSTALLED = (
    "tenure: error: the command line needs click and rich, which are not installed; run: pip install 'tenure[cli]'"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; the table of codes is in :mod:`tenure._cli.exits`."""
    if arguments is None:
        _open_streams()
    try:
        import click  # noqa: F401
        import rich  # noqa: F401  # the package itself is cheap; its modules are imported where a table is drawn
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.stderr.write(f"{NOT_INSTALLED}\n")
        return 2
    from tenure._cli.run import run

    return run(sys.argv[1:] if arguments is None else arguments)


def _open_streams() -> None:
    """See to it that what is said can be written, whatever the caller made of the standard streams.

    Closed ones lead nowhere, or a database would be opened in their place. What the output's encoding doesn't have is
    escaped.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            assert nowhere == number
            os.set_inheritable(nowhere, True)
        if number and getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
