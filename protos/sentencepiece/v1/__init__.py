"""Version 1 of the sentencepiece contracts."""
