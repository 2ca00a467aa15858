"""Speculative decoding: planning and verifying draft tokens."""
