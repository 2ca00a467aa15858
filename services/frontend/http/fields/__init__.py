"""Fields that several APIs share, and what they mean for the pipeline."""
