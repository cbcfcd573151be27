"""Image files → batches. So far: the value that says how a picture becomes a model's input."""
