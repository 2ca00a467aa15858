"""Residual streams that hyper-connections mix, in config.json."""

from dataclasses import dataclass

from models.config_sections.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConfig:
    """Hyper-connections whose mixing matrices are doubly stochastic.

    num_streams: residual streams of a token. num_iterations: of Sinkhorn and Knopp's algorithm.
    eps: added to sums that it divides by.
    """

    num_streams: int
    num_iterations: int
    eps: float


def read_hyper_connections(fields: Fields) -> HyperConfig | None:
    """Reads the hyper-connections of a model; None if it has one residual stream.

    Raises:
        ConfigError: a field is missing or ill-typed.
    """
    if not fields.has("hc_mult"):
        return None
    return HyperConfig(
        num_streams=fields.count("hc_mult"),
        num_iterations=fields.count("hc_sinkhorn_iters"),
        eps=fields.number("hc_eps"),
    )
