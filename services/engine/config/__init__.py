"""Configuration of the engine: one section a file, one flag a field."""
