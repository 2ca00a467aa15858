from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GraphKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAPH_KIND_UNSPECIFIED: _ClassVar[GraphKind]
    GRAPH_KIND_DECODE: _ClassVar[GraphKind]
    GRAPH_KIND_MIXED: _ClassVar[GraphKind]
    GRAPH_KIND_PIECEWISE: _ClassVar[GraphKind]
    GRAPH_KIND_DRAFT: _ClassVar[GraphKind]
    GRAPH_KIND_ENCODER: _ClassVar[GraphKind]

class CUDAGraphMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CUDA_GRAPH_MODE_UNSPECIFIED: _ClassVar[CUDAGraphMode]
    CUDA_GRAPH_MODE_NONE: _ClassVar[CUDAGraphMode]
    CUDA_GRAPH_MODE_PIECEWISE: _ClassVar[CUDAGraphMode]
    CUDA_GRAPH_MODE_FULL: _ClassVar[CUDAGraphMode]

class FallbackReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FALLBACK_REASON_UNSPECIFIED: _ClassVar[FallbackReason]
    FALLBACK_REASON_ENFORCE_EAGER: _ClassVar[FallbackReason]
    FALLBACK_REASON_UNSUPPORTED: _ClassVar[FallbackReason]
    FALLBACK_REASON_OVERSIZE: _ClassVar[FallbackReason]
    FALLBACK_REASON_UNCAPTURED: _ClassVar[FallbackReason]
    FALLBACK_REASON_QUARANTINED: _ClassVar[FallbackReason]
    FALLBACK_REASON_NO_EXACT_SIZE: _ClassVar[FallbackReason]

class StepFailure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_FAILURE_UNSPECIFIED: _ClassVar[StepFailure]
    STEP_FAILURE_OUT_OF_MEMORY: _ClassVar[StepFailure]
    STEP_FAILURE_SKIPPED: _ClassVar[StepFailure]
GRAPH_KIND_UNSPECIFIED: GraphKind
GRAPH_KIND_DECODE: GraphKind
GRAPH_KIND_MIXED: GraphKind
GRAPH_KIND_PIECEWISE: GraphKind
GRAPH_KIND_DRAFT: GraphKind
GRAPH_KIND_ENCODER: GraphKind
CUDA_GRAPH_MODE_UNSPECIFIED: CUDAGraphMode
CUDA_GRAPH_MODE_NONE: CUDAGraphMode
CUDA_GRAPH_MODE_PIECEWISE: CUDAGraphMode
CUDA_GRAPH_MODE_FULL: CUDAGraphMode
FALLBACK_REASON_UNSPECIFIED: FallbackReason
FALLBACK_REASON_ENFORCE_EAGER: FallbackReason
FALLBACK_REASON_UNSUPPORTED: FallbackReason
FALLBACK_REASON_OVERSIZE: FallbackReason
FALLBACK_REASON_UNCAPTURED: FallbackReason
FALLBACK_REASON_QUARANTINED: FallbackReason
FALLBACK_REASON_NO_EXACT_SIZE: FallbackReason
STEP_FAILURE_UNSPECIFIED: StepFailure
STEP_FAILURE_OUT_OF_MEMORY: StepFailure
STEP_FAILURE_SKIPPED: StepFailure

class BatchDescriptor(_message.Message):
    __slots__ = ("step_id", "context", "graph_key", "cudagraph_runtime_mode", "fallback_reason", "attn_metadata", "sampling", "spec_decode_metadata", "dp_metadata", "row_assignments", "state_metadata", "encoded_images", "images", "adapter_loads", "block_copies", "num_failed_steps")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    GRAPH_KEY_FIELD_NUMBER: _ClassVar[int]
    CUDAGRAPH_RUNTIME_MODE_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_REASON_FIELD_NUMBER: _ClassVar[int]
    ATTN_METADATA_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPEC_DECODE_METADATA_FIELD_NUMBER: _ClassVar[int]
    DP_METADATA_FIELD_NUMBER: _ClassVar[int]
    ROW_ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    STATE_METADATA_FIELD_NUMBER: _ClassVar[int]
    ENCODED_IMAGES_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOADS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COPIES_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_STEPS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    context: Context
    graph_key: GraphKey
    cudagraph_runtime_mode: CUDAGraphMode
    fallback_reason: FallbackReason
    attn_metadata: AttentionMetadata
    sampling: SamplingMetadata
    spec_decode_metadata: SpecDecodeMetadata
    dp_metadata: DPMetadata
    row_assignments: _containers.RepeatedCompositeFieldContainer[RowAssignment]
    state_metadata: StateMetadata
    encoded_images: _containers.RepeatedCompositeFieldContainer[EncodedImage]
    images: _containers.RepeatedCompositeFieldContainer[StepImage]
    adapter_loads: _containers.RepeatedCompositeFieldContainer[AdapterLoad]
    block_copies: BlockCopies
    num_failed_steps: int
    def __init__(self, step_id: _Optional[int] = ..., context: _Optional[_Union[Context, _Mapping]] = ..., graph_key: _Optional[_Union[GraphKey, _Mapping]] = ..., cudagraph_runtime_mode: _Optional[_Union[CUDAGraphMode, str]] = ..., fallback_reason: _Optional[_Union[FallbackReason, str]] = ..., attn_metadata: _Optional[_Union[AttentionMetadata, _Mapping]] = ..., sampling: _Optional[_Union[SamplingMetadata, _Mapping]] = ..., spec_decode_metadata: _Optional[_Union[SpecDecodeMetadata, _Mapping]] = ..., dp_metadata: _Optional[_Union[DPMetadata, _Mapping]] = ..., row_assignments: _Optional[_Iterable[_Union[RowAssignment, _Mapping]]] = ..., state_metadata: _Optional[_Union[StateMetadata, _Mapping]] = ..., encoded_images: _Optional[_Iterable[_Union[EncodedImage, _Mapping]]] = ..., images: _Optional[_Iterable[_Union[StepImage, _Mapping]]] = ..., adapter_loads: _Optional[_Iterable[_Union[AdapterLoad, _Mapping]]] = ..., block_copies: _Optional[_Union[BlockCopies, _Mapping]] = ..., num_failed_steps: _Optional[int] = ...) -> None: ...

