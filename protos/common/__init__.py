"""Contracts of package octavo.common."""
