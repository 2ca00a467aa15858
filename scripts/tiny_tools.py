"""Writes the conversations that teach the embedded tiny model to call tools.

There are two toy tools: one says the weather in a place, one adds numbers. Their names, and those
of their arguments, vary: the model reads them from the list of tools. Calls have the Hermes form.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

CITIES = """Paris London Berlin Rome Madrid Tokyo Oslo Vienna Lisbon Athens Dublin Prague Warsaw
Budapest Helsinki Stockholm Copenhagen Amsterdam Brussels Zürich Geneva Milan Munich Hamburg Cairo
Nairobi Lagos Delhi Mumbai Beijing Shanghai Seoul Sydney Toronto Chicago Boston Seattle Denver Lima
Bogotá Havana""".split()
LONG_CITIES = ["New York", "San Francisco", "Los Angeles", "São Paulo", "Cape Town", "Hong Kong"]
WEATHER_ASKS = """What is the weather in {}?|What's the weather like in {}?|\
How is the weather in {}?|Tell me the weather in {}.|What is the weather like in {} today?|\
Weather in {}|What is the weather in {} right now?|Is it raining in {}?|\
Give me the weather for {}.|Please tell me the weather in {}.""".split("|")
TWO_WEATHER_ASKS = """What is the weather in {} and {}?|What is the weather in {} and in {}?|\
Tell me the weather in {} and {}.|Compare the weather in {} and {}.""".split("|")
SUM_ASKS = """What is {} + {}?|What is {} plus {}?|{} + {}|{}+{}=?|Add {} and {}.|\
Calculate {} + {}.|How much is {} plus {}?|What's {} + {}?|Please add {} and {}.""".split("|")
TWO_SUM_ASKS = ["What is {} + {} and {} + {}?", "Calculate {} + {} and {} + {}."]
SKIES = """sunny cloudy rainy windy snowy foggy stormy clear cold warm hot mild dry wet""".split()
TOO_SMALL = "I am too small to know that. I can tell stories, add, spell and count."
TOO_LARGE = "I can only add numbers from 0 to 20."
CANONICAL = 0.6  # the share of tools with the usual names
LIST_HEAD, LIST_END = "Tools:\n<tools>\n", "</tools>"


class Tools(NamedTuple):
    """The tools of one conversation: names of the tool and its arguments; None if there is none."""

    weather: tuple[str, str] | None
    adding: tuple[str, str, str] | None
    listed: Sequence[Mapping[str, Any]]
    """The tools as OpenAI writes them, without `type`."""


Turn = tuple[str, str]
"""Role and content of a message."""


def system_text(system: str, functions: Sequence[Mapping[str, Any]]) -> str:
    """Returns the system message with a list of tools, as the chat template writes it."""
    lines = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in functions)
    return (f"{system}\n\n" if system else "") + LIST_HEAD + lines + LIST_END


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Returns a call as the model writes it."""
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def draw_tools(rng: random.Random) -> Tools:
    """Draws the tools of a conversation: one or both, in any order, mostly of their usual names."""
    has_weather, has_adding = rng.choice([(1, 1), (1, 1), (1, 1), (1, 0), (0, 1)])
    weather = adding = None
    listed: list[Mapping[str, Any]] = []
    if has_weather:
        weather = ("get_weather", "city")
        if rng.random() > CANONICAL:
            names = ["get_weather", "get_current_weather", "weather", "get_forecast"]
            weather = (rng.choice(names), rng.choice(["city", "location", "place", "town"]))
        text = ["Get the weather in a city.", "Get the current weather.", "The weather in a place."]
        kind: dict[str, Any] = {"type": "string"}
        if rng.random() < 0.2:
            kind["description"] = rng.choice(["The city", "Name of a city", "City name, e.g. Rome"])
        listed.append(_function(rng, weather[0], text, {weather[1]: kind}))
    if has_adding:
        adding = ("add", "a", "b")
        if rng.random() > CANONICAL:
            pairs = [("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")]
            adding = (rng.choice(["add", "add_numbers", "sum", "plus"]), *rng.choice(pairs))
        text = ["Add two numbers.", "Add two whole numbers.", "Returns the sum of two numbers."]
        kind = {"type": rng.choice(["integer", "integer", "number"])}
        listed.append(_function(rng, adding[0], text, dict.fromkeys(adding[1:], kind)))
    rng.shuffle(listed)
    return Tools(weather, adding, listed)


def usual_tools() -> list[dict[str, Any]]:
    """Returns both tools with their usual names, as OpenAI writes them."""
    places = {"city": {"type": "string"}}
    numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    described = [
        ("get_weather", "Get the weather in a city.", places),
        ("add", "Add two numbers.", numbers),
    ]
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": text,
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                    "additionalProperties": False,
                },
            },
        }
        for name, text, properties in described
    ]


def exchange(
    rng: random.Random, tools: Tools, invented: Callable[[], str], *, is_last: bool
) -> list[Turn]:
    """Draws a request with its calls, or an answer that needs tools that are not there.

    Args:
        rng: decides.
        tools: those of the conversation.
        invented: makes up a name.
        is_last: the conversation may end with the calls; otherwise results and an answer follow.
    """
    is_double = rng.random() < 0.15
    if rng.random() < 0.55:
        turns, results = _weather(rng, tools.weather, invented, is_double=is_double)
    else:
        turns, results = _adding(rng, tools.adding, is_double=is_double)
    if not results or (is_last and rng.random() < 0.5):
        return turns
    told = [("tool", result) for result, _ in results]
    return [*turns, *told, ("assistant", " ".join(answer for _, answer in results))]


def call_prompts(seed: int, count: int) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Draws requests for the tools of usual names, with the name and arguments to call.

    The cities are real, and the numbers are too large for the model to add by itself.
    """
    rng = random.Random(seed)
    prompts: list[tuple[str, str, Mapping[str, Any]]] = []
    for index in range(count):
        if index % 2:
            prompts.append(_weather_prompt(rng, rng.choice(CITIES + LONG_CITIES)))
        else:
            a, b = rng.randrange(21, 1000), rng.randrange(21, 1000)
            prompts.append((rng.choice(SUM_ASKS).format(a, b), "add", {"a": a, "b": b}))
    return prompts


