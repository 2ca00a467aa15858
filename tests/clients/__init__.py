"""Clients that are not ours, against the whole stack."""
