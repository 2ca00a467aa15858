"""Limits what callers may do: API keys, token rates, concurrent requests."""
