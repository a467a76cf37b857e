"""The command `weir`. Exit codes: 0 fine, 1 the answer is no, 2 the words or the file are wrong.

Errors go to stderr as plain sentences that say what to do, never as a traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import uvloop

from engine_adapter import simulator
from engine_adapter.prompt_size import TokenizerUnavailable
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
    Path | None, typer.Option("-c", "--config", help="The YAML file; without one, defaults and WEIR_… variables.")
]


class Only(StrEnum):
    admin = "admin"
    traffic = "traffic"


@cli.command()
def serve(config: ConfigPath = None, only: Annotated[Only | None, typer.Option(help="One site alone.")] = None) -> None:
    """Serve: the traffic, admin and health sites."""
    settings = _load(config)
    if only is not Only.admin and not settings.models:
        _fail(WRONG, "No models are configured: add backends: and models: to the file, or try `weir demo`.")
    log.configure(settings.log.level, settings.log.format)
    _run(app.serve(settings, only.value if only else "all"))


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
    typer.echo("ok    configuration")
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
        for where, reason in error.mistakes:
            typer.echo(f"{where}: {reason}", err=True)
        raise typer.Exit(WRONG) from None


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs to the end; what went wrong becomes one sentence and an exit code."""
    try:
        return uvloop.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except DatabaseUnavailable as error:
        _fail(NO, str(error))
    except Invalid as error:
        for where, reason in error.mistakes:
            typer.echo(f"{where}: {reason}", err=True)
        raise typer.Exit(WRONG) from None
    except (Conflict, TokenizerUnavailable, ValueError) as error:
        _fail(WRONG, str(error))
    except OSError as error:
        _fail(NO, f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}.")


def _fail(code: int, sentence: str) -> NoReturn:
    typer.echo(sentence, err=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    main()
