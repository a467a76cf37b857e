"""The ledger as it began: records by month, hourly sums, keys, tiers, teams, prices, the audit log.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    usage()
    terms()
    keys()
    prices()
    audit()


def usage() -> None:
    op.create_table(
        "usage_record",
        sa.Column("exchange_id", sa.Uuid(), nullable=False),
        sa.Column("request_id", sa.Uuid(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("team_id", sa.String()),
        sa.Column("tags", JSON, nullable=False),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("model_requested", sa.String(), nullable=False),
        sa.Column("model_served", sa.String(), nullable=False),
        sa.Column("backend", sa.String(), nullable=False),
        sa.Column("route", sa.String(), nullable=False),
        sa.Column("verdict", sa.String(), nullable=False),
        sa.Column("reason", sa.String()),
        sa.Column("streamed", sa.Boolean(), nullable=False),
        *sums(),
        sa.Column("usage_source", sa.String(), nullable=False),
        sa.Column("expected_tokens", BIG, nullable=False),
        sa.Column("ceiling_tokens", BIG, nullable=False),
        sa.Column("ending", sa.String(), nullable=False),
        sa.Column("http_status", sa.Integer()),
        sa.Column("finish_reason", sa.String()),
        sa.Column("started_at", MOMENT, nullable=False),
        sa.Column("first_token_ms", BIG),
        sa.Column("duration_ms", BIG, nullable=False),
        sa.Column("price_id", BIG),
        sa.Column("cost_nanousd", BIG),
        sa.PrimaryKeyConstraint("exchange_id", "started_at", name="pk_usage_record"),
        postgresql_partition_by="RANGE (started_at)",
    )
    op.create_index("ix_usage_record_key_id_started_at", "usage_record", ["key_id", "started_at"])
    op.create_index("ix_usage_record_started_at", "usage_record", ["started_at"])
    op.create_index("ix_usage_record_request_id", "usage_record", ["request_id"])
    op.create_table(
        "usage_hourly",
        sa.Column("hour", MOMENT, nullable=False),
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("team_id", sa.String(), nullable=False, comment="'' where the key has no team"),
        sa.Column("model", sa.String(), nullable=False, comment="model_requested"),
        sa.Column("backend", sa.String(), nullable=False),
        sa.Column("route", sa.String(), nullable=False),
        sa.Column("requests", BIG, nullable=False),
        *sums(),
        sa.Column("cost_nanousd", BIG, nullable=False, comment="records without a price add 0 here and 1 to unpriced"),
        sa.Column("unpriced", BIG, nullable=False),
        sa.PrimaryKeyConstraint("hour", "key_id", "team_id", "model", "backend", "route", name="pk_usage_hourly"),
    )


def sums() -> list[sa.Column[int]]:
    return [
        sa.Column("prompt_tokens", BIG, nullable=False),
        sa.Column("cached_prompt_tokens", BIG, nullable=False),
        sa.Column("completion_tokens", BIG, nullable=False),
        sa.Column("reasoning_tokens", BIG, nullable=False),
        sa.Column("engine_prompt_tokens", BIG, nullable=False),
        sa.Column("engine_completion_tokens", BIG, nullable=False),
    ]


def terms() -> None:
    op.create_table(
        "tier",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column(
            "policy", JSON, nullable=False, comment="the fields that were given; the rest are the product's defaults"
        ),
        sa.Column("managed_by", sa.String(), nullable=False, comment="file | rest"),
        sa.Column("version", BIG, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_tier"),
    )
    op.create_table(
        "team",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("policy", JSON, nullable=False),
        sa.Column("managed_by", sa.String(), nullable=False),
        sa.Column("version", BIG, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_team"),
    )


def keys() -> None:
    op.create_table(
        "api_key",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("tier", sa.String(), nullable=False),
        sa.Column("team", sa.String()),
        sa.Column("models", JSON, comment="list of names; null: what the tier allows"),
        sa.Column("tags", JSON, nullable=False),
        sa.Column("policy", JSON, nullable=False, comment="override: the fields that differ from the tier"),
        sa.Column("disabled", sa.Boolean(), nullable=False),
        sa.Column("secret_sha256", sa.String(), nullable=False, comment="hex of SHA-256 of the secret part"),
        sa.Column("previous_sha256", sa.String(), comment="the rotated secret, valid until previous_until"),
        sa.Column("previous_until", MOMENT),
        sa.Column("managed_by", sa.String(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("expires_at", MOMENT),
        sa.Column("version", BIG, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_api_key"),
        sa.UniqueConstraint("name", name="uq_api_key_name"),
    )


def prices() -> None:
    op.create_table(
        "price",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("model", sa.String(), nullable=False, comment="the name callers use"),
        sa.Column("backend", sa.String(), nullable=False),
        sa.Column("effective_from", MOMENT, nullable=False),
        sa.Column("prompt", BIG, nullable=False, comment="nano-dollars per million tokens"),
        sa.Column("cached_prompt", BIG, comment="null: charged as prompt"),
        sa.Column("completion", BIG, nullable=False),
        sa.Column("managed_by", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_price"),
        sa.UniqueConstraint("model", "backend", "effective_from", name="uq_price_model_backend_effective_from"),
    )


def audit() -> None:
    op.create_table(
        "audit_log",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.Column("actor", sa.String(), nullable=False, comment="name of the admin token, or 'cli', 'file'"),
        sa.Column("action", sa.String(), nullable=False, comment="create | update | delete"),
        sa.Column("entity", sa.String(), nullable=False, comment="key | tier | team | price"),
        sa.Column("entity_id", sa.String(), nullable=False),
        sa.Column("before", JSON),
        sa.Column("after", JSON),
        sa.PrimaryKeyConstraint("id", name="pk_audit_log"),
    )
    op.create_index("ix_audit_log_entity_entity_id", "audit_log", ["entity", "entity_id"])
    op.create_table(
        "directory_revision",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False, comment="always 1"),
        sa.Column(
            "revision",
            BIG,
            nullable=False,
            comment="goes up in the transaction of every edit of keys, tiers, teams, prices",
        ),
        sa.PrimaryKeyConstraint("id", name="pk_directory_revision"),
    )
