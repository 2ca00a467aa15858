"""Chooses the captured graph that a step replays, from the shape of its batch alone."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.engine.batch import BatchDescriptor, FallbackReason, GraphKey, GraphKind


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """The sizes of a batch that decide which graph fits.

    has_other_lengths: of the batches of several data-parallel ranks, whether a request has fewer
        query tokens than max_q_len.
    sees_images: whether a token's input or position depends on an image; decode graphs ignore them.
    sees_whole_images: whether tokens may attend to later ones of an image; only graphs of pieces,
        between which attention runs, serve these.
    """

    num_tokens: int
    batch_size: int
    max_q_len: int
    has_other_lengths: bool = False
    sees_images: bool = False
    sees_whole_images: bool = False

    @classmethod
    def of_all(cls, shapes: Sequence["BatchShape"]) -> "BatchShape":
        """Returns the shape of which every batch of data-parallel ranks is a part."""
        max_q_len = max(each.max_q_len for each in shapes)
        return cls(
            num_tokens=max(each.num_tokens for each in shapes),
            batch_size=max(each.batch_size for each in shapes),
            max_q_len=max_q_len,
            has_other_lengths=any(
                each.num_tokens != each.batch_size * max_q_len for each in shapes
            ),
            sees_images=any(each.sees_images for each in shapes),
            sees_whole_images=any(each.sees_whole_images for each in shapes),
        )

    @property
    def is_uniform(self) -> bool:
        """Whether a graph of decodes may serve it: all requests have as many query tokens."""
        is_full = self.num_tokens == self.batch_size * self.max_q_len
        return is_full and not self.has_other_lengths and not self.sees_images


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """How a step runs; without a graph, `fallback_reason` says why."""

    graph_key: GraphKey | None
    fallback_reason: FallbackReason


@dataclass(slots=True)
class _Sizes:
    """Graphs that serve the same steps, by size: batch size of decodes, else tokens.

    allows_padding: a graph serves smaller steps too. captured, ascending: by (size, most requests).
    """

    allows_padding: bool
    captured: dict[tuple[int, int], GraphKey] = field(default_factory=dict)
    ascending: list[tuple[int, int]] = field(default_factory=list)
    planned: set[int] = field(default_factory=set)
    quarantined: set[int] = field(default_factory=set)

    def capture(self, key: GraphKey) -> None:
        self.captured[_size(key), key.graph_bs] = key
        self.ascending = sorted(self.captured)

    def quarantine(self, key: GraphKey) -> None:
        self.quarantined.add(_size(key))
        self.captured.pop((_size(key), key.graph_bs), None)
        self.ascending = sorted(self.captured)

    def find(self, size: int, batch_size: int, *, of_pieces: bool = False) -> GraphKey | None:
        """Returns the smallest graph for steps of this size with room for the batch.

        of_pieces: whether only graphs of pieces serve.
        """
        first = bisect_left(self.ascending, (size, batch_size))
        for found in self.ascending[first:]:
            if found[0] != size and not self.allows_padding:
                return None
            key = self.captured[found]
            if of_pieces and key.kind != GraphKind.GRAPH_KIND_PIECEWISE:
                continue
            if found[1] >= batch_size:
                return key
        return None

    def why_none(self, size: int) -> FallbackReason:
        """Returns why no graph serves this size."""
        if self._serves(size, self.quarantined):
            return FallbackReason.FALLBACK_REASON_QUARANTINED
        if self._serves(size, self.planned) or not self.planned:
            return FallbackReason.FALLBACK_REASON_UNCAPTURED
        if size <= max(self.planned):
            return FallbackReason.FALLBACK_REASON_NO_EXACT_SIZE
        return FallbackReason.FALLBACK_REASON_OVERSIZE

    def _serves(self, size: int, sizes: set[int]) -> bool:
        if self.allows_padding:
            return size <= max(sizes, default=0)
        return size in sizes


class GraphDispatcher:
    """Chooses among the worker's captured graphs.

    A decode graph fits batches of at most graph_bs requests with exactly its query length. Any
    other graph fits every batch of at most num_tokens tokens and graph_bs requests. Without padding
    a decode graph fits exactly graph_bs requests, any other exactly num_tokens tokens.
    """

    def __init__(
        self,
        captured: Iterable[GraphKey] = (),
        *,
        planned: Iterable[GraphKey] = (),
        without_graphs: FallbackReason = FallbackReason.FALLBACK_REASON_UNSUPPORTED,
        allows_padding: bool = True,
    ) -> None:
        """Starts with the graphs that the worker announced.

        Args:
            captured: graphs that can be replayed now.
            planned: graphs that can be replayed now or later.
            without_graphs: why nothing is planned, if nothing is.
            allows_padding: a graph serves smaller steps too.
        """
        self._without_graphs = without_graphs
        self._allows_padding = allows_padding
        self._full: dict[int, _Sizes] = {}
        self._others = _Sizes(allows_padding)
        self._forms: dict[tuple[int, ...], GraphKey] = {}
        """Graphs of steps that share prefixes or have no adapters, by their sizes and by both."""
        self._has_plan = False
        captured = list(captured)
        for key in (*planned, *captured):
            self._sizes(key).planned.add(_size(key))
            self._has_plan = True
        for key in captured:
            self.capture(key)

    def capture(self, key: GraphKey) -> None:
        """Lets steps run a graph from now on."""
        if _has_form(key):
            self._forms[*_sizes_of(key), key.shares_prefixes, key.skips_adapters] = key
        else:
            self._sizes(key).capture(key)

    def quarantine(self, key: GraphKey) -> None:
        """Removes a graph for good: its steps use the next larger one, or none.

        Steps that share prefixes or have no adapters then run the graph of other steps.
        """
        if _has_form(key):
            form = key.shares_prefixes, key.skips_adapters
            self._forms.pop((*_sizes_of(key), *form), None)
        else:
            self._sizes(key).quarantine(key)

    def order_form(self, descriptor: BatchDescriptor, *, has_adapters: bool) -> None:
        """Replaces the graph of a step by the form for its prefixes and adapters, if captured.

        Until then the step's own graph computes the same, and the worker sees what is missing.

        has_adapters: whether a request of the step may have one.
        """
        key = self._form_of(descriptor, descriptor.graph_key, has_adapters=has_adapters)
        if key is not None:
            descriptor.graph_key.CopyFrom(key)

    def order_forms(
        self, descriptors: Sequence[BatchDescriptor], graph: GraphKey, *, has_adapters: bool
    ) -> None:
        """Orders a graph for the steps of data-parallel ranks, in the form of each; see order_form.

        All skip adapters or none does: ranks exchange the slots of tokens where experts have some.

        has_adapters: whether a request of any rank may have one.
        """
        keys = [self._form_of(each, graph, has_adapters=has_adapters) for each in descriptors]
        if not all(key is not None and key.skips_adapters for key in keys):
            keys = [self._form_of(each, graph, has_adapters=True) for each in descriptors]
        for descriptor, key in zip(descriptors, keys, strict=True):
            descriptor.graph_key.CopyFrom(graph if key is None else key)

    def _form_of(
        self, descriptor: BatchDescriptor, graph: GraphKey, *, has_adapters: bool
    ) -> GraphKey | None:
        """Returns the captured form of a graph that does least of what a step does not need."""
        if not self._forms:
            return None
        shares = descriptor.attn_metadata.HasField("shared_prefixes")
        sizes, skips = _sizes_of(graph), not has_adapters
        forms = ((shares, skips), (False, skips), (shares, False))
        keys = (self._forms.get((*sizes, *form)) for form in forms)
        return next((key for key in keys if key is not None), None)

    def dispatch(self, shape: BatchShape) -> Dispatch:
        """Returns the smallest graph that fits; decode graphs come first."""
        batch_size = shape.batch_size
        full = self._full.get(shape.max_q_len) if shape.is_uniform else None
        if full is not None and (key := full.find(batch_size, batch_size)) is not None:
            return _replay(key)
        of_pieces = shape.sees_whole_images
        key = self._others.find(shape.num_tokens, batch_size, of_pieces=of_pieces)
        if key is not None:
            return _replay(key)
        if not self._has_plan:
            return _fall_back(self._without_graphs)
        if full is not None:
            return _fall_back(full.why_none(batch_size))
        if of_pieces and self._others.find(shape.num_tokens, batch_size) is not None:
            return _fall_back(FallbackReason.FALLBACK_REASON_UNSUPPORTED)
        return _fall_back(self._others.why_none(shape.num_tokens))

    def _sizes(self, key: GraphKey) -> _Sizes:
        if key.kind == GraphKind.GRAPH_KIND_DECODE:
            return self._full.setdefault(key.max_q_len, _Sizes(self._allows_padding))
        return self._others


def _sizes_of(key: GraphKey) -> tuple[int, ...]:
    return key.kind, key.num_tokens, key.graph_bs, key.max_q_len


def _has_form(key: GraphKey) -> bool:
    """Whether a graph serves only some of the steps of its sizes."""
    return key.shares_prefixes or key.skips_adapters


def _size(key: GraphKey) -> int:
    return key.graph_bs if key.kind == GraphKind.GRAPH_KIND_DECODE else key.num_tokens


def _replay(key: GraphKey) -> Dispatch:
    return Dispatch(graph_key=key, fallback_reason=FallbackReason.FALLBACK_REASON_UNSPECIFIED)


def _fall_back(reason: FallbackReason) -> Dispatch:
    return Dispatch(graph_key=None, fallback_reason=reason)
