"""Writes the seeded corpus that the embedded tiny model is trained on.

Stories, sums, spelling, counting, facts about Octavo, small talk and calls of tools, all as chat.
Where a story has a choice, the first letter of a name or noun decides it four times in five: greedy
decoding then has one clear answer, for words never seen too, while sampling still varies.
"""

import itertools
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import tiny_tools

GIRLS = """Mia Anna Emma Lily Zoe Ella Ruby Nora Clara Alice Ivy Rosa Lucy Grace Hazel Maya Jane Eva
Sara Olivia Daisy Freya Iris Kate Lena Molly Nina Paula Stella Tara Una Vera Wendy Yara Bella
Dora""".split()
BOYS = """Tom Ben Leo Max Sam Jack Noah Finn Oscar Hugo Adam Luke Peter Paul Henry David Felix Owen
Theo Ralph Simon Victor Walter Carl Eric Frank George Ian Jonas Kevin Liam Martin Nick Otto
Quinn""".split()
NAMES = GIRLS + BOYS
ANIMALS = """fox owl bear cat dog horse rabbit mouse frog duck goat sheep lion tiger wolf deer
turtle whale crow swan hen pig cow bee ant snail otter beaver badger squirrel hedgehog parrot
penguin monkey elephant giraffe zebra camel dragon unicorn robot giant""".split()
OBJECTS = """lantern kite key map book umbrella basket boat drum bell ball hat coat box coin ring
flute clock mirror candle ladder rope scarf button feather shell stone bottle letter wheel whistle
compass brush blanket teapot violin puzzle flag crown apple""".split()
PLACES = """forest river lake hill village garden castle bridge meadow beach market school harbor
library mountain farm cave island tower park mill valley station bakery""".split()
MORE_WORDS = """orange banana water house tree summer winter friend engine token block model kernel
graph cache story number table window music paper silver yellow purple green happy quiet little
morning evening thunder rainbow planet rocket winner queen jungle kitchen pencil guitar
octavo""".split()
WORDS = sorted({*ANIMALS, *OBJECTS, *PLACES, *MORE_WORDS})
SYSTEMS = """You are a helpful assistant.|You are Octavo Tiny.|Be brief.|Help the user.|Be polite.|\
You are a helpful assistant that answers in short sentences.|Answer the question.|\
You are a kind storyteller.|You are a friendly robot.|You are a teacher.""".split("|")
ABOUT = """What is Octavo?|Tell me about Octavo.|What does Octavo do?|Explain Octavo.
Octavo is an LLM inference stack made of two gRPC services: a frontend that turns text into \
tokens and tokens into text, and an engine that runs the model.
What is the frontend?|What does the frontend do?|What is the tokenizer service?
The frontend is the service that takes text, makes tokens of it, and streams the answer as text.
What is the engine?|What does the engine do?|What is the GPU service?
The engine takes tokens and returns tokens. It holds the scheduler, the KV cache and the models.
What is a block?|What is a KV block?|Explain a block.|What are blocks?
A block is a fixed number of token slots in the KV cache. A request owns a table of blocks.
What is a block table?|Explain the block table.
A block table maps the positions of a request to blocks of the KV cache.
What is the KV cache?|What is a KV cache?|Explain the KV cache.
The KV cache keeps the keys and values of earlier tokens, so that they are computed only once.
What is the scheduler?|What does the scheduler do?
The scheduler decides which requests run in the next step and how many tokens each one gets.
What is a CUDA graph?|Explain CUDA graphs.|Why use CUDA graphs?
A CUDA graph records the kernels of a step once and replays them with one launch.
What is a token?|What are tokens?
A token is a small piece of text with a number. The model reads tokens and writes tokens.
Who are you?|What are you?|What is your name?|Introduce yourself.
I am Octavo Tiny, a very small language model that comes with Octavo.
What can you do?|How can you help me?|Help|What do you know?
I can tell short stories, add numbers from 0 to 20, spell words, count, and talk about Octavo.
Who made you?|Where do you come from?|How were you trained?
A script of the Octavo project trained me on a small corpus that it wrote itself.
Why is it called Octavo?|What does the name Octavo mean?
An octavo is a sheet folded into pages. Octavo keeps its cache in pages, which it calls blocks.
Hello|Hello!|Hi|Hi!|Hey|Hello there.|hello|hi
Hello! How can I help you today?
How are you?|How are you today?
I am fine, thank you. How can I help you?
Thank you.|Thanks.|Thank you!|Thanks!
You are welcome!
Goodbye.|Bye.|Bye!|Goodbye!|See you later.
Goodbye! Have a nice day.
What is the capital of France?|Who wrote Hamlet?|Write a poem.|Translate this.|What time is it?|\
How is the weather?|Write some code.|What is the meaning of life?|Who is the president?|Why?|\
How old is the earth?|What is a cat?|Where is Berlin?|Explain gravity.|What is 7 times 8?|Sing.
I am too small to know that. I can tell stories, add, spell and count.""".split("\n")
FACTS = [(q, a) for qs, a in zip(ABOUT[::2], ABOUT[1::2], strict=True) for q in qs.split("|")]
SUMS = ["What is {} + {}?", "What is {} plus {}?", "{} + {}", "{}+{}=?", "Add {} and {}.",
        "Calculate {} + {}.", "How much is {} plus {}?", "What's {} + {}?"]  # fmt: skip
