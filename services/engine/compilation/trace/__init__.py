"""Traces a model once and runs the passes over it."""
