"""The decode path: weights and their sharding, caches, the reference step, its plan, and runs of it."""
