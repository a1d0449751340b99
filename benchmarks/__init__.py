"""What training in micro-batches costs: CPU seconds and memory, next to `model.fit`."""
