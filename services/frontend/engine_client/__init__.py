"""The frontend's end of the wire to the engine: tokens in, tokens out, over one session."""
