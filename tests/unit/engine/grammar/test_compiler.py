"""Grammars over the tokenizer of the embedded model, with real probe processes."""

import asyncio
import json
import re
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.errors import InvalidRequestError, QueueFullError, UnsupportedError
from services.engine.grammar.compiler import LIVE, MAX_COMPILING_OF_CALLER, GrammarCompiler
from services.engine.structured_output import GrammarKind, StructuredOutput
from services.transport.counts import LocalCounts
from tests.support.forked_helpers import helpers_forked
from tests.support.passing_time import pass_time
from tests.support.waiting import until

MODEL = ModelFolder.open(TINY_CHECKPOINT, name="tiny", max_model_len=None)
NUMBER = StructuredOutput(GrammarKind.REGEX, ("[0-9]{3}",))


@asynccontextmanager
async def running_compiler(**changes):
    settings = {
        "vocab_size": MODEL.vocab_size,
        "eos_token_ids": MODEL.eos_token_ids,
        "max_live": 8,
        "timeout_s": 60.0,
        "num_threads": 2,
        "counts": LocalCounts(),
    }
    tokenizer_json = changes.pop("tokenizer_json", MODEL.tokenizer_json)
    with helpers_forked():
        compiler = GrammarCompiler(tokenizer_json, **{**settings, **changes})
        try:
            yield compiler
        finally:
            await compiler.close()


class Walk:
    """Follows a constraint and keeps the tokens that it is given."""

    def __init__(self, constraint):
        self.constraint = constraint
        self.token_ids = []
        self.error = None
        self.is_over = False
        self._news = asyncio.Event()
        constraint.listen(self._news.set, self._end)

    def _end(self, error):
        self.error, self.is_over = error, True
        self._news.set()

    def allowed(self):
        bits = np.unpackbits(np.frombuffer(self.constraint.mask, np.uint8), bitorder="little")
        return np.flatnonzero(bits).tolist()

    async def push(self, token_id):
        self.token_ids.append(token_id)
        self._news.clear()
        self.constraint.advance(token_id)
        assert self.constraint.mask is None
        async with asyncio.timeout(60):
            await self._news.wait()

    async def run(self, rng, *, max_tokens=400):
        """Takes allowed tokens by chance until the grammar is complete."""
        while not self.is_over and len(self.token_ids) < max_tokens:
            allowed = self.allowed()
            if set(allowed) & MODEL.eos_token_ids and rng.random() < 0.7:
                return
            own = [t for t in allowed if t not in MODEL.eos_token_ids]
            await self.push(int(rng.choice(own)))

    @property
    def text(self):
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_buffer(MODEL.tokenizer_json)
        return tokenizer.decode(self.token_ids)


async def test_only_what_a_regex_matches_is_allowed_and_it_ends_where_nothing_can_follow():
    rng = np.random.default_rng(0)
    async with running_compiler() as compiler:
        for _ in range(3):
            walk = Walk(await compiler.constrain(NUMBER))
            await walk.run(rng)
            assert walk.is_over
            assert walk.error is None
            assert re.fullmatch("[0-9]{3}", walk.text)


async def test_end_tokens_are_allowed_only_where_the_output_is_complete():
    async with running_compiler() as compiler:
        walk = Walk(await compiler.constrain(StructuredOutput(GrammarKind.REGEX, ("[0-9]+",))))
        assert not set(walk.allowed()) & MODEL.eos_token_ids
        await walk.push(walk.allowed()[0])
        assert set(walk.allowed()) >= MODEL.eos_token_ids


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
         "additionalProperties": False},
        {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 3},
        {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    ],
)  # fmt: skip
async def test_what_a_schema_allows_is_json_that_it_accepts(schema):
    import jsonschema

    rng = np.random.default_rng(1)
    async with running_compiler() as compiler:
        wanted = StructuredOutput(GrammarKind.JSON_SCHEMA, (json.dumps(schema),))
        for _ in range(3):
            walk = Walk(await compiler.constrain(wanted))
            await walk.run(rng)
            jsonschema.validate(json.loads(walk.text), schema)


async def test_a_choice_is_taken_literally_whatever_its_texts_hold():
    texts = ('a"b\\', "new\nline", "é{x}|/y/")
    rng = np.random.default_rng(2)
    async with running_compiler() as compiler:
        walk = Walk(await compiler.constrain(StructuredOutput(GrammarKind.CHOICE, texts)))
        await walk.run(rng)
        assert walk.text in texts


