"""Limits of Hopper's copy engine (TMA)."""

COPY_ALIGNMENT = 16
"""Bytes that every row starts at a multiple of (CUDA C++ Programming Guide, TMA)."""
