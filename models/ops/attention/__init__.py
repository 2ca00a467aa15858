"""Attention: its operators, what they read, and the paged cache."""