async def test_a_lark_grammar_can_nest():
    grammar = 'start: "(" start ")" | "x"'
    rng = np.random.default_rng(3)
    async with running_compiler() as compiler:
        walk = Walk(await compiler.constrain(StructuredOutput(GrammarKind.LARK, (grammar,))))
        await walk.run(rng)
        assert re.fullmatch(r"(\(*)x(\)*)", walk.text)
        assert walk.text.count("(") == walk.text.count(")")


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        (GrammarKind.JSON_SCHEMA, "{", "cannot be read"),
        (GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        (GrammarKind.JSON_SCHEMA, '{"x-guidance": {"lenient": true}, "not": {"const": 1}}', "not"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "file:///etc/passwd"}', "refused"),
        (GrammarKind.JSON_SCHEMA, "false", "not an object"),
        (GrammarKind.REGEX, "(", "refused"),
        (GrammarKind.REGEX, "(?=a)b", "look-around"),
        (GrammarKind.LARK, "nothing", "refused"),
        (GrammarKind.LARK, "start: start", "refused"),
        (GrammarKind.LARK, '# words\nroot ::= "a" | root "b"', "must be in Lark"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', "no finite output"),
        (GrammarKind.JSON_SCHEMA, '{"type": "text"}', "the grammar is refused: Invalid type"),
    ],
)
async def test_a_grammar_that_cannot_be_followed_is_refused(kind, text, why):
    async with running_compiler() as compiler:
        with pytest.raises(InvalidRequestError, match=why):
            await compiler.constrain(StructuredOutput(kind, (text,)))


async def test_a_grammar_that_compiles_for_minutes_costs_its_time_limit_and_no_other_waits(
    monkeypatch,
):
    hostile = '{"type": "integer", "multipleOf": 99999989}'
    async with running_compiler() as compiler:
        await compiler.constrain(NUMBER)
        slow = asyncio.create_task(
            compiler.constrain(StructuredOutput(GrammarKind.JSON_SCHEMA, (hostile,)))
        )
        await until(lambda: not compiler._probes._pool._idle)
        other = await compiler.constrain(StructuredOutput(GrammarKind.REGEX, ("[a-z]",)))
        assert other.mask is not None
        assert not slow.done()
        pass_time(monkeypatch, 60)
        with pytest.raises(InvalidRequestError, match="compiling it took over 60 s"):
            await slow
        await compiler.constrain(StructuredOutput(GrammarKind.REGEX, ("[A-Z]",)))


async def test_a_grammar_that_meets_a_limit_while_it_is_followed_ends_with_a_reason():
    async with running_compiler() as compiler:
        wide = {"properties": {f"p{i}": {"type": "integer"} for i in range(2500)}}
        wanted = StructuredOutput(GrammarKind.JSON_SCHEMA, (json.dumps(wide | {"type": "object"}),))
        try:
            walk = Walk(await compiler.constrain(wanted))
        except InvalidRequestError as error:
            assert "refused" in str(error)  # noqa: PT017  either is a clear end
            return
        await walk.run(np.random.default_rng(0), max_tokens=8)
        assert "grammar any further" in str(walk.error)


async def test_equal_grammars_compile_once_and_a_caller_that_leaves_ends_it_for_no_other():
    async with running_compiler() as compiler:
        first = asyncio.create_task(compiler.constrain(NUMBER))
        second = asyncio.create_task(compiler.constrain(NUMBER))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).mask is not None
        assert len(compiler._known) == 1


async def test_requests_with_a_grammar_are_limited():
    async with running_compiler(max_live=2) as compiler:
        held = [await compiler.constrain(NUMBER) for _ in range(2)]
        with pytest.raises(QueueFullError, match="the limit is 2"):
            await compiler.constrain(NUMBER)
        held.pop().close()
        await compiler.constrain(NUMBER)


async def test_a_slot_is_freed_however_a_constraint_ends():
    counts = LocalCounts()
    async with running_compiler(counts=counts) as compiler:
        hostile = '{"type": "integer", "multipleOf": 99999989}'
        left = asyncio.create_task(
            compiler.constrain(StructuredOutput(GrammarKind.JSON_SCHEMA, (hostile,)))
        )
        await until(lambda: counts.held(LIVE) == 1)
        left.cancel()
        await asyncio.wait({left})
        for wrong in ("(", "(?=a)"):
            with pytest.raises(InvalidRequestError):
                await compiler.constrain(StructuredOutput(GrammarKind.REGEX, (wrong,)))
        with pytest.raises(InvalidRequestError, match="cannot go on"):
            await compiler.constrain(NUMBER, [5, 5])
        assert counts.held(LIVE) == 0
        constraint = await compiler.constrain(NUMBER)
        assert counts.held(LIVE) == 1
        constraint.close()
        constraint.close()
        assert counts.held(LIVE) == 0


