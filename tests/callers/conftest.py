from tests.callers.databases import database_url, directory, engine, postgres_url, registry, sqlite_template

__all__ = ["database_url", "directory", "engine", "postgres_url", "registry", "sqlite_template"]
