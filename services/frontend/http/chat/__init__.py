"""OpenAI's chat completions: a conversation in, messages out."""
