"""Backgrounds: where the rest of an asynchronous save runs while training goes on."""
