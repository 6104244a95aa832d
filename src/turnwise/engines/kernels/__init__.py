"""Kernels that both engines share. Knows no model.

An operation has one signature and up to three implementations. ``reference`` defines it in plain PyTorch and runs where no kernel
does; ``cpu`` (C) and ``triton`` repeat its names and signatures, with one kernel each. ``dispatch`` chooses a module.

| operations | reference | cpu | triton |
|---|---|---|---|
| ``add_norm``, ``swiglu``, ``rotate_``, ``log_probs`` and their backward passes | yes | float32 | yes |
| ``gather_copies``, ``sum_copies`` | yes | reference | yes |
| ``decode_attention``, ``rope_and_cache``, ``prefill_attention``, ``sample``, ``fp8_matmul`` | slow, for tests | no | yes |
| attention over packed sequences | slow, for tests | ``varlen_attention`` | ``attention`` |

On a CPU the generator attends by ``cpu.rope_and_cache`` and ``cpu.cached_attention``, which rotate in place, or by PyTorch's
attention (``generator.attention_layouts``). ``cpu.FusedLayers`` is a whole small batch in one call.
"""
