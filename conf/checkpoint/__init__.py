"""The group `checkpoint`: `pipeline`, the recipes, and a group for each part of a pipeline."""
