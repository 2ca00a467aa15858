"""Serves /v1/messages: Anthropic's Messages API over the same pipeline."""
