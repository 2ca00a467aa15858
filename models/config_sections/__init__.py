"""The parts of a model's config, each with its reader of config.json."""