class Context(_message.Message):
    __slots__ = ("is_prefill", "batch_size", "num_tokens", "max_q_len")
    IS_PREFILL_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_Q_LEN_FIELD_NUMBER: _ClassVar[int]
    is_prefill: bool
    batch_size: int
    num_tokens: int
    max_q_len: int
    def __init__(self, is_prefill: _Optional[bool] = ..., batch_size: _Optional[int] = ..., num_tokens: _Optional[int] = ..., max_q_len: _Optional[int] = ...) -> None: ...

class GraphKey(_message.Message):
    __slots__ = ("kind", "num_tokens", "graph_bs", "max_q_len", "shares_prefixes", "skips_adapters")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAPH_BS_FIELD_NUMBER: _ClassVar[int]
    MAX_Q_LEN_FIELD_NUMBER: _ClassVar[int]
    SHARES_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    SKIPS_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    kind: GraphKind
    num_tokens: int
    graph_bs: int
    max_q_len: int
    shares_prefixes: bool
    skips_adapters: bool
    def __init__(self, kind: _Optional[_Union[GraphKind, str]] = ..., num_tokens: _Optional[int] = ..., graph_bs: _Optional[int] = ..., max_q_len: _Optional[int] = ..., shares_prefixes: _Optional[bool] = ..., skips_adapters: _Optional[bool] = ...) -> None: ...

class AttentionMetadata(_message.Message):
    __slots__ = ("query_start_loc", "seq_lens", "row_ids", "max_seqlen_q", "max_seqlen_k", "block_table_updates", "shared_prefixes")
    QUERY_START_LOC_FIELD_NUMBER: _ClassVar[int]
    SEQ_LENS_FIELD_NUMBER: _ClassVar[int]
    ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQLEN_Q_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQLEN_K_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLE_UPDATES_FIELD_NUMBER: _ClassVar[int]
    SHARED_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    query_start_loc: bytes
    seq_lens: bytes
    row_ids: bytes
    max_seqlen_q: int
    max_seqlen_k: int
    block_table_updates: BlockTableUpdates
    shared_prefixes: SharedPrefixes
    def __init__(self, query_start_loc: _Optional[bytes] = ..., seq_lens: _Optional[bytes] = ..., row_ids: _Optional[bytes] = ..., max_seqlen_q: _Optional[int] = ..., max_seqlen_k: _Optional[int] = ..., block_table_updates: _Optional[_Union[BlockTableUpdates, _Mapping]] = ..., shared_prefixes: _Optional[_Union[SharedPrefixes, _Mapping]] = ...) -> None: ...

class SharedPrefixes(_message.Message):
    __slots__ = ("requests", "counts", "num_blocks")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    requests: bytes
    counts: bytes
    num_blocks: bytes
    def __init__(self, requests: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., num_blocks: _Optional[bytes] = ...) -> None: ...

class BlockTableUpdates(_message.Message):
    __slots__ = ("rows", "offsets", "counts", "block_ids")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    offsets: bytes
    counts: bytes
    block_ids: bytes
    def __init__(self, rows: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ...) -> None: ...

