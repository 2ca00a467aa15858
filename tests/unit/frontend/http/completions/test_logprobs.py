"""A completion with echo repeats its prompt once, and its offsets are those of its text."""

import contextlib

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from services.frontend.http.answers.choices import prompt_text
from services.frontend.http.completions.logprobs import text_offsets
from services.frontend.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import reference_tokenizer, tokenizer_files, tokenizer_json
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import frontend_stack

ACUTE = "\u00e9"


@contextlib.asynccontextmanager
async def completions(engine: FakeEngine):
    async with (
        engine,
        frontend_stack(engine, http_port=0) as stack,
        stack.http_client() as client,
    ):

        async def complete(**body):
            response = await client.post("/v1/completions", json={"model": "fake", **body})
            assert response.status_code == 200, response.text
            return response.json()["choices"][0]

        yield complete


@pytest.mark.parametrize(
    "prompt",
    [
        "<|im_start|>user\nhello<|im_end|> world",
        "<|im_start|>",
        f"na{ACUTE} <|im_end|> {ACUTE}",
        [0, *reference_tokenizer().encode("hello").ids, 1],
    ],
)
async def test_each_token_begins_where_its_text_does(prompt):
    async with completions(FakeEngine()) as complete:
        choice = await complete(prompt=prompt, echo=True, logprobs=0)
    told, text = choice["logprobs"], choice["text"]
    shown = prompt if isinstance(prompt, str) else "hello"
    assert text == shown + "hello world"
    assert told["tokens"].pop() == "<|im_end|>"  # it ends the output, and is not shown
    assert told["text_offset"].pop() == len(text)
    special = [token for token in told["tokens"] if token.startswith("<|im_")]
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        is_shown = isinstance(prompt, str) or token not in special
        assert token.startswith("bytes:") or not is_shown or text[offset:].startswith(token)
    assert len(shown) in told["text_offset"]


@pytest.mark.parametrize("output", ["<|im_end|>", "a"])
@pytest.mark.parametrize("stop", [None, "a"])
async def test_the_one_token_after_the_prompt_has_an_entry_even_if_it_is_not_shown(output, stop):
    [token_id] = reference_tokenizer().encode(output).ids
    prompt = reference_tokenizer().encode("hello").ids
    async with completions(FakeEngine(script=lambda _: [token_id])) as complete:
        choice = await complete(prompt=prompt, echo=True, logprobs=1, max_tokens=1, stop=stop)
        plain = await complete(prompt=prompt, logprobs=1, max_tokens=1)
    told = choice["logprobs"]
    assert {len(entries) for entries in told.values()} == {len(prompt) + 1}
    assert told["tokens"][-1] == output
    assert told["text_offset"][-1] == len("hello")
    assert choice["text"] == "hello" + ("" if stop or output != "a" else "a")
    assert len(plain["logprobs"]["tokens"]) == (output == "a")


async def test_a_character_that_the_prompt_begins_and_the_output_ends_is_shown_once():
    first, second = reference_tokenizer().encode(ACUTE).ids
    letters = reference_tokenizer().encode("ab").ids
    async with completions(FakeEngine(script=lambda _: [second, *letters])) as complete:
        choice = await complete(prompt=[*letters, first], echo=True, logprobs=0, max_tokens=3)
        plain = await complete(prompt=[*letters, first], echo=True, max_tokens=3)
    assert choice["text"] == plain["text"] == f"ab{ACUTE}ab"
    assert choice["logprobs"]["text_offset"][-len(letters) :][0] == 3


@pytest.mark.parametrize("echo", [False, True])
async def test_bytes_that_are_no_characters_count_as_they_are_shown(echo):
    first, second = reference_tokenizer().encode(ACUTE).ids
    a, b = reference_tokenizer().encode("ab").ids
    tokens = [second, a, first, b, second, second, a]
    prompt = [*tokens, a]
    async with completions(FakeEngine(script=lambda _: tokens)) as complete:
        choice = await complete(prompt=prompt, echo=echo, logprobs=0, max_tokens=len(tokens))
    text = choice["text"]
    assert text == ("\ufffda\ufffdb\ufffd\ufffdaa" if echo else "") + "\ufffda\ufffdb\ufffd\ufffda"
    told = choice["logprobs"]
    at = [o for token, o in zip(told["tokens"], told["text_offset"], strict=True) if token in "ab"]
    assert at == [index for index, letter in enumerate(text) if letter in "ab"][-3:]
    tokenizer = Tokenizer(tokenizer_files())
    offsets = text_offsets(tokenizer, prompt, "\ufffda\ufffdb\ufffd\ufffdaa")
    assert [offsets[index] for index in (1, 3, 6, 7)] == [1, 3, 6, 7]


async def test_an_unfinished_character_is_shown_once():
    first, _ = reference_tokenizer().encode(ACUTE).ids
    letters = reference_tokenizer().encode("ab").ids
    async with completions(FakeEngine(script=lambda _: letters)) as complete:
        choice = await complete(prompt=[*letters, first], echo=True, max_tokens=2)
    assert choice["text"] == "ab\ufffdab"


def test_a_token_that_the_tokenizer_adds_takes_no_position():
    library = tokenizers.Tokenizer.from_str(tokenizer_json())
    library.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 0), ("<|im_end|>", 1)]
    )
    tokenizer = Tokenizer({"tokenizer.json": library.to_str().encode()})
    ids = library.encode("hello").ids
    offsets = text_offsets(tokenizer, ids, "hello")
    assert (offsets[:2], offsets[-1]) == ([0, 0], 5)


def test_sentencepiece_words_begin_at_their_letters():
    library = tokenizers.Tokenizer(
        models.BPE({"<unk>": 0, "▁a": 1, "a": 2, "▁": 3}, [("▁", "a")], unk_token="<unk>")
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(["<s>"])
    tokenizer = Tokenizer({"tokenizer.json": library.to_str().encode()})
    ids = library.encode("a a").ids
    assert text_offsets(tokenizer, ids, "a a") == [0, 1]
    assert prompt_text(tokenizer, ids, library.decode(ids)) == "a a"


def test_whitespace_that_a_special_token_takes_in_is_skipped():
    library = tokenizers.Tokenizer.from_str(tokenizer_json())
    library.add_special_tokens([tokenizers.AddedToken("<|user|>", rstrip=True)])
    tokenizer = Tokenizer({"tokenizer.json": library.to_str().encode()})
    text = "<|user|> \n a"
    assert text_offsets(tokenizer, library.encode(text).ids, text) == [0, 11]


def test_spaces_after_characters_of_several_tokens_keep_their_positions():
    tokenizer = Tokenizer(tokenizer_files())
    text = f"a{ACUTE}{ACUTE} {ACUTE} b"
    ids = reference_tokenizer().encode(text).ids
    offsets = text_offsets(tokenizer, ids, text)
    assert offsets == [0, 1, 2, 2, 3, 3, 4, 5, 5, 6]


def test_offsets_stay_within_the_text():
    tokenizer = Tokenizer(tokenizer_files())
    ids = reference_tokenizer().encode(ACUTE).ids
    assert text_offsets(tokenizer, ids[:1], "") == [0]
