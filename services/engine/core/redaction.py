"""Steps as clients may see them who may not read texts."""

from services.engine.batch import BatchDescriptor, StepResult


def redacted(descriptor: BatchDescriptor, result: StepResult) -> tuple[BatchDescriptor, StepResult]:
    """Returns copies of a step without token ids, for clients that may not read texts."""
    shown, shown_result = BatchDescriptor(), StepResult()
    shown.CopyFrom(descriptor)
    shown_result.CopyFrom(result)
    for assignment in shown.row_assignments:
        assignment.ClearField("token_ids")
        assignment.sampling.ClearField("bias_token_ids")
        assignment.sampling.ClearField("end_token_ids")
        for row_image in assignment.images:
            row_image.ClearField("digest")
    for image in shown.encoded_images:
        image.ClearField("patches")
    if shown.HasField("spec_decode_metadata"):
        shown.spec_decode_metadata.ClearField("draft_token_ids")
    shown.sampling.ClearField("last_token_ids")
    if shown.HasField("block_copies"):  # equal names are equal prompts
        shown.block_copies.ClearField("stored_entries")
        shown.block_copies.ClearField("read_entries")
    shown.sampling.ClearField("grammar_rows")  # they reveal the caller's grammar
    shown.sampling.ClearField("grammar_masks")
    shown_result.ClearField("token_ids")
    shown_result.ClearField("pooled")  # texts can be recovered from vectors
    shown_result.ClearField("top_token_ids")
    shown_result.ClearField("prompt_top_token_ids")
    shown_result.ClearField("draft_token_ids")
    return shown, shown_result
