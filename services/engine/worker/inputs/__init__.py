"""The inputs of a step: read from its descriptor, kept at fixed addresses, made up for dummy batches."""
