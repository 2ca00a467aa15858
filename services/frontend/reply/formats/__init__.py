"""Formats in which models write tool calls, one file each."""
