"""The worker's graphs by kind, and their capture while the worker serves."""
