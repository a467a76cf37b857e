"""`weir demo`: everything in one process, on loopback, with nothing to install and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import tempfile
from pathlib import Path

import typer

from engine_adapter.simulator import Simulator
from meter.app import Sidecar, now
from meter.callers.edits import KeyDraft
from meter.callers.registry import Registry
from meter.config import Config
from meter.ledger.database import open_engine

MODEL = "assistant"
PRIMARY_SPEED, CHEAP_SPEED = 500.0, 4_000.0
"""Tokens per second of the simulated workers: slow enough to watch, fast enough for a tour."""

TOKEN_VARIABLE = "WEIR_ADMIN_TOKEN"  # noqa: S105  the variable's name


async def run(host: str, port: int) -> None:
    """Until Ctrl-C or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    os.environ.setdefault(TOKEN_VARIABLE, secrets.token_urlsafe(24))
    large = Simulator("sim-large", tokens_per_second=PRIMARY_SPEED)
    small = Simulator("sim-small", tokens_per_second=CHEAP_SPEED)
    with tempfile.TemporaryDirectory(prefix="weir-demo-") as directory:
        try:
            workers = await large.start("127.0.0.1"), await small.start("127.0.0.1")
            config = _config(Path(directory), host, port, workers)
            async with Sidecar(config) as sidecar:
                secret = await _key(config, sidecar)
                typer.echo(_tour(host, sidecar, secret))
                await stop.wait()
                typer.echo("\nStopping: running requests finish, the last records are booked.")
        finally:
            await large.stop()
            await small.stop()
    typer.echo("Done; the demo's data is gone.")


def _config(directory: Path, host: str, port: int, workers: tuple[int, int]) -> Config:
    return Config.model_validate(
        {
            "listen": {"host": host, "port": _free(host, port), "grace_seconds": 5},
            "admin": {
                "port": _free("127.0.0.1", port + 1),
                "tokens": [{"name": "demo", "role": "admin", "token_env": TOKEN_VARIABLE}],
            },
            "health": {"host": "127.0.0.1", "port": _free("127.0.0.1", port + 2)},
            "ledger": {
                "url": f"sqlite+aiosqlite:///{directory / 'weir.db'}",
                "journal_dir": str(directory / "journal"),
            },
            "backends": {
                "large": {"url": f"http://127.0.0.1:{workers[0]}", "kind": "vllm"},
                "cheap": {"url": f"http://127.0.0.1:{workers[1]}", "kind": "vllm"},
            },
            "models": {
                MODEL: {
                    "primary": [{"backend": "large", "model": "sim-large"}],
                    "overflow": [{"backend": "cheap", "model": "sim-small"}],
                    "tokenizer": "engine",
                }
            },
            "prices": {
                f"{MODEL}@large": {"prompt": 0.50, "cached_prompt": 0.05, "completion": 1.50},
                f"{MODEL}@cheap": {"prompt": 0.10, "completion": 0.30},
            },
        }
    )


def _free(host: str, port: int) -> int:
    """`port` if nobody listens there, else 0: any free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return 0
    return port


async def _key(config: Config, sidecar: Sidecar) -> str:
    """A fresh key's secret, once the key is in force."""
    engine = open_engine(config.ledger.url)
    try:
        _, secret = await Registry(engine, now).create_key("demo", KeyDraft(name="demo", tier="standard"))
    finally:
        await engine.dispose()
    await sidecar.look_again()
    return secret


def _tour(host: str, sidecar: Sidecar, secret: str) -> str:
    traffic = f"http://{host}:{sidecar.ports.traffic}"
    admin = f"http://127.0.0.1:{sidecar.ports.admin}"
    health = f"http://127.0.0.1:{sidecar.ports.health}"
    auth = "-H \"Authorization: Bearer $KEY\" -H 'Content-Type: application/json'"
    chat = f"{traffic}/v1/chat/completions {auth}"
    hello = f'"model":"{MODEL}","messages":[{{"role":"user","content":"Say hello"}}]'
    return f"""
weir demo: two simulated workers, quotas in memory, a ledger in SQLite. Ctrl-C ends it, and its data goes with it.

  callers   {traffic}
  admin     {admin}/admin/v1
  health    {health}/readyz and /metrics

The key is on the tier "standard": 2,000 tokens a minute, a burst of 4,000 within 5 s, at most 50,000 an hour.
Paste this into another terminal:

export KEY={secret}
export ADMIN={os.environ[TOKEN_VARIABLE]}

# a plain answer
curl -s {chat} -d '{{{hello},"max_tokens":16}}'

# a stream
curl -sN {chat} -d '{{{hello},"max_tokens":16,"stream":true}}'

# the base rate, the burst, the spill to the cheaper backend, and in the end the 429 at the hard cap
for i in $(seq 60); do curl -s -o /dev/null -w '%{{http_code}} %header{{x-weir-verdict}} %header{{x-weir-backend}}\\n' \\
  {chat} -d '{{{hello},"max_tokens":1000}}'; done

# what the 429 says
curl -s {chat} -d '{{{hello},"max_tokens":1000}}'

# the key's own windows
curl -s {traffic}/v1/quota -H "Authorization: Bearer $KEY"

# the usage report, by model and backend
curl -s "{admin}/admin/v1/usage?group_by=model&group_by=backend" -H "Authorization: Bearer $ADMIN"
"""
