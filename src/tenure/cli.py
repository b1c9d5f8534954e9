"""The entry point of the command line; it imports nothing slow.

Elections: ``tenure lead|status|watch|resign|partitions``. Queues: ``tenure send|work|queue|dead``. Stores: ``tenure
doctor|explain|migrate``. Demonstrations: ``tenure sim|demo``.
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
    """Run one command and return its exit code; ``tenure --help`` shows the table of codes.

    Args:
        arguments: The words of the command line, without ``tenure``; those of this process unless given.

    Raises:
        TypeError: *arguments* is a single text, or one of its words is no text.
    """
    if arguments is None:
        _open_streams()
    elif isinstance(arguments, str) or not all(isinstance(word, str) for word in arguments):
        raise TypeError(f"main() takes a list of words, such as ['status', 'nightly-report'], not {arguments!r:.80}")
    try:
        import click  # noqa: F401
        import rich  # noqa: F401  # the package itself is cheap; its modules are imported where a table is drawn
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.stderr.write(f"{NOT_INSTALLED}\n")
        return 2
    from tenure._cli.entry import run

    return run(sys.argv[1:] if arguments is None else arguments)


def _open_streams() -> None:
    """Make the standard streams usable, whatever the caller has closed.

    Closed ones are opened on the null device, or a database file would get their number. Characters that the output's
    encoding doesn't have are escaped.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            assert null == number
            os.set_inheritable(null, True)
        if number and getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
