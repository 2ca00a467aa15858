"""Attention of few new tokens of each request: single tokens, and drafts to 8-bit keys."""
