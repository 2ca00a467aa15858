"""Compiles the pieces of a traced program and links them to a forward pass."""