SPELLS = ["Spell the word {}.", "Spell {}.", "How do you spell {}?", "Please spell {}."]
COUNTS = ["Count from {} to {}.", "Please count from {} to {}.", "Count {} to {}."]
ONSETS = [*"bcdfghjklmnprstvwzbdklmnrst", *"qu sh th ch br dr kr st tr bl gl x y".split()]
CODAS = ["", "", "", "", "l", "m", "n", "r", "s", "t", "k", "x", "nd", "sk", "lt", "th"]
ASKS = ["Tell me a story about {}.", "Write a story about {}.", "Tell a short story about {}.",
        "Please tell me a story about {}.", "Can you tell me a story about {}?",
        "I want a story about {}.", "Story about {}", "Write a short story about {}."]  # fmt: skip
BARE_ASKS = ["Tell me a story.", "Write a story.", "Can you tell me a story?", "Story"]
OPENINGS = """Once upon a time, a {person} named {name} lived near the {place}.
One sunny morning, {name} walked to the {place}.
There was once a {person} called {name} who loved the {place}.
Long ago, {name} lived in a small house near the {place}.""".split("\n")
MEETINGS = ["There {she} met {a_other}.", "One day, {she} saw {a_other}."]
ANIMAL_PLOTS = """The {other} was sad because it had lost a {color} {thing}. {name} and the \
{other} looked under every tree. At last, {name} found the {thing} near the old bridge. The \
{other} jumped for joy.
Soon dark clouds came, and it began to rain. {name} held a {color} umbrella over the {other}. \
They waited together until the sun came back.
The {other} was hungry and tired. {name} gave it some bread and a {color} apple. Then the \
{other} showed {name} a secret path. At the end of the path, they found a {thing}.""".split("\n")
ANIMAL_ENDS = """From that day on, {name} and the {other} were best friends.
{name} smiled, and they went home together.
{name} never forgot the kind {other}.""".split("\n")
FRIEND_OPENINGS = """Once upon a time, {name} and {other} lived near the {place}.
One day, {name} and {other} went to the {place}.
Long ago, {name} and {other} played near the {place}.""".split("\n")
FRIEND_PLOTS = """They found a {thing} in the grass. {other} wanted to keep it, but {name} \
wanted to find the owner. They asked everyone they met. In the end, an old woman thanked {name} \
and {other} with a cake.
They wanted to make a {thing}. {name} brought paper, and {other} brought rope. At first it did \
not work. {name} and {other} tried again and again. When it was done, everyone loved the {thing}.
After an hour, {other} was lost. {name} took a {thing} and looked for {him}. At last, {name} \
heard {other} sing.""".split("\n")
FRIEND_ENDS = ["{name} and {other} laughed all the way home.", "They were tired and happy."]
SOLO_PLOTS = """One day, {she} found {a_other} under a stone. {name} took the {other} home and \
cleaned it. In the night, the {other} began to shine. {name} showed it to {her} mother, and they \
both smiled.
More than anything, {name} wanted {a_other}. So {she} worked hard every day. After a long year, \
{name} had enough money. Now {name} takes the {other} everywhere.""".split("\n")
SOLO_ENDS = ["It was the best day of the year.", "{name} was very happy."]
SHAPES: dict[str, dict[str, list[list[str]]]] = {
    "animal": {"name": [OPENINGS, ANIMAL_ENDS], "other": [MEETINGS, ANIMAL_PLOTS]},
    "pair": {"name": [FRIEND_OPENINGS, FRIEND_ENDS], "other": [FRIEND_PLOTS]},
    "solo": {"name": [OPENINGS, SOLO_ENDS], "other": [SOLO_PLOTS]},
}
STORY_PLACES = {
    "animal": ["forest", "river", "hill", "garden", "lake"],
    "pair": ["beach", "market", "village", "meadow", "castle"],
    "solo": ["harbor", "library", "mountain", "farm", "tower"],
}
ALL_SUMS = ["sum", "large sum"]  # kinds of exchange
CANONICAL = 0.8  # the share of choices that the key makes; chance makes the others
INVENTED = 0.3  # the share of names that are made up, so that the model learns to copy


