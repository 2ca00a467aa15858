"""Captured graphs: recorded once, replayed with new contents at the same addresses."""
