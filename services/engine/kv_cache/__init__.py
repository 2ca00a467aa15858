"""Blocks of the KV cache: pool, block tables, prefix index."""
