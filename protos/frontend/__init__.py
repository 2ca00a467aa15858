"""Contracts of package octavo.frontend."""
