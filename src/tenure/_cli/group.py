"""The group of commands, their shared options, and the one table of errors and their exit codes."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

import tenure
from tenure._cli.examples import Command
from tenure._cli.exits import OTHER_CODES, Exit, Failure
from tenure.errors import ConfigError, TenureError, nearest

if TYPE_CHECKING:
    from tenure import Backend, Queue

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        # each has a module of this name here, with the attribute `command`; it is imported when it is needed
        "lead": "Run a command only while leading.",
        "status": "Show the leader of NAME, or of every name of the store.",
        "watch": "Show every change of leader.",
        "resign": "Ask the present leader to step down.",
        "doctor": "Check a store: its traits, latency and warnings.",
        "explain": "Say more about an error, an exit code, or a warning of doctor.",
        "migrate": "Create or upgrade the schema of a store that needs one, such as PostgreSQL.",
        "send": "Put messages into a queue.",
        "work": "Run a command for every message of a queue.",
        "run": "Run the processes of a service, and keep them running.",
        "queue": "Count the messages of a queue, or of all; show, purge or delete them.",
        "dead": "List dead letters, put them back, or remove them.",
        "partitions": "Show the groups that share partitions, with their members and owners.",
        "schedule": "List schedules with their last and next times; pause, resume or remove them.",
        "top": "Show the elections, partitions, queues and schedules of a store, live.",
        "dashboard": "Show the same in a browser, with messages and dead letters.",
        "sim": "Simulate elections or queues, and find a seed that breaks a promise.",
        "demo": "Demonstrate an election, competing consumers, and two crashes.",
    }
)

SOCKET_BASE = "/tmp"  # noqa: S108  # its owner and mode are checked; XDG_RUNTIME_DIR ends with the user's last login
"""Where the folder of the sockets for ``status --me`` is, unless another place is given."""

SOCKET_VARIABLE = "TENURE_SOCKET_DIR"
"""The environment variable that gives another place."""

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
T = TypeVar("T")

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SETTING = re.compile(r"\b(ttl|renew_every|retry_every|grace)=(?=[\d.])")
_UNDECODED = re.compile(r"\\udc[89a-f]")
"""In a message, bytes of the command line that are not text in the locale's encoding."""

_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
BROKEN_PIPE = 128 + 13  # as SIGPIPE would end it; Python ignores that signal


def exit_of(error: Exception) -> tuple[int, str]:
    """Return the exit code for an error, and its text for the operator."""
    match error:
        case Failure():
            return error.code, str(error)
        case click.UsageError():
            where = f"{error.ctx.command_path} --help" if error.ctx else "tenure --help"
            return Exit.USAGE, f"{error.format_message().rstrip('.')}; see: {where}"
        case click.ClickException():
            return Exit.USAGE, error.format_message()
        case ConfigError():  # a keyword in Python is an option here
            text = _SETTING.sub(lambda found: f"--{found[1].replace('_', '-')} ", str(error))
            if _UNDECODED.search(text) and sys.getfilesystemencoding() != "utf-8":
                text = f"{text}; the locale is not UTF-8, set LC_ALL=C.UTF-8 or PYTHONUTF8=1"
            return Exit.CONFIG, text
        case TenureError():
            return Exit.UNAVAILABLE, str(error)
        case BrokenPipeError():
            return BROKEN_PIPE, "the program that read the standard output has ended"
        case OSError() if error.errno in _UNWRITTEN and error.filename is None:  # stores raise none
            return Exit.OUTPUT, f"the standard output can't be written: {error.strerror}"
    return Exit.INTERNAL, f"a bug in tenure {tenure.__version__}: {type(error).__name__}"


def explained_by(error: BaseException) -> str:
    """Return the code under which ``tenure explain`` says more about an error; empty if its message names a help."""
    if isinstance(error, Failure) and isinstance(error.__cause__, TenureError):
        return error.__cause__.code
    if isinstance(error, TenureError):
        return error.code
    if isinstance(error, click.UsageError) or not isinstance(error, Exception):
        return ""
    code = exit_of(error)[0]
    return f"exit-{min(code, Exit.SIGNAL)}"


def complete(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a command that needs an event loop; an interrupt ends it at any time."""
    import asyncio
    import signal

    async def awake() -> T:
        if sys.platform != "win32":
            # Otherwise an interrupt that comes just as the loop is about to wait, or in another thread, is handled with
            # the next event, and there may be none. With a handler for any signal, all signals wake the loop.
            with suppress(RuntimeError):  # in a thread, which gets no signals
                asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, lambda: None)
        return await coroutine

    return asyncio.run(awake())


# --- the group ---------------------------------------------------------------------------------------------------


class NoCommand(Exception):  # never raised out of the command line
    """The command is missing; the message is the whole help."""


class HelpfulGroup(Command, click.Group):
    """A group whose command must be given."""

    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:  # click's own answer differs between its versions
            raise NoCommand(ctx.get_help())
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            name = ctx.invoked_subcommand
            if error.ctx is None and name and (command := self.get_command(ctx, name)):
                # click's parser does not name the command of the option
                error.ctx = click.Context(command, info_name=name, parent=ctx)
            raise


class Branching(Command):
    """A command with subcommands that also works without one; if its first argument names a subcommand, that is called.

    So an argument that equals such a name is given after ``--``.
    """

    def __init__(self, *args: Any, branches: Sequence[click.Command] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self.branches: dict[str, click.Command] = {str(one.name): one for one in branches}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(80)) for name, one in self.branches.items()])


class _Group(HelpfulGroup):
    """Commands that are imported when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name, _, branch = cmd_name.partition(" ")
        if name not in COMMANDS:
            return None
        command = cast("click.Command", import_module(f"tenure._cli.{name}").command)
        return command.branches[branch] if branch and isinstance(command, Branching) else command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"there is no command {args[0]!r}{nearest(args[0], list(COMMANDS))}")
        name, command, rest = super().resolve_command(ctx, args)
        if isinstance(command, Branching) and rest and rest[0] in command.branches:
            return f"{name} {rest[0]}", command.branches[rest[0]], rest[1:]
        return name, command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(int(code)), code.meaning) for code in Exit] + [("", OTHER_CODES)])
        with formatter.section("Environment"):
            formatter.write_dl(
                [
                    ("TENURE_URL", "the store, if --on is not given; put a password here"),
                    (SOCKET_VARIABLE, "lead, status --me: where the sockets are, if --socket-dir is not given"),
                ]
            )
        super().format_epilog(ctx, formatter)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(tenure.__version__, prog_name="tenure", message="%(prog)s %(version)s")
