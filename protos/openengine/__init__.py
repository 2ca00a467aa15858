"""Contracts of package openengine, which is not ours."""
