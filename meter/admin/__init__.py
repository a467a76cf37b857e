"""REST for the people who run it, and the health site for probes and scrapers."""
