"""Contracts of package octavo.engine."""
