"""The same checkpoint in Hugging Face transformers, the reference for Octavo's output."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class TransformersReference:
    """Greedy generation in fp32, one prompt at a time."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def encode(self, text: str, *, is_chat: bool) -> list[int]:
        """Returns the prompt's token ids, through the chat template when it is a chat."""
        if not is_chat:
            return self.tokenizer(text)["input_ids"]
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        return self.tokenizer(rendered, add_special_tokens=False)["input_ids"]

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_tokens: int, **options: object) -> list[int]:
        """Returns the output tokens, the end-of-sequence token included.

        `options` are transformers' own, such as repetition_penalty.
        """
        input_ids = torch.tensor([prompt])
        output = self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            **options,
        )
        return output[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def logprobs(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """Returns the log-probabilities of every token at each position of the output: [n, V]."""
        logits = self.model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1)
