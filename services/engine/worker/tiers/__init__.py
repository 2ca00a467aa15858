"""The tiers below the KV cache: the host's memory."""
