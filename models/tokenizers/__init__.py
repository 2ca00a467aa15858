"""Tokenizers of several formats as tokenizer.json."""
