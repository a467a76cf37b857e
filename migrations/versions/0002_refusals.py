"""Refusals by minute, and which batches of them were added already.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "refusal_minute",
        sa.Column("minute", MOMENT, nullable=False),
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("rule", sa.String(), nullable=False, comment="parallel | cap | rate"),
        sa.Column("shadow", sa.Boolean(), nullable=False, comment="only counted: the limit is not in force"),
        sa.Column("refusals", BIG, nullable=False),
        sa.PrimaryKeyConstraint("minute", "key_id", "rule", "shadow", name="pk_refusal_minute"),
    )
    op.create_index("ix_refusal_minute_key_id_minute", "refusal_minute", ["key_id", "minute"])
    op.create_table(
        "refusal_flush",
        sa.Column(
            "writer", sa.Uuid(), nullable=False, comment="one process that counts refusals, from its start to its end"
        ),
        sa.Column("number", BIG, nullable=False, comment="of its last batch that was added to refusal_minute"),
        sa.Column("at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("writer", name="pk_refusal_flush"),
    )
