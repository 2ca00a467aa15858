"""What people run: the octavo command line and a small async client."""
