"""The exchange's protocol as a model: small, pure Python, explored in every order. See ``PROTOCOL.md`` beside it."""
