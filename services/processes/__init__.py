"""Processes of services and commands: how they start, end, write and share memory."""
