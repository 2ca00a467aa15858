"""Speculative decoding: what to guess ahead, and which guesses were right."""
