"""Processes that services start: they end with their parent and import from no current folder."""
