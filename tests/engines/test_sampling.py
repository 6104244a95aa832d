"""Sampling alone: frequencies, supports, mass, random numbers."""

from __future__ import annotations

import torch

from turnwise.core.records import Sampling
from turnwise.engines.kernels.sampling import TokenSampler, signed, uniforms

CPU = torch.device("cpu")


def draw(logits: torch.Tensor, sampling: Sampling, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    u = uniforms(torch.tensor(11), torch.arange(n))
    token, logp, mass = TokenSampler([sampling] * n, CPU)(logits.expand(n, -1), u)
    return token, logp, torch.zeros(n) if mass is None else mass


def test_uniforms_are_uniform_and_depend_on_both_arguments():
    u = uniforms(torch.arange(100)[:, None], torch.arange(1000))
    assert u.dtype == torch.float64 and u.min() >= 0 and u.max() < 1
    assert u.unique().numel() == u.numel()
    counts = torch.histc(u, 50, 0, 1)
    chi2 = ((counts - 2000) ** 2 / 2000).sum()
    assert chi2 < 100  # 49 degrees of freedom: mean 49, std 10
    for a, b in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:])):  # neighbouring seeds, neighbouring positions
        assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 0.02


def test_any_seed_fits():
    assert signed(2**64 - 1) == -1 and signed(5) == 5 and signed(-5) == -5 and signed(2**63) == -(2**63)


def test_frequencies_match_the_distribution():
    torch.manual_seed(0)
    logits, n = 1.5 * torch.randn(1, 24), 60_000
    token, logp, mass = draw(logits, Sampling(temperature=0.7), n)
    p = (logits / 0.7).softmax(-1)[0]
    chi2 = ((torch.bincount(token, minlength=24) - n * p) ** 2 / (n * p)).sum()
    assert chi2 < 60  # 23 degrees of freedom
    torch.testing.assert_close(logp, p.log()[token])
    assert not mass.any()


def support(sampling: Sampling, p: list[float]) -> tuple[set[int], torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.tensor([p], dtype=torch.float64).log()
    token, logp, mass = draw(logits, sampling, 4000)
    return set(token.tolist()), token, logp, mass


def test_truncation_keeps_exactly_what_it_says():
    p = [0.05, 0.4, 0.1, 0.3, 0.15]
    cases = [
        (Sampling(top_k=2), {1, 3}, 0.7),
        (Sampling(top_p=0.65), {1, 3}, 0.7),
        (Sampling(top_p=0.75), {1, 3, 4}, 0.85),
        (Sampling(min_p=0.3), {1, 3, 4}, 0.85),
        (Sampling(top_k=4, top_p=0.88), {1, 3, 4}, 0.85),  # 0.88 of the 0.95 that top-k leaves
        (Sampling(top_k=1), {1}, 0.4),
        (Sampling(top_p=1e-9), {1}, 0.4),
        (Sampling(), {0, 1, 2, 3, 4}, 1.0),
    ]
    for sampling, kept, mass in cases:
        seen, token, logp, got = support(sampling, p)
        assert seen == kept, sampling
        torch.testing.assert_close(got.double(), torch.full_like(got, mass).double().log(), atol=1e-6, rtol=0)
        expected = torch.tensor(p, dtype=torch.float64)[token].log() - torch.tensor(mass, dtype=torch.float64).log()
        torch.testing.assert_close(logp.double(), expected, atol=1e-6, rtol=0)


def test_ties_do_not_widen_top_k():
    assert len(support(Sampling(top_k=2), [0.25] * 4)[0]) == 2


def test_greedy_reports_the_temperature_one_logp():
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(1))
    token, logp, mass = TokenSampler([Sampling(temperature=0, top_k=3)] * 3, CPU)(logits, torch.rand(3).double())
    assert token.tolist() == logits.argmax(-1).tolist() and mass is None
    torch.testing.assert_close(logp, logits.log_softmax(-1).max(-1).values)


def test_a_row_ignores_its_neighbours():
    torch.manual_seed(0)
    kinds = [{}, {"temperature": 0}, {"top_k": 5}, {"temperature": 0.5, "top_p": 0.8}, {"min_p": 0.1}]
    samplings = [Sampling(**kind) for kind in kinds] * 40
    logits, u = torch.randn(200, 50), uniforms(torch.arange(200), torch.tensor(3))
    token, logp, mass = TokenSampler(samplings, CPU)(logits, u)
    assert mass is not None
    for i in range(200):
        t, lp, m = TokenSampler(samplings[i : i + 1], CPU)(logits[i : i + 1], u[i : i + 1])
        assert t[0] == token[i]
        torch.testing.assert_close(lp[0], logp[i])
        torch.testing.assert_close(torch.zeros(()) if m is None else m[0], mass[i])


def test_half_precision_logits_are_drawn_in_float():
    logits = torch.randn(2, 9).bfloat16()
    _, logp, _ = TokenSampler([Sampling()] * 2, CPU)(logits, torch.tensor([0.2, 0.9]).double())
    assert logp.dtype == torch.float32
