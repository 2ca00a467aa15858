"""Largest values of flags that have no bound of their own."""

MAX_INT32 = 2**31 - 1
"""Limit of tables with 32-bit indices, and of gRPC's options."""
MAX_WAIT_S = 1_000_000.0
"""More than 11 days; gRPC counts times in milliseconds of 32 bits."""
