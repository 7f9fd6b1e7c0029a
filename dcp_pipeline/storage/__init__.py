"""Storages: where the bytes go."""
