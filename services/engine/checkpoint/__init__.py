"""A model folder and its tokenizer files, read for the service process without torch."""
