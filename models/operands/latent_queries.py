"""The queries of latent attention, with the projections that make its keys and values."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Elements of one head's parts of latent attention.

    latent: of a cached vector, C. rotated: of a query and a key that are rotated, P. plain: of both
    that are not, N. value: of a value, V.
    """

    latent: int
    rotated: int
    plain: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentQueries:
    """Queries of T tokens with H heads; sizes as in LatentSizes.

    plain: [T, H, N]. rotated: [T, H, P]. The elements of a head are contiguous in both.
    projections: [H * (N + V), C]; each head's rows make first its key, then its value.
    """

    plain: torch.Tensor
    rotated: torch.Tensor
    projections: torch.Tensor

    @property
    def sizes(self) -> LatentSizes:
        """Sizes of a head."""
        num_rows, latent = self.projections.shape
        plain = self.plain.shape[2]
        return LatentSizes(
            latent=latent,
            rotated=self.rotated.shape[2],
            plain=plain,
            value=num_rows // self.plain.shape[1] - plain,
        )

    def of(self, tokens: slice) -> "LatentQueries":
        """Returns the queries of some tokens."""
        return LatentQueries(
            plain=self.plain[tokens], rotated=self.rotated[tokens], projections=self.projections
        )

    def absorbed(self) -> torch.Tensor:
        """Returns queries for latent vectors, [T, H, C + P]: the projection to keys is applied."""
        to_keys, _ = self.by_head()
        latent = torch.bmm(self.plain.transpose(0, 1), to_keys).transpose(0, 1)
        return torch.cat((latent, self.rotated), dim=-1)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Maps sums of latent vectors, [T, H, C], to sums of values, [T, H, V]."""
        _, to_values = self.by_head()
        return torch.bmm(attended.transpose(0, 1), to_values.transpose(1, 2)).transpose(0, 1)

    def keys_and_values(self, latent: torch.Tensor) -> torch.Tensor:
        """Maps latent vectors [n, C] to the heads' unrotated keys and values, [n, H, N + V]."""
        expanded = torch.mm(latent, self.projections.t())
        return expanded.view(len(latent), self.plain.shape[1], -1)

    def by_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the projections to keys [H, N, C] and to values [H, V, C]."""
        num_heads, plain = self.plain.shape[1:]
        by_head = self.projections.view(num_heads, -1, self.projections.shape[1])
        to_keys, to_values = torch.split(by_head, [plain, by_head.shape[1] - plain], dim=1)
        return to_keys, to_values
