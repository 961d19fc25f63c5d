"""Agent traffic: sessions of turns and pauses from a file, replayed on either backend, and what their users would have seen."""
