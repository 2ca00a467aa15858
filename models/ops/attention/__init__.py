"""Attention: its operators, their metadata, and the paged cache."""
