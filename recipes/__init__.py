"""Recipes: one YAML for each model."""