def group() -> None:
    """Leader election and competing consumers for any program, on the store that you already run.

    Elections: lead, status, watch, resign, partitions. Queues: send, work, queue, dead. Services: run, schedule.
    Each command has a --help of its own.
    """


# --- shared by commands -----------------------------------------------------------------------------------------


def duration(text: str) -> float:
    """Read seconds, or a number with a unit; to be used as the type of an option."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)(ms|s|m|h|d|)", text)
    if not found:
        raise click.BadParameter(
            f"{text!r} is not a duration; write seconds (15, 0.5) or a unit (500ms, 15s, 2m, 1h, 7d)"
        )
    return float(found[1]) * _UNITS[found[2]]


def key_value(text: str) -> tuple[str, str]:
    """Read ``key=value``; to be used as the type of an option."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise click.BadParameter(f"{text!r} is not of the form key=value")
    return key, value


def _given(ctx: click.Context, param: click.Parameter, url: str | None) -> str:
    if ctx.params.get("me"):  # no store is asked
        return url or ""
    if not url and not ctx.resilient_parsing:
        raise click.UsageError(
            "no store given; add --on URL or set TENURE_URL, for example --on sqlite:///work.db",
            ctx,
        )
    if url and url.partition(":")[0] == "memory" and not ctx.resilient_parsing:
        raise ConfigError(
            "memory: exists inside one process only, so other processes can't use it; "
            "name a store that processes share, for example sqlite:///work.db"
        )
    return url or ""


def on_option(function: AnyFunction) -> AnyFunction:
    """Add ``--on URL``."""
    return click.option(
        "--on",
        "url",
        metavar="URL",
        envvar="TENURE_URL",
        callback=_given,
        help="The store, for example sqlite:///work.db. [default: TENURE_URL; put a password there: "
        "every user of the machine can read a command line]",
    )(function)


def socket_option(function: AnyFunction) -> AnyFunction:
    """Add ``--socket-dir DIR``."""
    return click.option(
        "--socket-dir",
        type=click.Path(file_okay=False),
        metavar="DIR",
        envvar=SOCKET_VARIABLE,
        help=f"Where the folder with the sockets for status --me is. [default: {SOCKET_VARIABLE}, else {SOCKET_BASE}]",
    )(function)


def json_option(function: AnyFunction) -> AnyFunction:
    """Add ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def refuse_both(verbose: int, quiet: bool) -> None:
    """Refuse --verbose together with --quiet."""
    if verbose and quiet:
        raise click.UsageError("--verbose and --quiet contradict each other; give one of them")


def one_url(ctx: click.Context, address: str | None, on: str | None, example: str) -> str:
    """Return the store of a command that takes it as an argument or by --on."""
    if address and on and ctx.get_parameter_source("on") == click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("URL and --on both name a store; give one of them", ctx)
    if url := address or on:
        return url
    raise click.UsageError(f"name the store, for example: {ctx.command_path} {example}", ctx)


def connect(url: str) -> Backend:
    """Open the store for a short command."""
    return tenure.connect(url)


def connect_existing(url: str) -> Backend:
    """Open the store for a command that only reads: an SQLite file that doesn't exist is not created."""
    backend = connect(url)
    if backend.url.scheme == "sqlite" and "create" not in backend.url.query:
        # Not added to the URL as written, which errors quote.
        backend.url = backend.url.with_option("create", "false")
    return backend


async def with_queue(url: str, name: str, do: Callable[[Queue], Coroutine[Any, Any, T]]) -> T:
    """Return the result of *do* for a queue; if it is empty and the queue doesn't exist, fail."""
    async with connect_existing(url) as backend:
        found = await do(backend.queue(name))
        if not found and (unused := await never_used(backend, name)):
            raise Failure(Exit.VACANT, unused)
        return found


async def never_used(backend: Backend, name: str) -> str:
    """Return an error text if the queue doesn't exist, as its name may be misspelt; otherwise an empty text."""
    known = await backend.queues()
    if name in known:
        return ""
    hint = nearest(name, known) or "; list the queues with: tenure queue"
    return f"there is no queue {name!r} on this store{hint}"


def seconds_option(name: str, meaning: str) -> Callable[[AnyFunction], AnyFunction]:
    """Add an option that is a duration."""
    return click.option(name, type=duration, metavar="S", help=meaning)
