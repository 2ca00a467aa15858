"""The frontend's sessions with the engines: token ids out, token ids in."""
