"""What needs torch and everyone shares: DCP's types, memory of tensors, what ``save`` raises."""
