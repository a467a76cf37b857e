"""Who is asking: keys (only their hashes), tiers, overrides; kept in memory and refreshed when they change."""
