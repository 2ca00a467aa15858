"""The octavo command line, and a small async client."""
