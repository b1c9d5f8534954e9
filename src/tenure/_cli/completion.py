"""Completion in the shell, by click's own mechanism: words, options, and the names in the store.

After an error there is no completion, because a message must not appear in the line that the user types. Names are
untrusted text, so those that a shell would have to quote are omitted.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, shell_complete, split_arg_string

from tenure._cli.exits import Exit

if TYPE_CHECKING:
    from tenure import Backend

TIMEOUT = 1.0
"""Seconds for the store to list its queues or elections, unless ``TENURE_COMPLETE_TIMEOUT`` is set."""

_PLAIN = re.compile(r"[\w.:/@%+-]+", re.ASCII)

_BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' type value
    COMPREPLY=()
    while IFS=',' read -r type value; do
        if [[ $type == dir ]]; then
            compopt -o dirnames
        elif [[ $type == file ]]; then
            compopt -o default
        elif [[ $type == plain ]]; then
            COMPREPLY+=("$value")
        fi
    done < <(COMP_WORDS="${COMP_LINE:0:COMP_POINT}" COMP_BREAKS="$COMP_WORDBREAKS" %(complete_var)s=bash_complete "$1")
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""


@add_completion_class
class _Bash(BashComplete):
    """Bash itself cuts words at colons and equals signs, also that of ``--on sqlite:///work.db``."""

    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(line)
        incomplete = words.pop() if line[-1:].strip() else ""
        breaks = set(os.environ.get("COMP_BREAKS", "=:")) & set("=:")
        self._kept = max((incomplete.rfind(one) for one in breaks), default=-1) + 1
        return words[1:], incomplete

    def format_completion(self, item: CompletionItem[str]) -> str:
        # Bash replaces only the text after the last break.
        return f"{item.type},{item.value[self._kept :]}"


def answer(cli: click.Command, variable: str, instruction: str) -> int:
    """Answer the shell: print its script (``bash_source``), or complete a line (``bash_complete``).

    *variable* is the one in which the shell gives its *instruction*.
    """
    if not instruction.endswith("_complete"):
        code = shell_complete(cli, {}, "tenure", variable, instruction)
        if code:
            text = f"{variable}={instruction} is not known; use bash_source, zsh_source or fish_source"
            sys.stderr.write(f"tenure: {text}\n")
        return Exit.USAGE if code else Exit.DONE
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    try:
        shell_complete(cli, {}, "tenure", variable, instruction)
        sys.stdout.flush()
    finally:
        os._exit(0)  # without waiting for threads that still wait for a store, and without tracebacks


# --- names -------------------------------------------------------------------------------------------------------


def queue_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete the name of a queue, or a subcommand in its place."""
    return [*_branches(ctx, incomplete), *_names(ctx, incomplete, lambda backend: backend.queues())]


def schedule_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete the name of a schedule, or a subcommand in its place."""

    async def ask(backend: Backend) -> Iterable[str]:
        return {one.name for one in await backend.schedules()}

    return [*_branches(ctx, incomplete), *_names(ctx, incomplete, ask)]


def election_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete the name of an election; of a partition, after the name of its group and a dot."""

    async def ask(backend: Backend) -> Iterable[str]:
        from tenure import PartitionGroup

        leaders = await backend.leaders()
        groups = PartitionGroup.all_in(leaders)
        hidden = {lease for one in groups if not incomplete.startswith(f"{one.name}.") for lease in one.leases}
        return [name for name in leaders if name not in hidden]

    return _names(ctx, incomplete, ask)


def group_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete the name of a group that shares partitions."""

    async def ask(backend: Backend) -> Iterable[str]:
        from tenure import PartitionGroup

        return [one.name for one in PartitionGroup.all_in(await backend.leaders())]

    return _names(ctx, incomplete, ask)


def _branches(ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
    branches = getattr(ctx.command, "branches", ())
    return [CompletionItem(word) for word in branches if incomplete and word.startswith(incomplete)]


def explained_codes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete a code of ``tenure explain``."""
    from tenure._cli.explanations import sections

    return [CompletionItem(code) for code in sections() if code.startswith(incomplete)]


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Let the shell complete file names."""
    return [CompletionItem(incomplete, type="file")]


def _names(
    ctx: click.Context, incomplete: str, ask: Callable[[Backend], Awaitable[Iterable[str]]]
) -> list[CompletionItem[str]]:
    found: list[str] = []
    url = ctx.params.get("url")

    def look() -> None:
        import asyncio

        found.extend(asyncio.run(_asked(str(url), ask)))

    if url:
        thread = threading.Thread(target=look, name="tenure-completion", daemon=True)
        thread.start()
        thread.join(_timeout())
    return [CompletionItem(name) for name in found if name.startswith(incomplete) and _PLAIN.fullmatch(name)]


def _timeout() -> float:
    try:
        return min(max(float(os.environ["TENURE_COMPLETE_TIMEOUT"]), 0.0), 60.0)
    except (KeyError, ValueError):
        return TIMEOUT


async def _asked(url: str, ask: Callable[[Backend], Awaitable[Iterable[str]]]) -> list[str]:
    from tenure._cli.group import connect_existing

    backend = connect_existing(url)
    if backend.url.scheme in ("memory", "peers"):  # the former has no names; only members can ask the latter
        return []
    if backend.url.scheme == "sqlite":  # whatever the URL says
        backend.url = backend.url.with_option("create", "false")
    async with backend:
        return list(await ask(backend))
