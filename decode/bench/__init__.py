"""``decode bench``: batches of requests on both backends in one run, what they took, and published figures beside it."""
