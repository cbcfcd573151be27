"""Data, a model and a recipe → a bundle: one loop."""
