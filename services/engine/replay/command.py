"""`python -m services.engine replay`."""

from collections.abc import Callable

from protos.engine.v1.recording_pb2 import EngineSettings
from services.engine.batch import BatchDescriptor, GraphKey
from services.engine.checkpoint.adapter_folder import start_folder
from services.engine.checkpoint.model_folder import config_sha256
from services.engine.config.engine_config import EngineConfig
from services.engine.errors import InvalidRequestError
from services.engine.replay.cache_content import COPIES, BlockNumbers
from services.engine.replay.config import ReplayConfig
from services.engine.replay.image_content import ImageContent
from services.engine.replay.opening import read_opening
from services.engine.replay.orders import Orders
from services.engine.replay.recording import Recording, ReplayError
from services.engine.replay.replayer import Replayer
from services.engine.replay.report import Totals, describe_first, describe_totals
from services.engine.replay.sides import ReplaySettings, Sides
from services.engine.worker.start.loaded_model import LoadedModel


def replay(
    config: ReplayConfig,
    write: Callable[[str], None],
    *,
    load: Callable[[EngineConfig], LoadedModel] = LoadedModel.load,
) -> Totals:
    """Replays a recording.

    Args:
        config: the recording and the tested graphs.
        write: takes the report, some lines at a time.
        load: loads the model.

    Raises:
        ReplayError: the recording or this engine does not allow it.
    """
    recording = Recording.open(config.replay.trace)
    settings = _load(config, recording.snapshot.engine, load)
    limits = settings.loaded.limits
    if recording.is_cut:
        write(f"{config.replay.trace} ends in the middle of a message; what is whole is replayed")
    blocks = BlockNumbers(
        recording.snapshot.engine.num_blocks, table_width=limits.block_table_width
    )
    orders = Orders(config.replay.against, settings.catalogue(), blocks, allows=settings.allows)
    keys = _survey(recording, orders, blocks)
    sides = Sides(settings, num_blocks=blocks.num_blocks, graph_keys=list(keys.values()))
    _read_adapters(config, recording, sides)
    for fault in sides.faults:
        write(fault)
    images = ImageContent(limits, recording.images)
    replayer = Replayer(sides, orders, images, num_blocks=blocks.num_blocks)
    _run(recording, replayer, blocks, write, sides)
    write(describe_totals(replayer.totals, config.replay.against))
    return replayer.totals


def _run(
    recording: Recording,
    replayer: Replayer,
    blocks: BlockNumbers,
    write: Callable[[str], None],
    sides: Sides,
) -> None:
    step_id = 0
    try:
        sides.load_adapters(recording.snapshot.adapters)
        opening = read_opening(recording.snapshot, blocks, limits=replayer.limits)
        replayer.restore(opening.descriptor, opening.num_computed)
        for step in recording.steps():
            step_id = step.descriptor.step_id
            replayer.lose_loaded(step.descriptor)
            if not step.descriptor.context.batch_size:
                continue  # it only copies blocks
            sides.load_adapters(step.descriptor.adapter_loads)
            findings = replayer.replay(step)
            if replayer.totals.first_difference == step_id:
                write(describe_first(findings, (sides.reference.name, sides.tested.name)))
    except ValueError as error:  # the worker refuses a descriptor that contradicts itself
        raise _damage(f"step {step_id}" if step_id else "the snapshot", error) from error


def _damage(place: str, error: ValueError) -> ReplayError:
    return ReplayError(f"{place} of the recording is damaged: {error}")


def _read_adapters(config: ReplayConfig, recording: Recording, sides: Sides) -> None:
    """Reads the adapters of --lora.

    Raises:
        ReplayError: one is bad, or one of the recording is not among them.
    """
    loads = [recording.snapshot.adapters]
    loads += [step.descriptor.adapter_loads for step in recording.steps()]
    needed = {each.digest for some in loads for each in some}
    if not needed:
        return
    try:
        folders = [start_folder(path) for _, path in config.adapters.start_adapters]
    except InvalidRequestError as error:
        raise ReplayError(f"--lora: {error}") from error
    missing = needed - sides.read_adapters(folders)
    if missing:
        raise ReplayError(
            f"steps of the recording use an adapter whose files have the SHA-256 "
            f"{min(missing).hex()}; --lora NAME=PATH must name its folder"
        )


def _survey(recording: Recording, orders: Orders, blocks: BlockNumbers) -> dict[bytes, GraphKey]:
    """Notes a recording's blocks and returns the graphs that its replay needs."""
    for row in recording.snapshot.rows:
        blocks.use(row.block_ids)
        blocks.use(row.state_block_ids)
    keys: dict[bytes, GraphKey] = {}
    for step in recording.steps():
        descriptor: BatchDescriptor = step.descriptor
        blocks.use(descriptor.attn_metadata.block_table_updates.block_ids)
        for name in COPIES:
            blocks.use(getattr(descriptor.state_metadata, name))
        blocks.use(descriptor.block_copies.loaded_to)
        if not descriptor.context.batch_size:
            continue
        try:
            key = orders.graph_key(descriptor)
        except ValueError as error:
            raise _damage(f"step {descriptor.step_id}", error) from error
        if key is not None:
            keys[key.SerializeToString(deterministic=True)] = key
    return keys


def _load(
    config: ReplayConfig, recorded: EngineSettings, load: Callable[[EngineConfig], LoadedModel]
) -> ReplaySettings:
    """Loads the recorded model with the limits of the recorded engine.

    Raises:
        ReplayError: the recording is of another model, or this machine cannot run it.
    """
    if config_sha256(config.checkpoint.model) != recorded.config_sha256:
        raise ReplayError(
            f"the recording is of model {recorded.model} ({recorded.architecture}); "
            f"{config.checkpoint.model} has another config.json. Name its folder with --model"
        )
    try:
        loaded = load(config.engine(recorded))
    except ValueError as error:
        raise ReplayError(str(error)) from error
    return ReplaySettings(against=config.replay.against, loaded=loaded)
