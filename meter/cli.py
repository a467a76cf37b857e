"""The command `weir`. Exit codes: 0 fine, 1 the answer is no, 2 the words or the file are wrong.

Errors go to stderr as plain sentences that say what to do, never as a traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterable
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import uvloop
from typer.core import TyperGroup

from engine_adapter import simulator
from engine_adapter.exact_size import TokenizerUnavailable
from meter import app, checks, demo
from meter.callers.errors import Conflict, Invalid
from meter.config import Config, ConfigError, load
from meter.keys_cli import keys
from meter.ledger.database import DatabaseUnavailable, migrate
from meter.telemetry import log

NO, WRONG = 1, 2

cli = typer.Typer(
    help="Meters every token beside vLLM, holds each key to its quota, spills overage to a cheaper backend.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cli.add_typer(keys, name="keys", help="Create, list, show, rotate, disable and delete keys, straight in the database.")

ConfigPath = Annotated[
    Path | None,
    typer.Option("-c", "--config", help="The YAML file. Without -c: ./weir.yaml if there is one, else defaults."),
]
HERE = Path("weir.yaml")
"""What is read without -c, if it is there."""


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"weir {version('tokenweir')}")
        raise typer.Exit


@cli.callback()
def weir(
    context: typer.Context,
    _: Annotated[
        bool, typer.Option("--version", help="Say the version.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """What holds for every command."""
    if HERE.is_file():
        context.default_map = _with_file(context.command)


def _with_file(command: object) -> dict[str, Any]:
    """The defaults of a command and of those beneath it."""
    if isinstance(command, TyperGroup):
        return {name: _with_file(beneath) for name, beneath in command.commands.items()}
    return {"config": str(HERE)}


class Only(StrEnum):
    admin = "admin"
    traffic = "traffic"


@cli.command()
def serve(config: ConfigPath = None, only: Annotated[Only | None, typer.Option(help="One site alone.")] = None) -> None:
    """Serve: the traffic, admin and health sites."""
    settings = _load(config)
    sites: app.Sites = only.value if only else "all"
    if mistakes := checks.hindrances(settings, sites):
        _refuse(mistakes)
    log.configure(settings.log.level, settings.log.format)
    for where, reason in checks.empty_secrets(settings, sites):
        log.warning("a secret is empty", where=where, reason=reason)
    _run(app.serve(settings, sites), lambda: checks.unbindable(settings, sites))


@cli.command("demo")
def demo_command(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Traffic site; a free port is taken when it is in use.")] = 8080,
) -> None:
    """Try it: everything in one process, with two simulated workers, no service needed."""
    log.configure("warning", "text")
    _run(demo.run(host, port))


@cli.command("migrate")
def migrate_command(config: ConfigPath = None) -> None:
    """Bring the database to the newest schema."""
    settings = _load(config)
    _run(migrate(settings.ledger.url))
    typer.echo("The database has the newest schema.")


@cli.command()
def check(config: ConfigPath = None) -> None:
    """Validate the file, then reach every backend, the quota store and the database."""
    settings = _load(config)
    typer.echo(f"ok    configuration: {config or 'defaults and WEIR_… variables, no file'}")
    results = _run(checks.run(settings))
    for result in results:
        typer.echo(f"{'ok   ' if result.good else 'FAIL '} {result.what}: {result.said}")
    if not all(result.good for result in results):
        raise typer.Exit(NO)


@cli.command()
def simulate(
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    model: Annotated[str, typer.Option(help="The model's name.")] = "sim",
    tokens_per_second: Annotated[
        float | None, typer.Option(min=0.001, help="Speed of one answer; none: at once.")
    ] = None,
    fault: Annotated[list[str] | None, typer.Option(help="A scripted fault; may be given again.")] = None,
) -> None:
    """Run a worker that speaks vLLM's wire and makes exactly max_tokens tokens."""
    _run(_until_stopped(simulator.run(host, port, model, tokens_per_second, fault or (), _listening)))


def _listening(port: int) -> None:
    typer.echo(f"simulating on port {port}", err=True)


async def _until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` until it ends or SIGTERM or SIGINT comes."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def main() -> None:
    """The console script."""
    cli()


def _load(path: Path | None) -> Config:
    try:
        return load(path)
    except ConfigError as error:
        _refuse(error.mistakes)


def _refuse(mistakes: Iterable[tuple[str, str]]) -> NoReturn:
    for where, reason in mistakes:
        typer.echo(f"{where}: {reason}", err=True)
    raise typer.Exit(WRONG)


def _run(work: Coroutine[Any, Any, Any], explain: Callable[[], str | None] = lambda: None) -> Any:
    """Runs to the end; what went wrong becomes one sentence and an exit code. `explain`: what the system's error means."""
    try:
        return uvloop.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except DatabaseUnavailable as error:
        _fail(NO, str(error))
    except Invalid as error:
        _refuse(error.mistakes)
    except (Conflict, TokenizerUnavailable, ValueError) as error:
        _fail(WRONG, str(error))
    except OSError as error:
        _fail(NO, explain() or f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}.")


def _fail(code: int, sentence: str) -> NoReturn:
    typer.echo(sentence, err=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    main()