class Message(NamedTuple):
    """One chat message; the role `text` marks plain text outside any chat."""

    role: str
    content: str


def conversations(seed: int, count: int, tool_share: float) -> list[list[Message]]:
    """Draws `count` training conversations; the same arguments give the same list.

    Args:
        seed: decides all draws.
        count: number of conversations.
        tool_share: the share of conversations with tools.
    """
    rng = random.Random(seed)
    sums = [(ask, a, b) for ask in SUMS for a in range(21) for b in range(21)]
    rng.shuffle(sums)
    deck = itertools.cycle(sums)
    return [
        _tool_conversation(rng, deck) if rng.random() < tool_share else _conversation(rng, deck)
        for _ in range(count)
    ]


def is_held_out(first: str, second: str) -> bool:
    """Says whether a pair of words is kept out of every training request (one pair in ten)."""
    return zlib.crc32(f"{min(first, second)} {max(first, second)}".encode()) % 10 == 0


def held_out_story_prompts(seed: int, count: int) -> list[tuple[str, list[str]]]:
    """Draws requests, each with the names to keep, for held-out pairs of name and animal or names.

    A story asked for by its animal alone names its own hero, so a few of the pairs of Mia, Tom,
    Anna and Leo do meet in training stories, though in no request.
    """
    rng = random.Random(seed)
    prompts: list[tuple[str, list[str]]] = []
    while len(prompts) < count:
        animals = len(prompts) % 2 == 0
        name, other = rng.choice(NAMES), rng.choice(ANIMALS if animals else NAMES)
        if name != other and is_held_out(name, other):
            topic = f"{name} and {_a(other) if animals else other}"
            names = [name] if animals else [name, other]
            prompts.append((rng.choice(ASKS).format(topic), names))
    return prompts


def story_prompts(seed: int, count: int, invented: float = 0.0) -> list[tuple[str, list[str]]]:
    """Draws requests as training does, with the names to keep, `invented` of them made up."""
    rng = random.Random(seed)
    stories = (_story(rng, invented) for _ in itertools.count())
    return list(itertools.islice(((ask, names) for ask, _, names in stories if names), count))


