"""Imported by the server that forks the attempts: what a run imports late, so that no attempt waits for it."""

import contextlib
import importlib

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from turnwise.environments.builtin import guess
from turnwise.recipes import registry

LOADED = (AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, registry, guess)
with contextlib.suppress(ImportError):  # optional
    importlib.import_module("matplotlib.pyplot")
