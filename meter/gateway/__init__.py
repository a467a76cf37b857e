"""The life of a request: identify, read, admit, relay, settle, record."""
