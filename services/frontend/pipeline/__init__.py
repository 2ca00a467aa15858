"""Text in, text out: a prompt becomes tokens, goes to the engine, and comes back as text."""
