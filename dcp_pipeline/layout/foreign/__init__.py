"""Checkpoints of others, as sources: each kind becomes a manifest, from which a load reads."""

from dcp_pipeline.layout.foreign.opening import KINDS, open_source, recognize

__all__ = ["KINDS", "open_source", "recognize"]
