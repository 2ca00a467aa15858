"""vLLM's two calls that change adapters: POST /v1/load_lora_adapter and unload_lora_adapter."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict

from services.frontend.access.caller import Lease
from services.frontend.http.bodies.call import Call
from services.frontend.http.endpoint import Kind, PlainEndpoint
from services.frontend.http.fields.body import TAKEN, Body
from services.frontend.http.fields.parse import parse_body
from services.frontend.http.wire import body as wire_body
from services.frontend.http.wire.writer import ResponseWriter
from services.frontend.pipeline.request import Options

_Name = Annotated[str, Field(min_length=1, max_length=128)]


class LoadAdapterBody(Body):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: _Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: Literal[False] | None = None
    base_model_name: Annotated[str | None, Field(max_length=256)] = None
    """The adapter's model, where several share a card."""
    is_3d_lora_weight: Annotated[bool | None, TAKEN] = None


class UnloadAdapterBody(Body):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: _Name
    lora_int_id: Annotated[int | None, TAKEN] = None


class AdapterAnswer(TypedDict):
    """The adapter that was loaded or removed."""

    object: Literal["adapter"]
    id: str
    status: Literal["loaded", "removed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCall(Call):
    """A parsed body that names an adapter."""

    name: str
    path: str = ""
    base: str = ""


def read_load(body: bytes, request_id: str, *, is_strict: bool = False) -> AdapterCall:
    """Parses a request to load an adapter; see `ReadCall`."""
    request = parse_body(LoadAdapterBody, body, is_strict=is_strict)
    return AdapterCall(
        "",
        Options(request_id=request_id),
        name=request.lora_name,
        path=request.lora_path,
        base=request.base_model_name or "",
    )


def read_unload(body: bytes, request_id: str, *, is_strict: bool = False) -> AdapterCall:
    """Parses a request to remove an adapter; see `ReadCall`."""
    request = parse_body(UnloadAdapterBody, body, is_strict=is_strict)
    return AdapterCall("", Options(request_id=request_id), name=request.lora_name)


LOAD_ADAPTER = Kind("HttpLoadAdapter", "lora-", read_load)
UNLOAD_ADAPTER = Kind("HttpUnloadAdapter", "lora-", read_unload)


class AdapterEndpoint(PlainEndpoint[AdapterCall]):
    """Loads or removes an adapter at all engines, for keys with the operator right."""

    async def read(self, body: wire_body.Body, request_id: str, lease: Lease) -> AdapterCall:
        """Parses a body; raises NotPermittedError first."""
        self.pipeline.gate.check_is_operator()
        return await super().read(body, request_id, lease)

    async def answer(self, call: AdapterCall, writer: ResponseWriter, lease: Lease) -> None:
        """Writes the answer to a parsed request."""
        self.pipeline.gate.check_may_change_adapter(call.name)
        engines = self.pipeline.engine
        status: Literal["loaded", "removed"] = "loaded" if call.path else "removed"
        if call.path:
            await engines.load_adapter(call.name, call.path, model=call.base)
        else:
            await engines.remove_adapter(call.name)
        answer: AdapterAnswer = {"object": "adapter", "id": call.name, "status": status}
        await writer.write(answer)
