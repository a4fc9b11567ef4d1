"""Threads that do independent jobs, a bounded number of them at once."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

MAX_THREADS = 16


class Workers:
  """A pool of threads; a context manager."""

  def __init__(self, threads: int | None = None) -> None:
    """`threads`: None takes one for each processor that this process may use."""
    if threads is None:
      threads = len(os.sched_getaffinity(0)) if _HAS_AFFINITY else os.cpu_count() or 1
      threads = min(threads, MAX_THREADS)
    self._threads = threads
    self._pool = ThreadPoolExecutor(threads)

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self._pool.shutdown(cancel_futures=True)

  def run(self, jobs: Iterable[Callable[[], None]], at_once: int) -> None:
    """Does all jobs, at most `at_once` (and one for each thread) at the same time.

    Raises:
      Exception: that of the first job that failed, by their order.
    """
    at_once = min(at_once, self._threads)
    if at_once <= 1:
      for job in jobs:
        job()
      return
    running: collections.deque[Future[None]] = collections.deque()
    for job in jobs:
      if len(running) >= at_once:
        running.popleft().result()
      running.append(self._pool.submit(job))
    while running:
      running.popleft().result()


_HAS_AFFINITY = hasattr(os, "sched_getaffinity")  # Linux.
