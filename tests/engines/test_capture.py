"""A capture has the GPU alone; engines that use it wait, and nobody waits for ever."""

from __future__ import annotations

import random
import threading
import time

from turnwise.engines.capture import GpuUse


def test_a_capture_waits_for_users_and_users_for_it():
    use, order = GpuUse(), []
    using, may_end = threading.Event(), threading.Event()

    def generator():
        with use.shared():
            using.set()
            may_end.wait(60)
            order.append("use ended")

    def learner():
        with use.shared(), use.alone():
            order.append("captured")

    threads = [threading.Thread(target=generator), threading.Thread(target=learner)]
    threads[0].start()
    assert using.wait(60)
    threads[1].start()
    time.sleep(0.05)
    assert not order
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert order == ["use ended", "captured"]


def test_one_thread_may_nest_both():
    use = GpuUse()
    with use.shared(), use.shared(), use.alone(), use.alone(), use.shared():
        pass
    with use.alone(), use.shared(), use.alone():
        pass
    assert not use._users and use._alone is None and not use._waiting


def test_captures_of_several_threads_never_overlap_with_anything():
    use, inside, faults = GpuUse(), [], []

    def engine(seed):
        rng = random.Random(seed)
        for _ in range(200):
            with use.shared():
                inside.append(seed)
                if rng.random() < 0.3:
                    inside.remove(seed)  # a thread that captures launches nothing else
                    with use.alone():
                        faults.extend(inside)
                        time.sleep(rng.random() * 1e-4)
                        faults.extend(inside)
                    inside.append(seed)
                inside.remove(seed)

    threads = [threading.Thread(target=engine, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and not faults
