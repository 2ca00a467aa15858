"""Attention of batch-invariant mode."""
