from __future__ import annotations

import functools
import threading

import pytest

from kdtree_jax.model.workers import Workers


@pytest.mark.parametrize("at_once", [0, 1, 2, 3, 100])
@pytest.mark.parametrize("threads", [1, 3])
def test_no_more_than_allowed_run_at_once(at_once, threads):
  lock = threading.Lock()
  running, most, done = 0, 0, []
  limit = max(1, min(at_once, threads))
  # All that may run meet here, so that they do run at once.
  barrier = threading.Barrier(limit)

  def job(i: int) -> None:
    nonlocal running, most
    with lock:
      running += 1
      most = max(most, running)
    barrier.wait(60)
    with lock:
      done.append(i)
      running -= 1

  with Workers(threads) as workers:
    workers.run((functools.partial(job, i) for i in range(4 * limit)), at_once)
  assert sorted(done) == list(range(4 * limit)) and most == limit


@pytest.mark.parametrize("at_once", [1, 4])
def test_the_first_error_counts_and_the_rest_is_left(at_once):
  done = []

  def job(i: int) -> None:
    if i in (5, 6):
      raise ValueError(f"job {i}")
    done.append(i)

  with pytest.raises(ValueError, match="job 5"), Workers(4) as workers:
    workers.run((functools.partial(job, i) for i in range(100)), at_once)
  assert set(range(5)) <= set(done) and 50 not in done


def test_threads_of_this_machine():
  with Workers() as workers:
    workers.run([], 3)
