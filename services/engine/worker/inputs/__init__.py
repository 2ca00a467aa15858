"""A step's inputs: read from its descriptor, kept at fixed addresses, or made up."""
