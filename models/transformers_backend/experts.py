"""Where checkpoints of transformers store the experts that a network keeps stacked."""

from collections.abc import Iterator

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from models.layers.weight import ExpertTensor

_NUMBER = "*"


def stacked_experts(network: PreTrainedModel) -> Iterator[ExpertTensor]:
    """Yields where the tensors of single experts go, for parameters [E, N, K] of all experts.

    Conversions of another kind are left out: loading then names the first tensor that fits nowhere.
    """
    parameters = dict(network.named_parameters())
    for converter in get_model_conversion_mapping(network):
        if not isinstance(converter, WeightConverter) or not _stacks(converter):
            continue
        # Some patterns begin with a dot.
        (target,) = (each.strip(".") for each in converter.target_patterns)
        sizes = {len(each) for name, each in parameters.items() if name.endswith(f".{target}")}
        for expert in range(max(sizes, default=0)):
            for part, source in enumerate(converter.source_patterns):
                name = source.strip(".").replace(_NUMBER, str(expert))
                yield ExpertTensor(target, name, expert, part)


def _stacks(converter: WeightConverter) -> bool:
    """Returns whether a conversion stacks experts whose parts follow each other in rows."""
    kinds = [type(each) for each in converter.operations]
    dims = [getattr(each, "dim", None) for each in converter.operations]
    has_several = len(converter.source_patterns) > 1
    expected = [MergeModulelist, Concatenate] if has_several else [MergeModulelist]
    return (
        kinds == expected
        and dims == list(range(len(dims)))
        and len(converter.target_patterns) == 1
        and all(source.count(_NUMBER) == 1 for source in converter.source_patterns)
    )
