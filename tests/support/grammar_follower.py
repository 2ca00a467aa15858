"""Draws outputs that follow a schema, and says which texts do, with the embedded tokenizer."""

import json

import numpy as np
import tokenizers

from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.grammar.constraint import next_mask
from services.engine.grammar.grammar_text import compile_grammar, grammar_text, make_tokenizer
from services.engine.structured_output import GrammarKind, StructuredOutput

MODEL = ModelFolder.open(TINY_CHECKPOINT, name="tiny", max_model_len=None)


class GrammarFollower:
    """Follows schemas, token by token."""

    def __init__(self):
        self.ends = sorted(MODEL.eos_token_ids)
        self.tokenizer = make_tokenizer(
            MODEL.tokenizer_json.decode(), vocab_size=MODEL.vocab_size, eos_token_ids=self.ends
        )
        self.reader = tokenizers.Tokenizer.from_buffer(MODEL.tokenizer_json)

    def draw(self, schema, rng, *, max_tokens=120):
        """Returns an output's text, or None where it got too long."""
        matcher = self._matcher(schema)
        token_ids = []
        while not matcher.is_stopped() and len(token_ids) < max_tokens:
            mask = next_mask(matcher, 4 * -(-MODEL.vocab_size // 32))
            assert mask is not None, matcher.get_error()
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            if set(allowed) & set(self.ends) and rng.random() < 0.4:
                break
            own = [t for t in allowed if t not in self.ends]
            closing = [t for t in own if self.reader.decode([t]) in ('"', "]", "}")]
            token_ids.append(int(rng.choice(closing if closing and rng.random() < 0.4 else own)))
            matcher.consume_token(token_ids[-1])
        if len(token_ids) == max_tokens:
            return None
        return self.reader.decode(token_ids)

    def admits(self, schema, text):
        """Whether a text is a whole output."""
        matcher = self._matcher(schema)
        token_ids = self.tokenizer.greedy_tokenize(text)
        if matcher.validate_tokens(token_ids) < len(token_ids):
            return False
        assert matcher.consume_tokens(token_ids)
        return matcher.is_accepting()

    def _matcher(self, schema):
        wanted = StructuredOutput(GrammarKind.JSON_SCHEMA, (json.dumps(schema),))
        matcher = compile_grammar(self.tokenizer, grammar_text(wanted))
        assert not matcher.is_error(), matcher.get_error()
        return matcher
