"""From the caller's state to leaves and pieces, and back."""
