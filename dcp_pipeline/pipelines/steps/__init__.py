"""What the nodes of the two graphs do."""
