"""Observability of both services: logs, health, metrics, traces, errors, the server."""
