"""DSpark: the drafter, its cache, acceptance of drafts, and speculative decoding with them."""
