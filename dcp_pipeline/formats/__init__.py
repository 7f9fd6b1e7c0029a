"""Byte-level codecs: torch's zip container, safetensors, ``.metadata`` and typed JSON."""
