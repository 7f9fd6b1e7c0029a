"""The two graphs, each readable from top to bottom: ``save`` and ``load``."""
