"""Hydra configs. A program of yours puts `pkg://dcp_pipeline.conf` on its search path."""
