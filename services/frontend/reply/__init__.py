"""Reads a chat model's reply: reasoning, content and tool calls, out of the text as it comes."""
