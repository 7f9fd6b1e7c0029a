"""Serializations: how one item becomes bytes."""
