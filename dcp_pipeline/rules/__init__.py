"""Rules on keys, shapes and dtypes, declared in a config."""
