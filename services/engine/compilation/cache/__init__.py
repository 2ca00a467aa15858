"""Keeps traces and compiled pieces on disk, under keys of what they depend on."""
