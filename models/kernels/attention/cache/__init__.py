"""Writes to the paged cache, and the slots that they go to."""
