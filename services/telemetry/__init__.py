"""Observability of both services: logs, metrics and traces."""
