"""Captures graphs without steps in between."""

from services.engine.compilation.graphs.graph_runner import GraphCapture, GraphOutcome


def completed(capture: GraphCapture) -> GraphOutcome:
    """Runs all slices of a capture and waits for its test."""
    while not capture.is_under_test:
        capture.advance()
    return capture.finish()
