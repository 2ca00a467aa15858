"""Reads how a checkpoint's weights are quantised, from the forms of several tools. No torch."""