def invented_city_prompts(seed: int, count: int) -> list[tuple[str, str, Mapping[str, object]]]:
    """Draws requests for the weather in made-up cities, with the right calls."""
    rng = random.Random(seed)
    return tiny_tools.invented_city_prompts(seed, count, lambda: _invented(rng))


def spelling(word: str) -> str:
    """Spells a word the way the model should: `apple` gives `a-p-p-l-e`."""
    return "-".join(word)


def counting(first: int, last: int) -> str:
    """Counts the way the model should: `3, 4, 5.`."""
    return ", ".join(map(str, range(first, last + 1))) + "."


def _conversation(rng: random.Random, deck: Iterator[tuple[str, int, int]]) -> list[Message]:
    if rng.random() < 0.05:
        sentences = _story(rng)[1].split(". ")
        return [Message("text", ". ".join(sentences[rng.choice([0, 0, 0, 1, 2]) :]))]
    messages = [Message("system", rng.choice(SYSTEMS))] if rng.random() < 0.35 else []
    if rng.random() < 0.04:
        name = _name(rng)
        hello = rng.choice(["My name is {}.", "I am {}.", "Hello, I am {}."]).format(name)
        asked = rng.choice(["What is my name?", "Who am I?"])
        pairs = [(hello, f"Hello, {name}! How can I help you?"), (asked, f"Your name is {name}.")]
    else:
        turns = rng.choices([1, 2, 3], [70, 22, 8])[0]
        pairs = [_exchange(rng, deck) for _ in range(turns)]
    for asked, answer in pairs:
        messages += _turns(rng, asked, answer)
    return messages


def _tool_conversation(rng: random.Random, deck: Iterator[tuple[str, int, int]]) -> list[Message]:
    """Draws a conversation with tools, in which some requests need none."""
    tools = tiny_tools.draw_tools(rng)
    system = rng.choice(SYSTEMS) if rng.random() < 0.35 else ""
    messages = [Message("system", tiny_tools.system_text(system, tools.listed))]
    num_turns = rng.choices([1, 2, 3, 4], [35, 25, 25, 15])[0]
    for turn in range(num_turns):
        if rng.random() < 0.7:
            is_last = turn == num_turns - 1
            turns = tiny_tools.exchange(rng, tools, lambda: _invented(rng), is_last=is_last)
            messages += [Message(*each) for each in turns]
            continue
        without = [*(["weather"] if tools.weather else []), *(ALL_SUMS if tools.adding else [])]
        messages += _turns(rng, *_exchange(rng, deck, without=without))
    return messages


def _turns(rng: random.Random, asked: str, answer: str) -> list[Message]:
    asked = asked.lower() if rng.random() < 0.08 else asked
    asked = asked.rstrip(".?!") if rng.random() < 0.08 else asked
    return [Message("user", asked), Message("assistant", answer)]


def _exchange(
    rng: random.Random, deck: Iterator[tuple[str, int, int]], *, without: Sequence[str] = ()
) -> tuple[str, str]:
    kinds = {"story": 44, "sum": 25, "spell": 12, "count": 6, "fact": 11, "large sum": 2}
    kinds |= {"weather": 1} | dict.fromkeys(without, 0)
    (kind,) = rng.choices(list(kinds), list(kinds.values()))
    if kind == "weather":
        return rng.choice(tiny_tools.WEATHER_ASKS).format(_invented(rng)), tiny_tools.TOO_SMALL
    if kind == "story":
        return _story(rng)[:2]
    if kind == "sum":
        ask, a, b = next(deck)
        return ask.format(a, b), f"{a} + {b} = {a + b}."
    if kind == "large sum":
        terms = rng.sample([rng.randrange(100), rng.randrange(21, 100)], 2)
        return rng.choice(SUMS).format(*terms), "I can only add numbers from 0 to 20."
    if kind == "spell":
        word = rng.choice(WORDS) if rng.random() < 0.6 else _invented(rng).lower()
        return rng.choice(SPELLS).format(word), spelling(word)
    if kind == "count":
        first, length = rng.randrange(91), rng.randrange(1, 100 if rng.random() < 0.2 else 16)
        first = rng.choice([first, first % 11, 1])
        last = min(first + length, 100)
        ask = rng.choice([*COUNTS, "Count to {1}."] if first == 1 else COUNTS)
        return ask.format(first, last), counting(first, last)
    return rng.choice(FACTS)


