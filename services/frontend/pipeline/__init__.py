"""Runs requests: encodes the prompt, calls the engine, decodes the output."""
