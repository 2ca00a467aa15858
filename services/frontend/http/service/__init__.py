"""Endpoints about the service: its state, its models, its description."""
