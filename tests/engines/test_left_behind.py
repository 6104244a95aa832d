"""What a run hands to the processes that it starts has no name on the disk: a kill at that moment leaves no model behind."""

from __future__ import annotations

import os
import signal
import tempfile

import pytest
import torch
from support.dialogues import run
from support.generators import make

from turnwise.engines.remote import generator_process, weight_files
from turnwise.engines.remote.generator_process import GeneratorSpec, start_generator
from turnwise.engines.remote.weight_files import shared_objects
from turnwise.engines.sharded.sharded_learner import ShardedLearner
from turnwise.store.atomic import remove_temporaries

needs_descriptors = pytest.mark.skipif(not weight_files.DESCRIPTORS.is_dir(), reason="needs /proc")


class Killed(Exception):
    """Stands for a SIGKILL at this moment: what is on the disk now stays there."""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@needs_descriptors
def test_a_kill_leaves_nothing_where_a_process_was_about_to_read(temporary):
    child = os.fork()
    if not child:
        with shared_objects(torch.ones(1000)) as path:
            assert path.exists()
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not any(temporary.iterdir())


@needs_descriptors
def test_a_generator_process_gets_its_model_from_a_file_without_a_name(temporary, monkeypatch):
    def start(program, file, **_):
        spec, model, _ = torch.load(file, weights_only=False)
        assert (spec.slots, type(model).__name__) == (4, "LlamaForCausalLM")
        assert not any(temporary.iterdir())
        raise Killed

    monkeypatch.setattr(generator_process, "Worker", start)
    spec = GeneratorSpec(4, 128, (), True, "cpu", None, threads=1)
    with pytest.raises(Killed):
        run(start_generator("none", spec, make(seed=3), None, str))


@needs_descriptors
def test_ranks_get_their_model_from_a_file_without_a_name(temporary, monkeypatch):
    class Pool:
        several_machines, device, files = False, torch.device("cpu"), None

        def call(self, method, learner, file, *_):
            model, _ = torch.load(file, weights_only=False, mmap=True)
            assert sum(p.numel() for p in model.parameters()) and not any(temporary.iterdir())
            raise Killed

    with pytest.raises(Killed):
        ShardedLearner(make(seed=3), ranks=2, signals=frozenset(), pool=Pool())


def test_a_name_for_other_machines_is_one_that_the_next_checkpoint_removes(tmp_path):
    with shared_objects([1, 2], tmp_path) as path:
        assert torch.load(path, weights_only=False) == [1, 2] and path.is_relative_to(tmp_path)
        remove_temporaries(tmp_path)
        assert not any(tmp_path.iterdir())
    assert not any(tmp_path.iterdir())
