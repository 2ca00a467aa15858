"""Talks to the engine itself with nothing but the generated stubs: token ids in, token ids out.

    octavo serve                                      # in another terminal
    python examples/raw_engine.py 5 17 42

Token ids are those of the served model's tokenizer: `octavo tokenize --ids TEXT` prints some.
This is all that a client in another language needs, too; protos/ holds the contracts.
OCTAVO_ENGINE says where the engine is; 127.0.0.1:50051 if unset.
"""

import argparse
import os

import grpc

from protos.common.v1 import sampling_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc


def main() -> None:
    """Continues the token ids on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("token_ids", type=int, nargs="*", default=[1, 2, 3], metavar="TOKEN_ID")
    prompt = parser.parse_args().token_ids
    address = os.environ.get("OCTAVO_ENGINE", "127.0.0.1:50051")
    # gRPC would follow http_proxy even to this machine.
    is_here = address.rpartition(":")[0] in ("127.0.0.1", "[::1]", "localhost")
    options = [("grpc.enable_http_proxy", int(not is_here))]
    with grpc.insecure_channel(address, options=options) as channel:
        engine = engine_pb2_grpc.EngineServiceStub(channel)
        info = engine.GetModelInfo(engine_pb2.GetModelInfoRequest())
        print(f"{info.model}: {info.architecture}, {info.num_parameters} parameters")
        request = engine_pb2.GenerateRequest(
            prompt_token_ids=prompt,
            sampling=sampling_pb2.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
        )
        for response in engine.Generate(request):
            print(*response.token_ids, end=" ", flush=True)
            if response.HasField("usage"):
                reason = sampling_pb2.FinishReason.Name(response.finish_reason)
                print(f"\n{response.usage.output_tokens} tokens, {reason}")


if __name__ == "__main__":
    main()