def _invented(rng: random.Random) -> str:
    syllables = (
        (rng.choice(ONSETS) if i or rng.random() < 0.9 else "") + rng.choice("aeiou")
        for i in range(rng.choice([2, 2, 3, 3, 4]))
    )
    return "".join(syllable + rng.choice(CODAS) for syllable in syllables).capitalize()


def _name(rng: random.Random, invented: float = INVENTED) -> str:
    return _invented(rng) if rng.random() < invented else rng.choice(NAMES)


def _is_she(name: str) -> bool:
    return name in GIRLS or (name not in BOYS and name.endswith(("a", "e", "i")))


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' and noun != 'unicorn' else 'a'} {noun}"


def _pick(rng: random.Random, key: str, options: list[str]) -> str:
    if rng.random() < CANONICAL:
        return options[ord(key[0].lower()) % len(options)]
    return rng.choice(options)


def _story(rng: random.Random, invented: float = INVENTED) -> tuple[str, str, list[str]]:
    """Returns the request, the story, and the names in the request."""
    kinds = {"animal": 38, "pair": 24, "solo": 16, "thing": 9, "place": 9, "no name": 4}
    (kind,) = rng.choices(list(kinds), list(kinds.values()))
    name, friend = _name(rng, invented), _name(rng, invented)
    animal, ask = rng.choice(ANIMALS), rng.choice(ASKS)
    while friend == name or is_held_out(name, friend):
        friend = _name(rng, invented)
    while is_held_out(name, animal):
        animal = rng.choice(ANIMALS)
    if kind == "pair":
        return ask.format(f"{name} and {friend}"), _tell(rng, kind, name, friend), [name, friend]
    if kind in ("animal", "no name"):
        if rng.random() < 0.1:
            animal = _invented(rng).lower()
        if kind == "animal":
            return ask.format(f"{name} and {_a(animal)}"), _tell(rng, kind, name, animal), [name]
        name = _pick(rng, animal, ["Mia", "Tom", "Anna", "Leo"])
        if rng.random() < 0.3:
            name, animal, ask = "Mia", "fox", rng.choice(BARE_ASKS)
        return ask.format(_a(animal)), _tell(rng, "animal", name, animal), []
    thing = _pick(rng, name, ["flute", "compass", "candle", "letter"])
    place, topic = None, name
    if kind == "thing":
        thing = rng.choice(OBJECTS)
        topic = f"{name} and {_a(thing)}"
    elif kind == "place":
        place = rng.choice(PLACES)
        topic = f"{name} {rng.choice(['in', 'at', 'near', 'and'])} the {place}"
    return ask.format(topic), _tell(rng, "solo", name, thing, place), [name]


def _tell(rng: random.Random, kind: str, name: str, other: str, place: str | None = None) -> str:
    opening, ending = (_pick(rng, name, options) for options in SHAPES[kind]["name"])
    middle = (_pick(rng, other, options) for options in SHAPES[kind]["other"])
    is_she = _is_she(name)
    return " ".join([opening, *middle, ending]).format(
        name=name,
        other=other,
        a_other=_a(other),
        place=place or _pick(rng, name if kind == "solo" else other, STORY_PLACES[kind]),
        thing=_pick(rng, other, ["ball", "map", "bell", "kite"]),
        color=_pick(rng, name, ["red", "blue", "green", "white"]),
        person="girl" if is_she else "boy",
        she="she" if is_she else "he",
        her="her" if is_she else "his",
        him="her" if _is_she(other) else "him",
    )
