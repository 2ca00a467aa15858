"""Runs recorded steps again, with graphs and without, and says where the two part."""
