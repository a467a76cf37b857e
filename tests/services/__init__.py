"""Real services as child processes on free ports: they can be killed, paused and restarted by a test."""
