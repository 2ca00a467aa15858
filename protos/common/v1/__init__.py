"""Version 1 of the octavo.common contracts."""