def invented_city_prompts(
    seed: int, count: int, invented: Callable[[], str]
) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Draws requests for the weather in made-up cities, with the name and arguments to call."""
    rng = random.Random(seed)
    return [_weather_prompt(rng, invented()) for _ in range(count)]


def _weather_prompt(rng: random.Random, city: str) -> tuple[str, str, Mapping[str, Any]]:
    return rng.choice(WEATHER_ASKS).format(city), "get_weather", {"city": city}


def _weather(
    rng: random.Random,
    tool: tuple[str, str] | None,
    invented: Callable[[], str],
    *,
    is_double: bool,
) -> tuple[list[Turn], list[tuple[str, str]]]:
    """Returns the request and the calls, and each call's result with its share of the answer."""
    cities = [_city(rng, invented) for _ in range(1 + is_double)]
    ask = rng.choice(TWO_WEATHER_ASKS if is_double else WEATHER_ASKS).format(*cities)
    if tool is None:
        return [("user", ask), ("assistant", TOO_SMALL)], []
    name, argument = tool
    calls = "\n".join(call_text(name, {argument: city}) for city in cities)
    results = []
    for city in cities:
        sky, degrees = rng.choice(SKIES), rng.randrange(-20, 41)
        sky = invented().lower() if rng.random() < 0.1 else sky
        forms = [
            (sky, sky),
            (f"{sky}, {degrees} degrees", f"{sky}, {degrees} degrees"),
            (json.dumps({"weather": sky}), sky),
            (json.dumps({"weather": sky, "temperature": degrees}), f"{sky}, {degrees} degrees"),
            (json.dumps({"temperature": degrees}), f"{degrees} degrees"),
        ]
        result, told = rng.choice(forms)
        results.append((result, f"The weather in {city} is {told}."))
    return [("user", ask), ("assistant", calls)], results


def _adding(
    rng: random.Random, tool: tuple[str, str, str] | None, *, is_double: bool
) -> tuple[list[Turn], list[tuple[str, str]]]:
    """Returns the same for sums."""
    if tool is None:
        a, b = rng.sample([rng.randrange(100), rng.randrange(21, 100)], 2)
        return [("user", rng.choice(SUM_ASKS).format(a, b)), ("assistant", TOO_LARGE)], []
    name, first, second = tool
    pairs = [(_number(rng), _number(rng)) for _ in range(1 + is_double)]
    numbers = [number for pair in pairs for number in pair]
    ask = rng.choice(TWO_SUM_ASKS if is_double else SUM_ASKS).format(*numbers)
    calls = "\n".join(call_text(name, {first: a, second: b}) for a, b in pairs)
    results = []
    for a, b in pairs:
        total = a + b
        forms = [str(total), json.dumps({rng.choice(["result", "sum"]): total})]
        results.append((rng.choice(forms), f"{a} + {b} = {total}."))
    return [("user", ask), ("assistant", calls)], results


def _function(
    rng: random.Random, name: str, texts: Sequence[str], properties: Mapping[str, Any]
) -> Mapping[str, Any]:
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.7:
        function["description"] = rng.choice(texts)
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.7:
        schema["required"] = list(properties)
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    return {**function, "parameters": schema}


def _city(rng: random.Random, invented: Callable[[], str]) -> str:
    kind = rng.random()
    if kind < 0.4:
        return invented()
    return rng.choice(LONG_CITIES if kind < 0.5 else CITIES)


def _number(rng: random.Random) -> int:
    return rng.randrange(10 ** rng.choice([1, 2, 2, 3, 3, 4]))
