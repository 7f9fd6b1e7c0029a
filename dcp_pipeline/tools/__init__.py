"""What the command line calls: looking at checkpoints without loading them."""
