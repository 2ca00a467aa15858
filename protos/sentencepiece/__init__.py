"""Contracts of package sentencepiece, which is not ours."""
