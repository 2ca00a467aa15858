"""Other spellings of what Octavo's operators compute."""
