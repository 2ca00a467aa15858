"""Version 1 of the openengine contracts."""
