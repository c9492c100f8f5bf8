import sys

sys.path.insert(0, "/work/main/tests/python")
import pytest
from test_leaks import dies_in_second_bucket, held, one_good


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_x(pool, transport):
    group = pool.group(3, fresh=True)
    hist = []
    for round_ in range(36):
        group.run(one_good, transport)
        h = group.run(held)[1]
        hist.append((h.rss // 1024, h.fds, h.native, h.maps))
        victim = (0, 2)[round_ % 2]
        r = group.start(dies_in_second_bucket, transport, victim)
        group.wait_mark(victim, "died")
        r.join(30)
        group = pool.regroup(group, [x for x in range(3) if x != victim], replace=True)
    print(transport, hist)
