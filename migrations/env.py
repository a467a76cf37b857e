"""Run by Alembic: brings the database behind the given connection to a revision, in the caller's transaction."""

from __future__ import annotations

from alembic import context

from meter.ledger.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
    compare_type=True,
)
context.run_migrations()
