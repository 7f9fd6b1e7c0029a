"""The pipeline's config: its model, and how Hydra composes it."""