class StateMetadata(_message.Message):
    __slots__ = ("saved_from", "saved_to", "restored_from", "restored_to")
    SAVED_FROM_FIELD_NUMBER: _ClassVar[int]
    SAVED_TO_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FROM_FIELD_NUMBER: _ClassVar[int]
    RESTORED_TO_FIELD_NUMBER: _ClassVar[int]
    saved_from: bytes
    saved_to: bytes
    restored_from: bytes
    restored_to: bytes
    def __init__(self, saved_from: _Optional[bytes] = ..., saved_to: _Optional[bytes] = ..., restored_from: _Optional[bytes] = ..., restored_to: _Optional[bytes] = ...) -> None: ...

class BlockCopies(_message.Message):
    __slots__ = ("stored_from", "stored_to", "loaded_from", "loaded_to", "stored_entries", "read_entries", "read_to")
    STORED_FROM_FIELD_NUMBER: _ClassVar[int]
    STORED_TO_FIELD_NUMBER: _ClassVar[int]
    LOADED_FROM_FIELD_NUMBER: _ClassVar[int]
    LOADED_TO_FIELD_NUMBER: _ClassVar[int]
    STORED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    READ_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    READ_TO_FIELD_NUMBER: _ClassVar[int]
    stored_from: bytes
    stored_to: bytes
    loaded_from: bytes
    loaded_to: bytes
    stored_entries: bytes
    read_entries: bytes
    read_to: bytes
    def __init__(self, stored_from: _Optional[bytes] = ..., stored_to: _Optional[bytes] = ..., loaded_from: _Optional[bytes] = ..., loaded_to: _Optional[bytes] = ..., stored_entries: _Optional[bytes] = ..., read_entries: _Optional[bytes] = ..., read_to: _Optional[bytes] = ...) -> None: ...

class SamplingMetadata(_message.Message):
    __slots__ = ("sample_indices", "all_greedy", "needs_logit_edits", "needs_logprobs", "grammar_rows", "grammar_masks", "prompt_logprob_requests", "num_prompt_logprobs", "last_token_ids")
    SAMPLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    ALL_GREEDY_FIELD_NUMBER: _ClassVar[int]
    NEEDS_LOGIT_EDITS_FIELD_NUMBER: _ClassVar[int]
    NEEDS_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_ROWS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_MASKS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROB_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LAST_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sample_indices: bytes
    all_greedy: bool
    needs_logit_edits: bool
    needs_logprobs: bool
    grammar_rows: bytes
    grammar_masks: bytes
    prompt_logprob_requests: bytes
    num_prompt_logprobs: int
    last_token_ids: bytes
    def __init__(self, sample_indices: _Optional[bytes] = ..., all_greedy: _Optional[bool] = ..., needs_logit_edits: _Optional[bool] = ..., needs_logprobs: _Optional[bool] = ..., grammar_rows: _Optional[bytes] = ..., grammar_masks: _Optional[bytes] = ..., prompt_logprob_requests: _Optional[bytes] = ..., num_prompt_logprobs: _Optional[int] = ..., last_token_ids: _Optional[bytes] = ...) -> None: ...

class RowAssignment(_message.Message):
    __slots__ = ("row", "token_ids", "num_prompt_tokens", "sampling", "images", "adapter_slot")
    ROW_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SLOT_FIELD_NUMBER: _ClassVar[int]
    row: int
    token_ids: bytes
    num_prompt_tokens: int
    sampling: RowSampling
    images: _containers.RepeatedCompositeFieldContainer[RowImage]
    adapter_slot: int
    def __init__(self, row: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[RowSampling, _Mapping]] = ..., images: _Optional[_Iterable[_Union[RowImage, _Mapping]]] = ..., adapter_slot: _Optional[int] = ...) -> None: ...

