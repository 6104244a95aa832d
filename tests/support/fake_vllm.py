"""Stand-ins for ``vllm serve``. ``FakeVllm`` has ``--enable-lora`` with runtime updating: the two calls as vLLM documents them,
each adapter over its own copy of the base. Loading reads a PEFT folder from disk; requests name an adapter or the base.
``SamplingVllm`` reports log-probabilities as the options of vLLM's start say."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from support.generator_servers import make_host
from turnwise.serve.app import make_generate_app


def failed(status, message):
    return JSONResponse({"error": {"message": message, "type": "BadRequestError", "code": status}}, status_code=status)


class FakeVllm:
    """``make_base`` makes the model that the server was started with. ``slots``: as ``--max-loras``."""

    def __init__(self, make_base, slots=2, max_rank=16):
        self.make_base, self.slots, self.max_rank = make_base, slots, max_rank
        self.apps, self.most, self.asked, self.calls = {}, 0, [], []
        self.app = Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/health", lambda request: Response()),
                Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
                Route("/inference/v1/generate", self.generate, methods=["POST"]),
            ]
        )

    async def models(self, request: Request):
        return JSONResponse({"data": [{"id": "base", "max_model_len": 128}]})

    async def load(self, request: Request):
        body = await request.json()
        name, path = body.get("lora_name"), body.get("lora_path")
        if not name or not path:
            return failed(400, "Both 'lora_name' and 'lora_path' must be provided.")
        if name in self.apps:
            return failed(400, f"The lora adapter '{name}' has already been loaded.")
        config = json.loads((Path(path) / "adapter_config.json").read_text())
        if config["r"] > self.max_rank:
            return failed(400, f"LoRA rank {config['r']} is greater than max_lora_rank {self.max_rank}.")
        model, tensors = self.make_base(), load_file(Path(path) / "adapter_model.safetensors")
        weights = dict(model.named_parameters())
        for key in [key for key in tensors if ".lora_A." in key]:
            target = weights[key.removeprefix("base_model.model.").replace(".lora_A.", ".")]
            scale = config["lora_alpha"] / config["r"]
            target.data += tensors[key.replace(".lora_A.", ".lora_B.")] @ tensors[key] * scale
        self.apps[name] = make_generate_app(make_host(model, slots=4))
        self.most = max(self.most, len(self.apps))
        self.calls.append(("load", name))
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request):
        name = (await request.json()).get("lora_name")
        if self.apps.pop(name, None) is None:
            return failed(404, f"The lora adapter '{name}' cannot be found.")
        self.calls.append(("unload", name))
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")

    async def generate(self, request: Request):
        body = await request.body()
        name = json.loads(body)["model"]
        self.asked.append(name)
        if name not in self.apps:
            return failed(404, f"The model `{name}` does not exist.")
        app = self.apps[name]

        async def run(scope, receive, send):
            messages = [{"type": "http.request", "body": body, "more_body": False}]

            async def replay():
                return messages.pop() if messages else await receive()

            await app(scope, replay, send)

        return run


class SamplingVllm:
    """One of our servers with what vLLM says of its sampling. ``processed``: as ``--logprobs-mode processed_logprobs``; else
    log-probabilities are those of the whole vocabulary at temperature 1, which this stand-in knows at that temperature alone.
    ``mask``: as ``--return-sampling-mask``, with which vLLM 0.32 answers 500 without top-k and at temperature 0."""

    def __init__(self, mask=False, processed=False, paused=False):
        self.mask, self.processed, self.paused, self.asked = mask, processed, paused, []

    def __call__(self, app):
        routes = {
            "/v1/models": {"data": [{"id": "base", "max_model_len": 128}]},
            "/is_paused": {"is_paused": self.paused},
        }

        async def front(scope, receive, send):
            path = scope["path"]
            if path in routes:
                await JSONResponse(routes[path])(scope, receive, send)
            elif path.startswith(("/turnwise/", "/v1/")):
                await failed(404, "Not Found")(scope, receive, send)
            elif path == "/inference/v1/generate":
                await (await self._generate(app, scope, receive))(scope, receive, send)
            else:
                await app(scope, receive, send)

        return front

    async def _generate(self, app, scope, receive):
        body = await Request(scope, receive).json()
        params = body["sampling_params"]
        self.asked.append(params)
        if self.mask and (params["top_k"] <= 0 or params["temperature"] <= 0):
            return failed(500, "")
        params["sampling_mask"] = True
        out = await self._answer(app, scope, receive, json.dumps(body).encode())
        for choice in out.get("choices", ()):
            ours, rows = choice.pop("turnwise"), choice["logprobs"]["content"]
            if not self.processed:
                for row, mass in zip(rows, ours.get("mass") or [0.0] * len(rows)):
                    row["logprob"] += mass
            if not self.mask:
                choice.pop("sampling_mask", None)
        return JSONResponse(out)

    @staticmethod
    async def _answer(app, scope, receive, body):
        parts, messages = [], [{"type": "http.request", "body": body, "more_body": False}]

        async def replay():
            return messages.pop() if messages else await receive()

        async def keep(message):
            parts.append(message.get("body", b""))

        await app(scope, replay, keep)
        return json.loads(b"".join(parts))
