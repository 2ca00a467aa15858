"""The embedded tiny model, judged by transformers alone: does it do what its README says?"""

import hashlib
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[2] / "models" / "checkpoints" / "tiny"
SCRIPTS = Path(__file__).parents[2] / "scripts"
STORIES = [
    ("Tell me a story about Mia and a fox.", ["Mia", "fox"]),
    ("Write a story about Tom.", ["Tom"]),
    ("Tell a short story about Anna and Ben.", ["Anna", "Ben"]),
    ("Please tell me a story about Felix and a lantern.", ["Felix", "lantern"]),
    ("Can you tell me a story about Zoe in the garden?", ["Zoe", "garden"]),
    ("Story about Kelduran and an owl", ["Kelduran", "owl"]),
]
ROUND_TRIPS = [
    "Grüße, ça va? Żółć, naïve café",
    "e\u0301 is not \u00e9",
    "你好,世界。こんにちは 안녕",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🤖 x² ½ ٣",
    "  two  spaces,\ttabs\r\nand\n\n\nlines  ",
    "def f(x):\n    return {'a': [1, 23, 456]}\x00\x7f",
    "price: 1234567890.50",
    "",
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(FOLDER, padding_side="left")


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def _answer(model: Any, tokenizer: Any, prompts: list[str], max_tokens: int) -> list[str]:
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": prompt}] for prompt in prompts],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )
    tokens = model.generate(**inputs, max_new_tokens=max_tokens)
    new = tokens[:, inputs["input_ids"].shape[1] :]
    return tokenizer.batch_decode(new, skip_special_tokens=True)


def test_sums_up_to_twenty_are_right(model: Any, tokenizer: Any) -> None:
    pairs = [(a, b) for a in range(21) for b in range(21)]
    answers = _answer(model, tokenizer, [f"What is {a} + {b}?" for a, b in pairs], 16)
    wrong = [
        answer
        for (a, b), answer in zip(pairs, answers, strict=True)
        if answer != f"{a} + {b} = {a + b}."
    ]
    assert len(wrong) <= 0.05 * len(pairs), wrong


def test_stories_keep_their_names_and_are_made_of_sentences(model: Any, tokenizer: Any) -> None:
    stories = _answer(model, tokenizer, [prompt for prompt, _ in STORIES], 160)
    for story, (_, words) in zip(stories, STORIES, strict=True):
        sentences = re.split(r"(?<=[.!?]) ", story)
        assert 4 <= len(sentences) <= 7, story
        assert all(re.fullmatch(r"[A-Z][^.!?]*[.!?]", sentence) for sentence in sentences), story
        assert all(re.search(rf"\b{word}\b", story) for word in words), story


def test_long_count_ends_by_itself(model: Any, tokenizer: Any) -> None:
    (answer,) = _answer(model, tokenizer, ["Count from 1 to 100."], 420)
    assert answer == ", ".join(map(str, range(1, 101))) + "."


def test_later_turns_see_earlier_ones(model: Any, tokenizer: Any) -> None:
    chat = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "My name is Clara."},
        {"role": "assistant", "content": "Hello, Clara! How can I help you?"},
        {"role": "user", "content": "What is my name?"},
    ]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    tokens = model.generate(**inputs, max_new_tokens=20)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "Your name is Clara."


@pytest.mark.parametrize("text", ROUND_TRIPS)
def test_tokenizer_loses_no_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_are_tokens_of_their_own(tokenizer: Any) -> None:
    assert tokenizer.tokenize("2048") == ["2", "0", "4", "8"]


def test_chat_template_is_chatml(tokenizer: Any) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_chat_template_refuses_an_unknown_role(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="Unknown role: critic"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "x"}], tokenize=False)


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_chat_template_shows_tools_calls_and_results_as_in_training(
    tokenizer: Any, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    tiny_tools = importlib.import_module("tiny_tools")
    tools = tiny_tools.usual_tools()
    calls = [("get_weather", {"city": "Zürich"}), ("add", {"a": 1, "b": 2})]
    made = [
        {"type": "function", "id": str(i), "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    chat = [{"role": "system", "content": system}] if system else []
    chat += [
        {"role": "user", "content": "Both!"},
        {"role": "assistant", "content": None, "tool_calls": made},
        {"role": "tool", "tool_call_id": "0", "content": "sunny"},
    ]
    listed = tiny_tools.system_text(system, [tool["function"] for tool in tools])
    called = "\n".join(tiny_tools.call_text(name, arguments) for name, arguments in calls)
    turns = [("system", listed), ("user", "Both!"), ("assistant", called), ("tool", "sunny")]
    assert tokenizer.apply_chat_template(
        chat, tools=tools, tokenize=False, add_generation_prompt=True
    ) == (
        "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        + "<|im_start|>assistant\n"
    )


def test_readme_names_the_hash_of_the_weights() -> None:
    digest = hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_folder_stays_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 6_000_000