class AdapterLoad(_message.Message):
    __slots__ = ("slot", "digest")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    slot: int
    digest: bytes
    def __init__(self, slot: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class RowImage(_message.Message):
    __slots__ = ("offset", "num_tokens", "grid", "digest")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    offset: int
    num_tokens: int
    grid: _containers.RepeatedScalarFieldContainer[int]
    digest: bytes
    def __init__(self, offset: _Optional[int] = ..., num_tokens: _Optional[int] = ..., grid: _Optional[_Iterable[int]] = ..., digest: _Optional[bytes] = ...) -> None: ...

class StepImage(_message.Message):
    __slots__ = ("request", "image", "pages")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    request: int
    image: int
    pages: bytes
    def __init__(self, request: _Optional[int] = ..., image: _Optional[int] = ..., pages: _Optional[bytes] = ...) -> None: ...

class EncodedImage(_message.Message):
    __slots__ = ("patches", "grid", "pages", "place")
    PATCHES_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    patches: bytes
    grid: _containers.RepeatedScalarFieldContainer[int]
    pages: bytes
    place: PatchPlace
    def __init__(self, patches: _Optional[bytes] = ..., grid: _Optional[_Iterable[int]] = ..., pages: _Optional[bytes] = ..., place: _Optional[_Union[PatchPlace, _Mapping]] = ...) -> None: ...

class PatchPlace(_message.Message):
    __slots__ = ("begin", "num_bytes")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    begin: int
    num_bytes: int
    def __init__(self, begin: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class RowSampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "bias_token_ids", "bias_values", "end_token_ids", "min_tokens", "num_logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    bias_token_ids: bytes
    bias_values: bytes
    end_token_ids: bytes
    min_tokens: int
    num_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., bias_token_ids: _Optional[bytes] = ..., bias_values: _Optional[bytes] = ..., end_token_ids: _Optional[bytes] = ..., min_tokens: _Optional[int] = ..., num_logprobs: _Optional[int] = ...) -> None: ...

class SpecDecodeMetadata(_message.Message):
    __slots__ = ("draft_token_ids", "num_spec_steps", "num_draft_tokens", "num_next_drafts", "carried_requests")
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPEC_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEXT_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    CARRIED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    draft_token_ids: bytes
    num_spec_steps: int
    num_draft_tokens: bytes
    num_next_drafts: int
    carried_requests: bytes
    def __init__(self, draft_token_ids: _Optional[bytes] = ..., num_spec_steps: _Optional[int] = ..., num_draft_tokens: _Optional[bytes] = ..., num_next_drafts: _Optional[int] = ..., carried_requests: _Optional[bytes] = ...) -> None: ...

class DPMetadata(_message.Message):
    __slots__ = ("num_tokens_across_dp", "num_sampling_across_dp")
    NUM_TOKENS_ACROSS_DP_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLING_ACROSS_DP_FIELD_NUMBER: _ClassVar[int]
    num_tokens_across_dp: bytes
    num_sampling_across_dp: bytes
    def __init__(self, num_tokens_across_dp: _Optional[bytes] = ..., num_sampling_across_dp: _Optional[bytes] = ...) -> None: ...

class EncoderRun(_message.Message):
    __slots__ = ("graph_key", "is_compiled", "num_images", "num_patches")
    GRAPH_KEY_FIELD_NUMBER: _ClassVar[int]
    IS_COMPILED_FIELD_NUMBER: _ClassVar[int]
    NUM_IMAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_PATCHES_FIELD_NUMBER: _ClassVar[int]
    graph_key: GraphKey
    is_compiled: bool
    num_images: int
    num_patches: int
    def __init__(self, graph_key: _Optional[_Union[GraphKey, _Mapping]] = ..., is_compiled: _Optional[bool] = ..., num_images: _Optional[int] = ..., num_patches: _Optional[int] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step_id", "token_ids", "logprobs", "num_top_logprobs", "top_token_ids", "top_logprobs", "elapsed_us", "fallback_reason", "num_accepted_tokens", "draft_token_ids", "failure", "num_collectives", "drafted_by_graph", "prompt_logprobs", "block_copy_us", "across_dp", "num_prompt_top_logprobs", "prompt_top_token_ids", "prompt_top_logprobs", "pooled", "encoder_run")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_US_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    NUM_COLLECTIVES_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_BY_GRAPH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COPY_US_FIELD_NUMBER: _ClassVar[int]
    ACROSS_DP_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    ENCODER_RUN_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    token_ids: bytes
    logprobs: bytes
    num_top_logprobs: int
    top_token_ids: bytes
    top_logprobs: bytes
    elapsed_us: int
    fallback_reason: FallbackReason
    num_accepted_tokens: bytes
    draft_token_ids: bytes
    failure: StepFailure
    num_collectives: int
    drafted_by_graph: bool
    prompt_logprobs: bytes
    block_copy_us: int
    across_dp: _containers.RepeatedCompositeFieldContainer[StepResult]
    num_prompt_top_logprobs: int
    prompt_top_token_ids: bytes
    prompt_top_logprobs: bytes
    pooled: bytes
    encoder_run: EncoderRun
    def __init__(self, step_id: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., num_top_logprobs: _Optional[int] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ..., elapsed_us: _Optional[int] = ..., fallback_reason: _Optional[_Union[FallbackReason, str]] = ..., num_accepted_tokens: _Optional[bytes] = ..., draft_token_ids: _Optional[bytes] = ..., failure: _Optional[_Union[StepFailure, str]] = ..., num_collectives: _Optional[int] = ..., drafted_by_graph: _Optional[bool] = ..., prompt_logprobs: _Optional[bytes] = ..., block_copy_us: _Optional[int] = ..., across_dp: _Optional[_Iterable[_Union[StepResult, _Mapping]]] = ..., num_prompt_top_logprobs: _Optional[int] = ..., prompt_top_token_ids: _Optional[bytes] = ..., prompt_top_logprobs: _Optional[bytes] = ..., pooled: _Optional[bytes] = ..., encoder_run: _Optional[_Union[EncoderRun, _Mapping]] = ...) -> None: ...
