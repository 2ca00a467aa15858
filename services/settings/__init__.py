"""Settings of all programs: flags, variables, addresses, files and extras."""
