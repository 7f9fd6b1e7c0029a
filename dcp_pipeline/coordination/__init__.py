"""Coordinations: how the ranks come to an agreement and commit together."""
