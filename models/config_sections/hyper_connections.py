"""Residual streams that hyper-connections mix, in config.json."""

from dataclasses import dataclass

from models.config_sections.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConfig:
    """Hyper-connections whose mixing matrices are doubly stochastic, or that mix no streams.

    num_streams: residual streams of a token. num_iterations: of Sinkhorn and Knopp's algorithm; 0
    where streams stay as they are. eps: added to weights, and to sums that the algorithm divides
    by. magnitude: largest weight of a sub-layer's output.
    """

    num_streams: int
    num_iterations: int
    eps: float
    magnitude: float


def read_hyper_connections(fields: Fields) -> HyperConfig | None:
    """Reads the hyper-connections of a model; None if it has one residual stream.

    Raises:
        ConfigError: a field is missing or ill-typed.
    """
    if not fields.has("hc_mult"):
        return None
    has_magnitude = fields.has("hc_magnitude")
    return HyperConfig(
        num_streams=fields.count("hc_mult"),
        num_iterations=0 if has_magnitude else fields.count("hc_sinkhorn_iters"),
        eps=fields.number("hc_eps"),
        magnitude=fields.number("hc_magnitude") if has_magnitude else 2.0,
    )
