"""One request in, one record out: the gateway, the callers, the ledger, the admin site, telemetry."""
