"""The tables: the only place with column names. Postgres is the reference; SQLite has the same tables and columns.

On Postgres `usage_record` is partitioned by month of `started_at` and the sums are bigint; the migrations say how.
"""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Dialect,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    TypeDecorator,
    UniqueConstraint,
    Uuid,
)
from sqlalchemy.dialects.postgresql import JSONB

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Json = JSON().with_variant(JSONB(none_as_null=True), "postgresql")
Big = BigInteger().with_variant(Integer(), "sqlite")  # SQLite's INTEGER has 64 bits, and only it counts up by itself


class Moment(TypeDecorator[datetime]):
    """A moment in UTC, with its zone on the way in (ValueError without) and out. SQLite keeps it without one."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value} has no time zone.")
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


USAGE_SUMS = (
    "prompt_tokens",
    "cached_prompt_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "engine_prompt_tokens",
    "engine_completion_tokens",
)

usage_record = Table(
    "usage_record",
    metadata,
    Column("exchange_id", Uuid, nullable=False),
    Column("request_id", Uuid, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("key_id", String, nullable=False),
    Column("team_id", String),
    Column("tags", Json, nullable=False),
    Column("endpoint", String, nullable=False),
    Column("model_requested", String, nullable=False),
    Column("model_served", String, nullable=False),
    Column("backend", String, nullable=False),
    Column("route", String, nullable=False),
    Column("verdict", String, nullable=False),
    Column("reason", String),
    Column("streamed", Boolean, nullable=False),
    *(Column(name, Big, nullable=False) for name in USAGE_SUMS),
    Column("usage_source", String, nullable=False),
    Column("expected_tokens", Big, nullable=False),
    Column("ceiling_tokens", Big, nullable=False),
    Column("ending", String, nullable=False),
    Column("http_status", Integer),
    Column("finish_reason", String),
    Column("started_at", Moment, nullable=False),
    Column("first_token_ms", Big),
    Column("duration_ms", Big, nullable=False),
    Column("price_id", Big),
    Column("cost_nanousd", Big),
    PrimaryKeyConstraint("exchange_id", "started_at"),
    Index(None, "key_id", "started_at"),
    Index(None, "started_at"),
    Index(None, "request_id"),
)

usage_hourly = Table(
    "usage_hourly",
    metadata,
    Column("hour", Moment, nullable=False),
    Column("key_id", String, nullable=False),
    Column("team_id", String, nullable=False, comment="'' where the key has no team"),
    Column("model", String, nullable=False, comment="model_requested"),
    Column("backend", String, nullable=False),
    Column("route", String, nullable=False),
    Column("requests", Big, nullable=False),
    *(Column(name, Big, nullable=False) for name in USAGE_SUMS),
    Column("cost_nanousd", Big, nullable=False, comment="records without a price add 0 here and 1 to unpriced"),
    Column("unpriced", Big, nullable=False),
    PrimaryKeyConstraint("hour", "key_id", "team_id", "model", "backend", "route"),
)

refusal_minute = Table(
    "refusal_minute",
    metadata,
    Column("minute", Moment, nullable=False),
    Column("key_id", String, nullable=False),
    Column("rule", String, nullable=False, comment="parallel | cap | rate"),
    Column("shadow", Boolean, nullable=False, comment="only counted: the limit is not in force"),
    Column("refusals", Big, nullable=False),
    PrimaryKeyConstraint("minute", "key_id", "rule", "shadow"),
    Index(None, "key_id", "minute"),
)

refusal_flush = Table(
    "refusal_flush",
    metadata,
    Column("writer", Uuid, primary_key=True, comment="one process that counts refusals, from its start to its end"),
    Column("number", Big, nullable=False, comment="of its last batch that was added to refusal_minute"),
    Column("at", Moment, nullable=False),
)

tier = Table(
    "tier",
    metadata,
    Column("name", String, primary_key=True),
    Column("policy", Json, nullable=False, comment="the fields that were given; the rest are the product's defaults"),
    Column("managed_by", String, nullable=False, comment="file | rest"),
    Column("version", Big, nullable=False),
)

team = Table(
    "team",
    metadata,
    Column("name", String, primary_key=True),
    Column("policy", Json, nullable=False),
    Column("managed_by", String, nullable=False),
    Column("version", Big, nullable=False),
)

api_key = Table(
    "api_key",
    metadata,
    Column("id", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("tier", String, nullable=False),
    Column("team", String),
    Column("models", Json, comment="list of names; null: what the tier allows"),
    Column("tags", Json, nullable=False),
    Column("policy", Json, nullable=False, comment="override: the fields that differ from the tier"),
    Column("disabled", Boolean, nullable=False),
    Column("secret_sha256", String, nullable=False, comment="hex of SHA-256 of the secret part"),
    Column("previous_sha256", String, comment="the rotated secret, valid until previous_until"),
    Column("previous_until", Moment),
    Column("managed_by", String, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("expires_at", Moment),
    Column("version", Big, nullable=False),
    UniqueConstraint("name"),
)

price = Table(
    "price",
    metadata,
    Column("id", Big, primary_key=True, autoincrement=True),
    Column("model", String, nullable=False, comment="the name callers use"),
    Column("backend", String, nullable=False),
    Column("effective_from", Moment, nullable=False),
    Column("prompt", Big, nullable=False, comment="nano-dollars per million tokens"),
    Column("cached_prompt", Big, comment="null: charged as prompt"),
    Column("completion", Big, nullable=False),
    Column("managed_by", String, nullable=False),
    UniqueConstraint("model", "backend", "effective_from"),
)

audit_log = Table(
    "audit_log",
    metadata,
    Column("id", Big, primary_key=True, autoincrement=True),
    Column("at", Moment, nullable=False),
    Column("actor", String, nullable=False, comment="name of the admin token, or 'cli', 'file'"),
    Column("action", String, nullable=False, comment="create | update | delete"),
    Column("entity", String, nullable=False, comment="key | tier | team | price"),
    Column("entity_id", String, nullable=False),
    Column("before", Json),
    Column("after", Json),
    Index(None, "entity", "entity_id"),
)

directory_revision = Table(
    "directory_revision",
    metadata,
    Column("id", Integer, primary_key=True, comment="always 1"),
    Column(
        "revision",
        Big,
        nullable=False,
        comment="goes up in the transaction of every edit of keys, tiers, teams, prices",
    ),
)
