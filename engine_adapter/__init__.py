"""What does the engine say, and which one to ask?

Request bodies, event streams, usage figures, the HTTP/1.1 connections to workers, and a simulated worker. Nothing here
knows quotas, callers or the ledger.
"""
