"""Every Prometheus collector, and the structured log."""
