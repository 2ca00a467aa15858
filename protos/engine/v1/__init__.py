"""Version 1 of the octavo.engine contracts."""
