"""What vLLM says of its sampling: which log-probabilities it reports, and the ids that its filters kept. The server is a
stand-in; ``make vllm`` runs a real one."""

from __future__ import annotations

import pytest
import torch
from support.dialogues import run
from support.generators import make
from support.prompting import prompts

from turnwise.config.settings import Settings
from turnwise.core.records import Sampling
from turnwise.engines.remote.token_wire import EVERY_ID, Reported, sampling_params
from turnwise.errors import GeneratorLost, SettingError
from turnwise.training.remote_generators import check_generators

kit = pytest.importorskip("support.generator_servers")
from support.fake_vllm import SamplingVllm  # noqa: E402

FILTERS = [
    Sampling(top_p=0.8, max_tokens=8),
    Sampling(top_k=5, max_tokens=8),
    Sampling(min_p=0.3, max_tokens=8),
    Sampling(temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, max_tokens=8),
]


async def opened(url, model, tolerance=1e-4):
    g = await kit.connected([url], model, tolerance=tolerance)
    for replica in g.replicas:
        assert await replica.examine_sampling()
    await g.publish(kit.weights_of(model), 1)
    return g


def over_kept(model, prompt, done, temperature):
    """log p of the sampled ids, by a softmax over their sets."""
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *done.tokens]])
        rows = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double() / temperature
    sets = [torch.frombuffer(bytearray(row), dtype=torch.int32).long() for row in done.kept]
    return [float(z[t] - z[kept].logsumexp(0)) for z, t, kept in zip(rows, done.tokens, sets, strict=True)]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_log_probabilities_are_those_over_the_ids_that_vllm_kept(sampling):
    model, prompt = make(seed=3), prompts(1)[0]

    async def play(url):
        g = await opened(url, model)
        assert g.replicas[0].reported is Reported.WITH_MASK and g.fatal is None
        return await g.open(1).generate(prompt, sampling)

    with kit.served(model, wrap=SamplingVllm(mask=True, processed=True)) as server:
        done = run(play(server.url))
    assert len(done.kept) == len(done.tokens) == 8 and all(done.kept)
    assert done.logp == pytest.approx(over_kept(model, prompt, done, sampling.temperature), abs=1e-5)


def test_a_server_with_masks_also_answers_greedy_and_unfiltered_requests_and_nothing_is_recorded():
    model, prompt, fake = make(seed=3), prompts(1)[0], SamplingVllm(mask=True, processed=True)

    async def play(url):
        g = await opened(url, model)
        greedy = await g.open(1).generate(prompt, Sampling(temperature=0, top_p=0.5, max_tokens=6))
        return greedy, await g.open(1).generate(prompt, Sampling(max_tokens=6))

    with kit.served(model, wrap=fake) as server:
        greedy, whole = run(play(server.url))
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([[*prompt, *greedy.tokens]])).logits[0, len(prompt) - 1 : -1]
    assert rows.argmax(-1).tolist() == list(greedy.tokens)
    assert not greedy.kept and not whole.kept
    assert [p["top_k"] for p in fake.asked[-2:]] == [1, EVERY_ID]


def test_parameters_stay_as_they_are_for_servers_without_masks():
    greedy, whole = Sampling(temperature=0, top_p=0.5), Sampling(top_p=0.5)
    assert [sampling_params(s, 0, ())["top_k"] for s in (greedy, whole)] == [0, 0]
    assert sampling_params(greedy, 0, ())["temperature"] == 0
    bounded = sampling_params(greedy, 0, (), bounded=True)
    assert (bounded["temperature"], bounded["top_p"], bounded["top_k"]) == (1.0, 1.0, 1)


def test_the_probe_refuses_masks_with_log_probabilities_of_the_whole_vocabulary():
    model = make(seed=3)

    async def play(url):
        return (await opened(url, model)).fatal

    with kit.served(model, wrap=SamplingVllm(mask=True, processed=False)) as server:
        assert "it answers with other weights than version 1" in str(run(play(server.url)))


def test_a_filtered_reply_without_its_mask_loses_the_server():
    model, fake = make(seed=3), SamplingVllm(mask=True, processed=True)

    async def play(url):
        g = await opened(url, model)
        fake.mask = False  # it was started again without the option
        with pytest.raises(GeneratorLost, match="start it with --return-sampling-mask --logprobs-mode processed_log"):
            await g.open(1).generate(prompts(1)[0], FILTERS[0])

    with kit.served(model, wrap=fake) as server:
        run(play(server.url))


RAW, PROCESSED, MASK = {}, {"processed": True}, {"mask": True, "processed": True}


@pytest.mark.parametrize(
    ("started", "settings", "told"),
    [
        (RAW, {}, ""),
        (PROCESSED, {}, ""),
        (PROCESSED, {"temperature": 0.7}, ""),
        (MASK, {"top_p": 0.8}, ""),
        (MASK, {"temperature": 0.7, "min_p": 0.1}, ""),
        (RAW, {"top_p": 0.8}, "which ids --top-p, --top-k and --min-p keep, .* start it with --return-sampling-mask"),
        (PROCESSED, {"top_k": 5}, "start it with --return-sampling-mask --logprobs-mode processed_logprobs"),
        (RAW, {"temperature": 0.7}, "has --temperature 0.7; start it with --logprobs-mode processed_logprobs"),
        (MASK, {}, "would list the whole vocabulary with every token .* start it without that option"),
        (MASK, {"temperature": 0.7}, "start it without that option"),
        (
            MASK,
            {"temperature": 0.0, "top_k": 5},
            "no log-probabilities of greedy tokens; write a positive --temperature",
        ),
        (
            {**MASK, "paused": True},
            {"top_p": 0.8},
            "paused, as a run leaves it .* curl -X POST http://127.0.0.1:.*/resume",
        ),
        ({"paused": True}, {}, ""),  # the first publication ends the pause
    ],
)
def test_what_vllm_was_started_with_is_compared_with_what_the_run_samples(started, settings, told):
    with kit.served(make(seed=3), wrap=SamplingVllm(**started)) as server:
        wanted = Settings(model="tiny", context=64, generator=(server.url,), **settings)
        if not told:
            check_generators(wanted)
            return
        with pytest.raises(SettingError, match=told):
            check_generators(wanted)
