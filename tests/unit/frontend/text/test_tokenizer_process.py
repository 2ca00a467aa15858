"""Long texts become the same tokens in the process as here, and bad ones cost only themselves."""

import contextlib

import pytest

from services.frontend.errors import InvalidRequestError
from services.frontend.text import tokenizer_process
from services.frontend.text.content_marks import MarkedText
from services.frontend.text.encoder import Encoder, Encoding
from services.frontend.text.library_errors import EncodingError, TooManyTokensError
from services.frontend.text.tokenizer_process import TokenizerProcess
from tests.support.byte_tokenizer import tokenizer_json
from tests.support.special_tokenizers import byte_level, embedded, sentencepiece

TEXT = "hello  wor\u00ecd <|im_end|> a 1\n\u00e9 \U0001f600e\u0301\t\tx</s>" * 40


@contextlib.asynccontextmanager
async def process(content: str):
    made = TokenizerProcess(content.encode(), num_processes=1, max_text_bytes=2**20)
    try:
        yield made
    finally:
        await made.close()


@pytest.mark.parametrize(
    "library", [embedded, byte_level, sentencepiece], ids=lambda make: make.__name__
)
async def test_every_kind_of_tokenizer_gives_the_same_tokens_and_texts_in_the_process(library):
    content = library().to_str()
    encoder = Encoder(content.encode())
    async with process(content) as long_texts:
        for text in (TEXT, MarkedText(TEXT.replace("|im", "|\ue000im"), "\ue000")):
            for adds, parses in ((True, True), (False, False)):
                wanted = Encoding(text, adds, parses, None)
                token_ids = await long_texts.encode(wanted, "a")
                assert token_ids == wanted.run(encoder)
                text_again = await long_texts.decode(token_ids, "a", show_special_tokens=True)
                assert text_again == encoder.decode(token_ids, show_special_tokens=True)


async def test_too_many_tokens_are_counted_and_not_sent():
    async with process(tokenizer_json()) as long_texts:
        allowed = await long_texts.encode(Encoding("x" * 100, False, True, 101), "a")
        with pytest.raises(TooManyTokensError) as refusal:
            await long_texts.encode(Encoding("x" * 100, False, True, 100), "a")
    assert refusal.value.num_tokens == len(allowed) == 100


async def test_a_text_that_the_library_cannot_encode_is_refused_and_the_next_is_served():
    from tokenizers import Tokenizer, models

    library = Tokenizer(models.WordLevel(vocab={"a": 0}, unk_token="<unk>"))
    async with process(library.to_str()) as long_texts:
        with pytest.raises(EncodingError, match=r"cannot encode the text: .*UNK"):
            await long_texts.encode(Encoding("b", True, True, None), "a")
        assert await long_texts.encode(Encoding("a", True, True, None), "a") == [0]


async def test_a_text_that_takes_too_much_memory_costs_itself_alone(monkeypatch):
    monkeypatch.setattr(tokenizer_process, "MEMORY_PER_TEXT_BYTE", 1)
    monkeypatch.setattr(tokenizer_process, "BASE_MEMORY_BYTES", 400 * 2**20)
    async with process(tokenizer_json()) as long_texts:
        with pytest.raises(InvalidRequestError, match="takes too much to tokenize"):
            await long_texts.encode(Encoding("a 1\n" * 2**20, False, True, None), "a")
        assert await long_texts.encode(Encoding("x", False, True, None), "a")
