"""Facts about an engine's vectors, for frontends."""

from models.config_sections.pooling import PoolingConfig
from protos.engine.v1.engine_pb2 import PairText, Pooling, PoolingTask
from services.engine.checkpoint.model_folder import ModelFolder

_TASKS = {
    "embed": PoolingTask.POOLING_TASK_EMBED,
    "score": PoolingTask.POOLING_TASK_SCORE,
}

QWEN3_RERANKER = PairText(
    prefix="<|im_start|>system\nJudge whether the Document meets the requirements based on the "
    'Query and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n",
    text="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
"""The input of Qwen3-Reranker. Source: its model card, https://huggingface.co/Qwen/Qwen3-Reranker-0.6B."""


def pooling_to_proto(pooling: PoolingConfig, model: ModelFolder) -> Pooling:
    """Returns how a model pools, as GetModelInfo says it."""
    limit = pooling.max_input_tokens or model.max_model_len
    facts = Pooling(
        task=_TASKS[pooling.task],
        size=pooling.size(model.config.hidden_size),
        is_normalized=pooling.is_normalized,
        max_input_tokens=min(limit, model.max_model_len),
        prompts=dict(pooling.prompts),
        default_prompt_name=pooling.default_prompt_name,
    )
    if pooling.task == "score":
        # Heads of other families were trained on pairs as their tokenizers join them.
        is_qwen3 = model.architecture.startswith("Qwen3")
        facts.pair.CopyFrom(QWEN3_RERANKER if is_qwen3 or pooling.answers else PairText())
    return facts
