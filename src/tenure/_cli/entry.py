"""One run of the command line: the command, or completion for the shell, and the exit code that it ends with."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import click

from tenure._cli.exits import Exit
from tenure._cli.group import BROKEN_PIPE, NoCommand, exit_of, explained_by, group
from tenure._cli.output import lead_on, log_to_stderr, print_error

COMPLETION = "_TENURE_COMPLETE"
"""The variable by which a shell asks for completion; the name is click's."""


def run(arguments: Sequence[str]) -> int:
    """Run the command line *arguments*; return the exit code."""
    if asked := os.environ.get(COMPLETION):
        from tenure._cli.completion import answer

        return answer(group, COMPLETION, asked)
    log_to_stderr(-1)  # until the command asks for more; also after another command in this process
    try:
        result = group.main(list(arguments), prog_name="tenure", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else Exit.DONE
    except click.exceptions.Exit as left:
        return left.exit_code
    except (BrokenPipeError, SystemExit):  # click turns the former into the latter
        _drop_output()
        return BROKEN_PIPE
    except (KeyboardInterrupt, click.Abort):
        return Exit.SIGNAL + 2
    except NoCommand as error:
        sys.stderr.write(f"{error}\n")
        return Exit.USAGE
    except Exception as error:
        code, message = exit_of(error)
        print_error(_without_secrets(message, arguments))
        lead_on(explained_by(error))
        if code == Exit.INTERNAL:
            traceback.print_exception(error)
        if code in (Exit.OUTPUT, BROKEN_PIPE):
            _drop_output()
        return code


def _without_secrets(message: str, arguments: Sequence[str]) -> str:
    """Return a message without the secrets of a URL that was given where something else belongs, such as a name."""
    from tenure._url import shown_in  # not needed while all goes well

    for word in arguments:
        if (shown := shown_in(word)) != word:
            for part in (word, repr(word)[1:-1]):
                message = message.replace(part, shown)
            if shown not in message:
                message = message.replace(word.partition("=")[0], shown)  # which click quotes
    return message


def _drop_output() -> None:
    """Discard the rest of the output: Python would report the error again when it flushes at the end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
