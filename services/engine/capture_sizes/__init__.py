"""Capture sizes planned from the steps that were seen, and the command that shows a plan."""
