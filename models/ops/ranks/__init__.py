"""Operators over all ranks of a group."""
