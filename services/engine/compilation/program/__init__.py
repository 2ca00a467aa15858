"""A traced program: its parts, their graphs and code."""
