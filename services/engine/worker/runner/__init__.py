"""Runs a step: forward pass or graph, sampling, drafts, result."""
