"""OpenAI's completions: prompts in, texts out."""
