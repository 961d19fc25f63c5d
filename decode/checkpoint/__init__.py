"""Checkpoints in the published form: names, shards, their faults, loading one rank, writing small ones."""
