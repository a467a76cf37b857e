"""May this caller spend these tokens now?

Sliding token quotas: policies, the rule that decides over them, and the stores that hold what was spent. Nothing here
knows HTTP, an engine or a database; the quantities that go in and out are plain integers of tokens.
"""
