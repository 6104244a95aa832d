"""The methods whose oracle is tested in tests/credit, by file: test_turns.py, test_groups.py and so on."""

from __future__ import annotations

TURNS = [
    "bilevel_gae", "gigpo", "hgpo", "salt", "igpo", "infopo", "mars", "trloo", "flow_grpo", "srgpo", "ui_s1",
]  # fmt: skip
GROUPS = [
    "adora", "bnpo", "canon", "capo_calibration", "copo", "dgpo_difficulty", "dvao", "gdpo", "mc_grpo", "mssr",
    "pipo", "poise", "polychromic", "public_baseline", "risk_po", "stratified_grpo", "unlikeliness", "probe_baseline", "xrpo",
]  # fmt: skip
SEGMENTS = [
    "spo_chain", "spo_tree", "spo_single", "arpo", "ib_tpo", "ipa", "dcpo", "archer", "direct_advantage", "r3l", "spear",
    "verl_rank", "rlfr", "gcpo", "promed", "fapo", "otc", "information_consistency",
]  # fmt: skip
OTHERS = [
    "chord", "hpt", "luffy", "guide", "adhint", "arpo_gui", "spear_replay", "r1v2", "bepa", "opd", "opd_corrected", "scope",
    "otr",
]  # fmt: skip
PREFERENCES = [
    "dpo", "rdpo", "simpo", "inpo", "spo_minimax", "srpo", "mapl", "dpa", "exo", "nca", "apo", "discopop", "aot",
    "kto", "orpo", "cpo",
]  # fmt: skip
VALUES = ["digi_q", "optimal_token", "evocua", "b_coder", "vas"]  # test_step_values.py, test_action_values.py
VINES = ["polychromic_ppo"]  # test_vines.py
DREAMS = ["dynaweb"]  # test_dreams.py
PRESETS = ["retool", "tapo", "craft_gui", "latr"]  # the objective of another: training/test_whole_recipes.py
PROVEN_ELSEWHERE = [*PRESETS, *VINES, *DREAMS, *VALUES, *TURNS, *GROUPS, *SEGMENTS, *OTHERS, *PREFERENCES]
