"""Experts whose weights stay in 4 bits."""
