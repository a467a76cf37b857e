from tests.callers.databases import database_url, directory, engine, registry

__all__ = ["database_url", "directory", "engine", "registry"]
