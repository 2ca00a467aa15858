"""The parts of a model's config, and how each is read from config.json."""
