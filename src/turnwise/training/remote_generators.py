"""The generator servers of a run from its settings: are they there, do they have the run's model, and which generator uses them.

``check_generators`` needs no torch and answers at once; what needs the model is compared when the run builds its engines.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.config.settings import Settings
from turnwise.engines.remote.device_weights import DeviceWeights, check_device_weights, cuda_device
from turnwise.engines.remote.http import ServerAddress
from turnwise.engines.remote.replica import FILES, IPC, MASK_OPTIONS, NCCL, OURS, VLLM, RemoteLimits, Replica
from turnwise.engines.remote.token_wire import Reported
from turnwise.errors import ServerFault, SettingError
from turnwise.models.fetch import resolve
from turnwise.training.interrupt import run_async

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from turnwise.engines.remote.remote_generator import RemoteGenerator
    from turnwise.rollout.renderer import Renderer

OWN_PROCESS = ("local",)  # --generator local: no server, a process of the run's own
COMPARED = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
OF_TINY = ("env", "difficulty", "max_turns", "vocabulary", "hidden", "layers", "seed")
PATIENCE = 300.0  # seconds in which a cluster must start a generator again
SENTENCE = "Three apples cost 2.50 dollars; how much do 12 cost?\n"


def make_replicas(settings: Settings) -> list[Replica]:
    """The servers that the settings name. Refuses addresses that are none, or that occur twice."""
    client, backend = _client_name(settings), weight_backend(settings)
    addresses = []
    for url in settings.generator:
        if "://" in url and url.partition("://")[2].strip("/"):
            url = url.removesuffix("/").removesuffix("/v1")  # which other clients of such a server are given
        addresses.append(ServerAddress.read(url, settings.generator_key_env, "generator", ", or local", path=""))
    urls = [address.url for address in addresses]
    if twice := next((url for url in urls if urls.count(url) > 1), ""):
        raise SettingError(f"--generator names {twice} twice; name every server once")
    replicas = [Replica(address, client, settings.generator_seconds, backend) for address in addresses]
    for replica in replicas:
        replica.run = str((Path(settings.out) / settings.name).resolve()) if settings.name else ""
    return replicas


def weight_backend(settings: Settings) -> str:
    """How weights reach servers of vLLM. A folder that has the name of a way is written ./nccl."""
    return settings.generator_weights if settings.generator_weights in (NCCL, IPC) else FILES


def _client_name(settings: Settings) -> str:
    """Names this run to its servers."""
    return f"{settings.name or 'run'}-{uuid.uuid4().hex[:12]}"


# -------------------------------------------------------------------- at once


def check_generators(settings: Settings, on_gpu: bool = False) -> None:
    """Refuse servers that are not there, that want another token, or that plainly have another model. ``on_gpu``: whether the
    run may learn on a GPU."""
    urls, wrong = [address for address in settings.generator if address not in OWN_PROCESS], ""
    if (backend := weight_backend(settings)) != FILES:
        check_device_weights(backend, urls, settings.ranks, on_gpu)
    elif settings.generator_weights and not urls and not settings.cluster:
        wrong = (
            f"-weights {settings.generator_weights} is a folder for servers, and --generator names none; name one "
            '(--generator http://HOST:PORT), or write --generator-weights ""'
        )
    if settings.generator and settings.opponents.kind == "past":
        wrong = wrong or " cannot sample for older policies; write --opponents self, or leave --generator out"
    if urls and len(urls) < len(settings.generator):
        wrong = wrong or " local is a process of this run and cannot be mixed with servers; name one or the other"
    if wrong:
        raise SettingError(f"--generator{wrong}")

    async def ask() -> None:
        for replica in make_replicas(settings):
            await replica.identify()
            replica.refuse_backend()
            for compare in (_other_cache, _other_model, _short_context):
                _refuse(replica, compare(settings, replica))
            _refuse(replica, await _other_sampling(settings, replica))

    if urls:
        run_async(ask())


def _refuse(replica: Replica, what: str) -> None:
    """Each comparison below says what is wrong with a server, and what to write instead; nothing where it fits."""
    if what:
        raise SettingError(f"--generator {replica.url}{what}")


def _other_cache(settings: Settings, replica: Replica) -> str:
    """A layout of the KV cache that the server does not have: it was chosen when the server was started."""
    wanted, name = settings.model.cache, settings.model.name
    if not wanted or (replica.kind == OURS and replica.facts.get("cache") == wanted):
        return ""
    if replica.kind == VLLM:
        return f" is vLLM, whose KV cache a run cannot lay out; leave cache={wanted} out: --model {name}"
    start = f"start it with turnwise serve {name},cache={wanted}, or let it choose: --model {name}"
    return f" was not started with cache={wanted}; {start}"


def _short_context(settings: Settings, replica: Replica) -> str:
    """A server that reads fewer ids than a dialogue of the run may have: attaching to it would fail, after the cold start."""
    offered = replica.facts.get("offered") or {}
    longest = replica.facts.get("max_model_len") if replica.kind == VLLM else offered.get("context")
    if not isinstance(longest, int) or longest >= settings.context:
        return ""
    start = "vLLM with --max-model-len" if replica.kind == VLLM else "the server with --context"
    return (
        f": it reads {longest} ids, and the run needs {settings.context}; write --context {longest}, or start {start} "
        f"{settings.context}"
    )


async def _other_sampling(settings: Settings, replica: Replica) -> str:
    """A vLLM server whose log-probabilities are not those of what the run samples from: that is an option of its start."""
    if replica.kind != VLLM:
        return ""
    s, filtered = settings, bool(settings.top_p != 1 or settings.top_k or settings.min_p)
    try:
        answers = await replica.examine_sampling()
    except ServerFault as fault:
        return f": {fault}"
    if replica.reported is Reported.WITH_MASK and not filtered:
        return (
            " is vLLM with --return-sampling-mask, and would list the whole vocabulary with every token of a run without "
            "filters; start it without that option, or write --top-k, --top-p or --min-p"
        )
    if s.temperature == 1 and not filtered:
        return ""
    if not answers:
        left = "as a run leaves it that is killed while it publishes"
        return f" is vLLM and paused, {left}; write: curl -X POST {replica.url}/resume"
    if s.temperature == 0:
        return " is vLLM, which reports no log-probabilities of greedy tokens; write a positive --temperature"
    if filtered and replica.reported is not Reported.WITH_MASK:
        return (
            " is vLLM, and does not say which ids --top-p, --top-k and --min-p keep, so ratios would not be exact; start it with "
            f"{MASK_OPTIONS}, leave these settings out, or use `turnwise serve`"
        )
    if replica.reported is Reported.RAW:
        return (
            f" is vLLM, whose log-probabilities are {replica.reported.value}, and the run has --temperature {s.temperature:g}; "
            "start it with --logprobs-mode processed_logprobs, or write --temperature 1"
        )
    return ""


def _other_model(settings: Settings, replica: Replica) -> str:
    """What the files of the model say otherwise than the server."""
    theirs = replica.facts
    if replica.kind == VLLM:
        return ""
    if settings.model.tiny:
        made = theirs.get("tiny") or {}
        ours = json.loads(
            json.dumps({name: getattr(settings, name) for name in OF_TINY[:-1]})
        )  # as JSON has it: no tuples
        name = next((name for name in ours if name in made and made[name] != ours[name]), "")
        texts = {
            key: ",".join(map(str, v)) if isinstance(v, list) else v for key, v in ours.items() if key in ("env", name)
        }
        words = " ".join(f"--{key.replace('_', '-')} {text}" for key, text in texts.items())
        return name and (
            f" serves a tiny model with {name} {made[name]!r}, and the run has {ours[name]!r}; start it with the run's settings: "
            f"turnwise serve tiny {words}"
        )
    folder = Path(resolve(settings.model.name))
    ours, config = _json(folder / "config.json"), theirs.get("config") or {}
    for name in COMPARED:
        if name in ours and name in config and ours[name] != config[name]:
            return (
                f" serves {replica.model} with {name} {config[name]}, and {settings.model} has {ours[name]}; start it with the "
                f"run's model: turnwise serve {settings.model}"
            )
    tokenizer = _json(folder / "tokenizer.json")
    listed = (tokenizer.get("model") or {}).get("vocab")
    if not isinstance(listed, dict) or not listed:
        return ""  # a kind of tokenizer that does not list its vocabulary by name
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    return _other_vocabulary(settings, replica, {**listed, **added})


def _other_vocabulary(settings: Settings, replica: Replica, vocabulary: Mapping[str, int]) -> str:
    theirs = replica.facts.get("tokenizer")
    if not theirs or theirs == vocabulary_digest(vocabulary):
        return ""
    return (
        f" serves {replica.model}, whose tokenizer differs from that of {settings.model}: the same ids would be other texts; "
        f"start it with the run's model: turnwise serve {settings.model}"
        + (f" --env {settings.env}" if settings.model.tiny else "")
    )


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """A digest of all tokens and their ids."""
    rows = json.dumps(sorted(vocabulary.items(), key=lambda item: (item[1], item[0])))
    return hashlib.sha256(rows.encode()).hexdigest()


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


# -------------------------------------------------------------------- factory


def make_remote_generator(
    settings: Settings,
    model: PreTrainedModel,
    renderer: Renderer,
    deterministic: bool,
    slots: int,
    tolerance: float,
    threads: int,
    tell: Callable[[str], None],
    find: Callable[[], Sequence[ServerAddress]] | None = None,
    wanted: int = 0,
) -> RemoteGenerator:
    """A generator over the servers of the settings, connected and compared with the run's model; or over those that ``find``
    names at any time: a cluster starts them from the settings of the run, and ``wanted`` of them are waited for."""
    from turnwise.engines.remote.remote_generator import Directory, PolicyProbe, RemoteGenerator
    from turnwise.engines.remote.weight_files import WeightFolder

    limits = RemoteLimits(slots, settings.context, tuple(renderer.stop_ids), deterministic, threads)
    vocabulary = renderer.tokenizer.get_vocab()
    probe = PolicyProbe(model, min(len(vocabulary), model.config.get_text_config().vocab_size), tolerance)
    backend = weight_backend(settings)
    folder = WeightFolder(settings.generator_weights if backend == FILES else "")  # adapters are files in any case
    if find is not None:
        client = _client_name(settings)

        def make(address: ServerAddress) -> Replica:
            replica = Replica(address, client, settings.generator_seconds)
            replica.run = "of this cluster"  # whose generators serve no other
            return replica

        directory = Directory(find, make, PATIENCE)
        elastic = RemoteGenerator([], limits, folder, probe, renderer.decode, tell, directory)
        run_async(elastic.join(wanted))
        return elastic
    generator = RemoteGenerator(make_replicas(settings), limits, folder, probe, renderer.decode, tell)
    if backend != FILES:
        device, turn = cuda_device(backend, settings.device), asyncio.Lock()
        for replica in generator.replicas:
            replica.device_weights = DeviceWeights(backend, device, turn)
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    gone = dict[Replica, str]()

    async def connect() -> None:
        for replica in generator.replicas:
            if reason := await _why_gone(replica):
                gone[replica] = reason
            elif replica.kind == OURS:
                _refuse(replica, _other_vocabulary(settings, replica, vocabulary))
                theirs = replica.facts.get("weights") or {}
                for name in sorted(name for name in {*shapes, *theirs} if shapes.get(name) != theirs.get(name)):
                    other = f"its weight {name} has the shape {theirs.get(name)}, the run's {shapes.get(name)}"
                    _refuse(replica, f" serves {replica.model}, which is another model: {other}")
            else:
                _refuse(replica, await _other_sampling(settings, replica) or _short_context(settings, replica))
                _refuse(replica, await _other_ids(settings, replica, renderer))
        await generator.attach(gone)

    run_async(connect())
    return generator


async def _why_gone(replica: Replica) -> str:
    """Identify a server that answered at the door; why it no longer does, if it has died since: that is survived, as later on."""
    try:
        await replica.identify()
    except SettingError as fault:
        if not isinstance(fault.__context__, ServerFault):  # it is there, and not what it was
            raise
        return str(fault.__context__)
    return ""


async def _other_ids(settings: Settings, replica: Replica, renderer: Renderer) -> str:
    """A vLLM server lists no vocabulary: a sentence shows whether its tokenizer is another one."""
    try:
        body = {"model": replica.model, "prompt": SENTENCE, "add_special_tokens": False}
        value = (await replica.pool.call("/tokenize", body, 10.0)).json()
    except ServerFault as fault:
        return f": {fault}"
    tokens = value.get("tokens") if isinstance(value, dict) else None
    if not isinstance(tokens, list) or tokens == renderer.encode(SENTENCE):
        return ""
    ids = f"whose tokenizer gives other ids than that of {settings.model}"
    return f" serves {replica.model}, {ids}; start it with the run's model"
