"""Norms, rotary positions, gates and writes: one pass over their input."""
