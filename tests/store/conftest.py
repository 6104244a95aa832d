"""Children of these tests are forked from one clean process that has already imported the store: many lives, fast."""

import multiprocessing

multiprocessing.get_context("forkserver").set_forkserver_preload(["turnwise.store", "hypothesis.stateful"])
