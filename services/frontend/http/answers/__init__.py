"""Parts of answers that several APIs share."""
