"""A model and images → arrays that show what it learned and what it attends to.

inspect.py          `vitrail.inspect_model`: everything below, in one result
images.py           input images: as they are, and preprocessed for a model
attention.py        attention maps layer by layer; distance, entropy, head similarity, token norms
relevance.py        attention rollout, class-specific maps by gradients; all map methods by name
faithfulness.py     insertion, deletion and the sanity check of maps
representations.py  filters, position embeddings, token mixing; patch tokens, nearest neighbors

Nothing here draws: pages and figures are in `reports/`.
"""
