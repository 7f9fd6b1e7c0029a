"""Stagers: how the values of a state are held still while they are written."""