async def test_grammars_without_a_waiting_caller_leave_the_queue(monkeypatch):
    """Callers who come and go do not keep others from compiling theirs."""
    async with running_compiler(max_live=1000) as compiler:
        await compiler.constrain(NUMBER)
        for i in range(3 * MAX_COMPILING_OF_CALLER):
            hostile = f'{{"type": "integer", "multipleOf": {99999989 + i}}}'
            wanted = StructuredOutput(GrammarKind.JSON_SCHEMA, (hostile,))
            caller = asyncio.create_task(compiler.constrain(wanted))
            await asyncio.sleep(0)
            caller.cancel()
            await asyncio.wait({caller})
            assert caller.cancelled()
        assert len(compiler._known) == 1
        pass_time(monkeypatch, 90)  # a compilation that has begun goes on to its limit


async def test_grammars_that_wait_are_bounded():
    async with running_compiler(max_live=1000) as compiler:
        callers = [
            asyncio.create_task(
                compiler.constrain(StructuredOutput(GrammarKind.REGEX, (f"a{{{i}}}",)))
            )
            for i in range(MAX_COMPILING_OF_CALLER + 1)
        ]
        with pytest.raises(QueueFullError, match=f"the limit is {MAX_COMPILING_OF_CALLER}"):
            await callers[-1]
        await compiler.constrain(NUMBER, caller="another")
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)


async def test_one_callers_many_grammars_do_not_delay_anothers():
    async with running_compiler(max_live=1000) as compiler:
        await compiler.constrain(NUMBER)
        forms = [StructuredOutput(GrammarKind.REGEX, (f"a{{{i}}}",)) for i in range(16)]
        many = [asyncio.create_task(compiler.constrain(form, caller="many")) for form in forms]
        await asyncio.sleep(0)
        # The last of the many, too, is compiled for the other caller without waiting for theirs.
        await compiler.constrain(forms[-1], caller="other")
        assert sum(task.done() for task in many) < len(many) // 2
        await asyncio.gather(*many)


async def test_a_tokenizer_that_cannot_be_used_is_said_so():
    async with running_compiler(tokenizer_json=b"{}") as compiler:
        with pytest.raises(UnsupportedError, match="no vocabulary"):
            await compiler.constrain(NUMBER)


async def test_an_output_goes_on_from_the_beginning_of_its_form():
    schema = '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}'
    form = StructuredOutput(GrammarKind.JSON_SCHEMA, (schema,), begun='{"a": "<|im_end|>x')
    async with running_compiler() as compiler:
        tokenizer = await compiler.tokenizer()
        walk = Walk(await compiler.constrain(form))
        for token_id in tokenizer.greedy_tokenize('y"'):
            await walk.push(token_id)
        assert tokenizer.greedy_tokenize("}")[0] in walk.allowed()
        resumed = Walk(await compiler.constrain(form, walk.token_ids))
        assert resumed.allowed() == walk.allowed()
        plain = Walk(await compiler.constrain(replace(form, begun="")))
        assert tokenizer.greedy_tokenize("{")[0] in plain.allowed()
        for begun in ("Here: {", '{"a": "x"}', '{"a": 1', "x" * 5000):
            with pytest.raises(InvalidRequestError, match="does not begin the form"):
                await compiler.constrain(replace(form, begun=begun))


async def test_an_output_that_goes_on_elsewhere_is_where_it_was():
    rng = np.random.default_rng(4)
    async with running_compiler() as compiler:
        whole = Walk(await compiler.constrain(NUMBER))
        await whole.run(rng)
        for count in range(1, len(whole.token_ids)):
            rest = Walk(await compiler.constrain(NUMBER, whole.token_ids[:count]))
            for token_id in whole.token_ids[count:]:
                assert token_id in rest.allowed()
                await rest.push(token_id)
            assert rest.is_over
            assert rest.error is None
        for wrong in (whole.token_ids, [5, 5]):
            with pytest.raises(InvalidRequestError, match="cannot go on"):
                await compiler.constrain(NUMBER, wrong)
