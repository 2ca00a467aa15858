"""Attention of chunks of prompts."""
