"""What needs torch and everyone shares: DCP's types, memory views of tensors, what ``save`` raises."""
