"""Prompts of every kind that the embedded model may meet, from a seed."""

import random

NAMES = ["Mia", "Tom", "Anna", "Ben", "Lily", "Max", "Zoe", "Leo", "Emma", "Finn"]
ANIMALS = ["fox", "owl", "bear", "cat", "dog", "horse", "rabbit", "mouse"]
WORDS = ["apple", "garden", "river", "lantern", "window", "yellow", "castle", "engine"]
STRANGE = [
    "Grüße aus München, wie geht's?",
    "日本語の文章です。",
    "🙂🙃 emoji first",
    "def f(x):\n    return x + 1\n",
    "x" * 300,
    "a b c d e f g " * 40,
    "\n\n\t  leading space",
    "1234567890 0987654321",
    "!?.,;:-_#+*~",
    "Ünïcödé everywhere ß",
]


def varied_prompts(count: int, seed: int = 0) -> list[tuple[str, bool]]:
    """Returns (text, is_chat) pairs: sums, stories, spelling, long repeats, foreign scripts."""
    rng = random.Random(seed)
    makers = [
        lambda: (f"What is {rng.randint(0, 20)} + {rng.randint(0, 20)}?", True),
        lambda: (f"Tell me a story about {rng.choice(NAMES)} and a {rng.choice(ANIMALS)}.", True),
        lambda: (f"Spell the word {rng.choice(WORDS)}.", True),
        lambda: (f"Count from {rng.randint(1, 9)} to {rng.randint(10, 20)}.", True),
        lambda: (f"Once upon a time, {rng.choice(NAMES)} had a {rng.choice(ANIMALS)}.", False),
        lambda: (" ".join(rng.choices(WORDS + NAMES, k=rng.randint(1, 120))), False),
        lambda: (rng.choice(STRANGE), rng.random() < 0.5),
        lambda: ("What is Octavo? " * rng.randint(1, 20), True),
    ]
    return [makers[i % len(makers)]() for i in range(count)]
