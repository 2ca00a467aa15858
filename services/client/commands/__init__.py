"""The commands of `octavo`, one module each."""
