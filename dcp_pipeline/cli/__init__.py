"""The command `dcp-pipeline`."""
