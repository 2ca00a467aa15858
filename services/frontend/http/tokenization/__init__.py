"""Text to token ids and back, in the form of vLLM's server."""
