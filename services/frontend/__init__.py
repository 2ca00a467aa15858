"""The tokenizer service: text in, text out."""
