"""Parses bodies into calls, here or in a process of its own."""
