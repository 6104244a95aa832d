"""Hyper-parameters drawn at random for the comparison of a recipe with its oracle: unequal bounds, exponents other than 1.

``DRAWN`` holds, for each method, the settings that its loss or advantage depends on. ``ELSEWHERE`` names the others with the
place that tests them, so that no setting of a compared method is left out by accident.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Strategies = dict[str, st.SearchStrategy[Any]]


def between(low: float, high: float) -> st.SearchStrategy[float]:
    """A number strictly inside the range, away from round values that tie with a ratio of exactly 1."""
    return st.floats(0.0, 1.0).map(lambda x: low + (high - low) * (0.0137 + 0.9726 * x))


CLIP, SHARE, WEIGHT, CAP = between(0.01, 0.7), between(0.05, 0.95), between(0.0, 0.5), between(0.4, 6.0)
DUAL = st.none() | between(1.05, 6.0)
BOUNDS: Strategies = {"low": CLIP, "high": CLIP}
CRITIC: Strategies = {
    "clip": CLIP, "gamma": between(0.5, 1.0), "lam": between(0.0, 1.0), "value_clip": between(0.05, 1.0),
    "value_weight": between(0.1, 2.0),
}  # fmt: skip
WINDOW: Strategies = {"low": between(0.3, 0.97), "high": between(1.03, 3.0)}  # around a ratio of 1

DRAWN: dict[str, Strategies] = {
    "grpo": {"clip": CLIP, "beta": WEIGHT},
    "dr_grpo": {"clip": CLIP, "length": between(1.0, 100.0)},
    "dapo": {**BOUNDS, "limit": st.integers(6, 14), "cache": st.integers(1, 6), "dual": DUAL},
    "gspo": BOUNDS,
    "gspo_token": BOUNDS,
    "ppo": {**CRITIC, "dual": DUAL},
    "turn_ppo": CRITIC,
    "jet_rl": {"clip": CLIP},
    "sol_rl": {"clip": CLIP},
    "rloo_kl": {"beta": WEIGHT},
    "gmpo": BOUNDS,
    "cispo": {"high": CAP},
    "reinforce_pp": {"clip": CLIP, "beta": WEIGHT, "gamma": between(0.3, 1.0)},
    "reinforce_pp_baseline": {"clip": CLIP, "beta": WEIGHT},
    "two_sided_grpo": {"clip": between(0.01, 0.5), "delta": between(1.6, 5.0)},
    "ngrpo": {**BOUNDS, "best": between(0.5, 3.0)},
    "opo": {"clip": CLIP},
    "grpo_passk": {"clip": CLIP, "scale": st.booleans(), "eps": between(1e-6, 0.5)},
    "minpro": WINDOW,
    "ctpo": {"low": between(0.01, 0.3), "high": between(0.01, 0.3), "dual": between(0.01, 0.6), "power": between(0.1, 1.0)},
    "dppo_tv": {"low": between(0.001, 0.3), "high": between(0.001, 0.3), "cap": CAP},
    "dppo_kl": {"limit": between(0.001, 0.3), "cap": CAP},
    "tis": {**BOUNDS, "cap": CAP},
    "sequence_tis": {**BOUNDS, "cap": CAP},
    "mis": WINDOW,
    "sequence_mis": WINDOW,
    "icepop": WINDOW,
    "geo_rs": {"low": between(0.8, 0.999), "high": between(1.001, 1.3)},
    "k3_rs": {"limit": between(1e-4, 0.2)},
    "veto": {"floor": between(1e-4, 0.9), "cap": CAP},
    "sequence_mask": {**BOUNDS, "limit": between(0.001, 1.0)},
    "decoupled_ppo": {"clip": CLIP, "cap": between(1.03, 5.0)},
    "st_ppo": CRITIC,
    "s_ppo": CRITIC,
    "bpo": {
        "eps": CLIP, "softness": between(1e-3, 1.0), "value_weight": between(0.1, 2.0), "median_weight": between(0.1, 2.0),
        "gamma": between(0.5, 1.0), "lam": between(0.0, 1.0),
    },
    "so_grpo": {"clip": CLIP},
    "bapo": {
        "share": SHARE, "low": between(0.3, 0.8), "high": between(1.05, 1.5), "low_end": between(0.82, 0.99),
        "high_end": between(1.6, 4.0), "low_step": between(0.02, 0.2), "high_step": between(0.03, 0.4),
        "dual": between(1.5, 5.0), "statistic": st.sampled_from(["gradient", "value"]),
    },
    "topr": {"baseline": between(-1.0, 1.0)},
    "sapo": {"pos": between(0.3, 3.0), "neg": between(0.3, 3.0)},
    "fiberpo": {"plus": between(0.02, 0.5), "minus": between(0.02, 0.5), "eps": between(0.01, 0.3)},
    "fiberpo_domain": {"plus": between(0.02, 0.5), "minus": between(0.02, 0.5), "eps": between(0.01, 0.3)},
    "r2vpo": {"weight": between(0.0, 1.0)},
    "gbpo": {**BOUNDS, "softness": between(1e-3, 2.0)},
    "vcpo": {"cap": CAP},
    "oblr_po": {"clip": CLIP},
    "alp": BOUNDS,
    "alp_sequence": BOUNDS,
    "remix": {"clip": CLIP, "weight": WEIGHT},
    "fg_expo": {"clip": CLIP, "beta": WEIGHT},
    "capo": {"objective": between(1e-4, 0.05), "policy": between(1e-6, 1e-3), "clip": CLIP},
    "rec_one_side": {**BOUNDS, "cap": CAP},
    "rec_two_side": {**BOUNDS, "cap": CAP},
    "rec_ring": {
        "low": between(0.01, 0.4), "high": between(0.01, 0.4), "far_low": between(0.41, 0.9), "far_high": between(0.41, 3.0),
        "cap": CAP,
    },
    "rec_sequence": BOUNDS,
    "red_weight": {"softness": between(0.2, 3.0)},
    "kimi_opmd": {"tau": WEIGHT},
    "rep_forward": {"tau": WEIGHT},
    "asym_re": {"tau": between(-0.5, 0.5)},
    "opmd": {"tau": between(0.2, 3.0), "baseline": st.sampled_from(["mean", "soft"])},
    "vespo": {key: between(0.3, 4.0) for key in ("rise", "decay", "rise_negative", "decay_negative")},
    "clip_cov": {
        "fraction": between(0.01, 0.5), "low": between(-1.0, 0.2), "high": between(0.3, 5.0), "clip_low": CLIP,
        "clip_high": CLIP,
    },
    "kl_cov": {"fraction": between(0.005, 0.5), "beta": between(0.1, 2.0)},
    "steer": {
        **BOUNDS, "least": between(0.1, 0.9), "most": between(0.92, 2.0), "form": st.sampled_from(["linear", "exponential"]),
        "dual": between(1.5, 10.0),
    },
    "hapo": {
        **BOUNDS, "quantile": SHARE, "alpha": between(0.1, 1.0), "beta": between(0.1, 1.5), "dual": between(1.5, 10.0),
    },
    "mini_o3": BOUNDS,
    "t_ppo": {key: CRITIC[key] for key in ("clip", "gamma", "lam", "value_weight")},
    "minirl": {**BOUNDS, "cap": CAP},
    "aepo": {"alpha": between(0.1, 3.0), "clip": CLIP},
    "epo": {
        "weight": between(1e-3, 0.5), "alpha": between(0.05, 2.0), "low": between(0.0, 0.9), "high": between(1.1, 2.0),
        "clip": CLIP, "beta": WEIGHT,
    },
    "dgpo": {"kappa": between(0.2, 3.0), "tau": between(0.1, 2.0), "clip": CLIP},
    "aspo": {**BOUNDS, "delta": between(-5.0, -0.1), "k": between(0.1, 2.0)},
    "a2tgpo": {**BOUNDS, "alpha": between(-1.0, 1.0), "beta": between(0.05, 0.95), "gamma": between(0.3, 1.0)},
    "scale_rl": {"cap": CAP},
    "forking_tokens": {**BOUNDS, "share": SHARE},
    "adhint": {"clip": CLIP}, "trimpi": {"clip": CLIP},
    "a2fm": {"clip": CLIP, "alpha": between(0.3, 4.0), "easy": between(0.1, 0.9)},
    "echo": {
        "boost": between(0.0, 0.4), "bonus": WEIGHT, "least": between(0.01, 0.2), "most": between(0.21, 0.7),
        "steep": between(0.5, 8.0), "tail": st.integers(1, 6), "beta": WEIGHT,
    },
    "d3s": {"rows": SHARE, "tokens": SHARE, "by_group": st.booleans(), "clip": CLIP},
    "swarm": {"clip": CLIP, "high": CLIP},
    "oapl": {"value": between(0.2, 3.0), "beta": between(1e-3, 1.0)},
    "digirl": {
        "gamma": between(0.1, 1.0), "cost": between(0.0, 0.3), "share": SHARE, "value_weight": between(0.1, 2.0),
    },
    "pivotrl": {"clip": CLIP},
    "props": CRITIC,
    "dart": {"share": SHARE, "cap": CAP, **BOUNDS, "beta": WEIGHT},
    "see_upo": {"clip": CLIP, "beta": WEIGHT},
    "ppo_max": {**CRITIC, "eta": WEIGHT, "limit": between(0.2, 2.0), "centre": st.booleans()},
    "safe": {
        "clip": CLIP, "softness": between(0.1, 2.0), "penalty": between(0.05, 2.0), "value_weight": between(0.1, 2.0),
        "huber": between(0.05, 1.0), "value_clip": between(0.05, 1.0),
    },
}  # fmt: skip

ELSEWHERE: dict[str, dict[str, str]] = {  # settings that change neither advantage nor loss of one batch
    "sol_rl": {"drafts": "tests/rollout/test_screened.py"},
    "epo": {"half": "test_epo_with_a_history"},
    "see_upo": {"turns": "the number of steps of its control"},
    "st_ppo": {"floor": "test_clipping_bias"},
    "s_ppo": {"floor": "test_clipping_bias"},
    "so_grpo": {"floor": "test_clipping_bias"},
    "r2vpo": {"target": "test_r2vpo_price", "rate": "test_r2vpo_price"},
    "vcpo": {"base": "test_vcpo_pace"},
    "oblr_po": {"shares": "test_signal_to_noise_of_equal_parts"},
    "alp": {"sigma": "tests/engines", "rate": "tests/engines"},
    "alp_sequence": {"sigma": "tests/engines", "rate": "tests/engines"},
    "remix": {"begin": "test_remix_in_later_steps", **dict.fromkeys(("share", "window", "reset"), "tests/data")},
    "fg_expo": dict.fromkeys(("pool", "keep", "width"), "tests/tasks"),
    "d3s": dict.fromkeys(("rows_end", "tokens_end", "ramp"), "tests/credit/test_downsampling.py"),
    "swarm": dict.fromkeys(("folder", "foreign", "sender"), "tests/store/test_shared_pool.py"),
    "oapl": {"share": "tests/data/test_past_batches.py", "window": "tests/data/test_past_batches.py"},
    "digirl": {"oldest": "tests/data/test_replay.py"},
    "pivotrl": dict.fromkeys(("pool", "below", "renew"), "tests/training/test_pivot_runs.py"),
    "props": dict.fromkeys(("wave", "limit", "divergence", "fits", "rate"), "tests/rollout/test_corrected_sampling.py"),
    "dart": {"easy": "tests/tasks", "pool": "tests/tasks"},
    "aepo": dict.fromkeys(("target", "hot", "cold", "share"), "tests/rollout"),
    "scale_rl": {"solved": "tests/tasks"},
    "hapo": {"tau": "tests/rollout/test_token_temperature.py"},
    "t_ppo": {"window": "tests/rollout/test_windows.py"},
    "adhint": {"most": "tests/rollout/test_guidance.py"},
    "trimpi": dict.fromkeys(("share", "tier"), "tests/rollout/test_late_starts.py"),
    "a2fm": dict.fromkeys(("openings", "forced"), "tests/rollout/test_modes.py"),
    "echo": dict.fromkeys(("trunks", "high", "confident"), "tests/rollout/test_confidence_tree.py"),
}

RENAMED = {  # a recipe's hyper-parameter: the oracle's
    "bapo": {"share": "rho0", "high_step": "step_high", "low_step": "step_low"},
    "r2vpo": {"weight": "lam"},
    "gbpo": {"softness": "temperature"},
    "bpo": {"softness": "temperature"},
    "capo": {"objective": "tau_h", "policy": "tau_f"},
    "clip_cov": {"low": "low_cov", "high": "high_cov"},
    "steer": {"least": "lam_min", "most": "lam_max"},
    "hapo": {"quantile": "rho"},
    "rec_ring": {"far_low": "low_outer", "far_high": "high_outer"},
    "red_weight": {"softness": "temperature"},
    "sequence_mask": {"limit": "delta"},
    "remix": {"weight": "kl_weight"},
    "safe": {"softness": "temperature"},
    "epo": {"weight": "lam"},
}
CHANGED: dict[str, dict[str, Any]] = {  # where the oracle counts from another origin
    "minpro": {"low": lambda x: 1 - x, "high": lambda x: x - 1},
}


def drawn(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the settings of a method; what is left out keeps its default."""
    return st.fixed_dictionaries({}, optional=DRAWN.get(name, {}))


def for_oracle(name: str, hyper: dict[str, Any]) -> dict[str, Any]:
    """A recipe's settings as its oracle names and counts them."""
    names, changes = RENAMED.get(name, {}), CHANGED.get(name, {})
    return {names.get(key, key): changes.get(key, lambda x: x)(value) for key, value in hyper.items()}
