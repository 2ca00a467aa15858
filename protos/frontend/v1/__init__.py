"""Version 1 of the octavo.frontend contracts."""
