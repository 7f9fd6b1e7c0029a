"""Planners: which rank writes which part of which tensor, and which reads it."""
