"""Products with weights of 4 and 8 bits that are unpacked where they are multiplied."""
