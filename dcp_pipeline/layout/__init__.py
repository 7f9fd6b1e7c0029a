"""Layouts: how a checkpoint is laid out in a directory."""
