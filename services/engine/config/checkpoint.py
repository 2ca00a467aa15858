"""The model that is served."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from services.engine.config.section import ConfigSection
from services.settings.flags import MAX_INT32

REPOSITORY = Path(__file__).resolve().parents[3]
TINY_CHECKPOINT = REPOSITORY / "models" / "checkpoints" / "tiny"


def _explicit_path(value: object) -> object:
    """Keeps ./MODEL and ~/MODEL from looking like a name on the hub."""
    if isinstance(value, str) and value.startswith((".", "~")):
        return Path(value).expanduser().absolute()
    return value


Model = Annotated[Path, BeforeValidator(_explicit_path)]


class CheckpointConfig(ConfigSection):
    """The model: its folder, name, weights and length."""

    model: Model = TINY_CHECKPOINT
    """Folder of the checkpoint, in Hugging Face form, a GGUF file, or OWNER/NAME[@REVISION] on the
    hub. The default is the small embedded model."""
    gguf_file: str = ""
    """Which GGUF file of the folder or repository to serve, or its first shard; needed where there
    are several."""
    served_model_name: str = ""
    """Name that requests use; when empty, OWNER/NAME from the hub, else the folder's name, or that
    of the GGUF file."""
    task: Literal["generate", "embed", "score"] = "generate"
    """The answer to a request: tokens, a text's vector, or the score of a query and a document."""
    score_tokens: list[Annotated[int, Field(ge=0, le=MAX_INT32)]] = Field(default=[], max_length=2)
    """Ids of the tokens that answer no and yes, for --task score with a model without a head for
    scores; those of the words "no" and "yes" when absent."""
    model_impl: Literal["auto", "octavo", "transformers"] = "auto"
    """Whose modules run the model: Octavo's, transformers', or Octavo's where it has some."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """Where weights come from; dummy fills them with seeded random numbers, for benchmarks."""
    quantization: Literal["none", "fp8"] = "none"
    """Format to which plain weights are rounded while they load; fp8: 8 bits, a scale per row."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and activations; auto: float32 on a CPU, on CUDA the checkpoint's, but
    bfloat16 for a float16 checkpoint whose weights stay packed only then."""
    max_model_len: int | None = Field(default=None, ge=2, le=MAX_INT32)
    """Most tokens of prompt and output together; the checkpoint's own limit when absent."""

    @model_validator(mode="after")
    def _check_score_tokens(self) -> Self:
        if len(self.score_tokens) == 1:
            raise ValueError("--score-tokens takes two ids, of no and of yes")
        return self

    @property
    def model_name(self) -> str:
        """The name requests use."""
        return self.served_model_name or self.model.resolve().name
