"""The kernels suite: its cases, its figures, its reports."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax.bench import kernel_cases, kernels, markdown, plots, report
from kdtree_jax.bench.timing import Ceilings, Timing
from tests.bench.suites_test import command
from tests.ops.custom_calls import cuda_text, need_library

SMALL = {"sets": 2, "calls": 2, "xla_calls": 2}
LIMITS = Ceilings(bytes_per_second=1e9, flops_per_second=1e12, link_us=0.5)
ATTENTION = kernel_cases.tree_attention(
  5, 1024, heads=2, latent=32, rope=8, dtype=jnp.dtype("float32"), bar_us=7.0, **SMALL
)
TINY = [
  ATTENTION,
  kernel_cases.build_tree(3, 200, 7, **SMALL),
  kernel_cases.accept_tree(9, 4, **SMALL),
  kernel_cases.compact(2, layers=2, accepted=3, nodes=5, capacity=20, width=8, calls=2),
  kernel_cases.rope(4, 2, 8, context=10, **SMALL),
  kernel_cases.rope_queries(4, 2, latent=16, plain=4, width=8, context=10, **SMALL),
  kernel_cases.rope_keys(4, latent=16, width=8, context=10, **SMALL),
  kernel_cases.best_token(3, 50, **SMALL),
  kernel_cases.token_log_probs(5, 3, 50, **SMALL),
  kernel_cases.ancestors_table(5, **SMALL),
]


def timing(us: float) -> Timing:
  return Timing(us, us, us, calls=2, starts=1, runs=1, host_share=0.0)


def test_the_table_has_the_rows_and_bars_of_the_document():
  cases = kernel_cases.standard()
  bars = {(c.op, c.shape): (c.bar_us, c.hopper_bar_us) for c in cases}
  assert bars[("tree_attention", "1 row, 32k, 64 heads, chunk 512")] == (40, None)
  assert bars[("tree_attention", "1 row, 128k, 64 heads, chunk 1024")] == (65, None)
  assert bars[("tree_attention", "16 rows, 32k, 64 heads, chunk 512")] == (270, 129)
  assert bars[("tree_attention", "64 rows, 32k, 64 heads, chunk 512")] == (1000, 450)
  assert bars[("tree_attention", "1 row, 32k, 64 heads, chunk 1024")] == (40, None)
  assert bars[("tree_attention", "64 rows, 32k, 64 heads, chunk 1024")] == (1000, 450)
  assert bars[("tree_attention", "64 rows, 128k, 64 heads, chunk 1024")] == (4000, 1830)
  for context, rows, bar in (
    (32, "1 row", 40),
    (128, "1 row", 65),
    (32, "16 rows", 129),
    (32, "64 rows", 450),
    (128, "64 rows", 1830),
  ):
    shape = f"{rows}, {context}k, 64 heads, hopper, chunk 2112"
    assert bars[("tree_attention", shape)] == (bar, None)
  assert bars[("build_tree", "[1, 15, 163840] fp32, budget 64")] == (60, None)
  assert bars[("accept_tree", "64 nodes, greedy")] == (10, None)
  assert bars[("compact", "61 layers, 16 accepted, batch 8")] == (None, None)
  assert len(bars) == len(cases)
  # What the floors of docs/kernels.md come from: 4.3 TB/s and 760 TFLOP/s.
  hopper = Ceilings(4.3e12, 760e12, 0)
  floors = [hopper.floor_us(c.bytes_moved, c.flops) for c in cases[:13]]
  # Within 6 %: those of three lines of products were made with a slightly higher rate.
  want = [9, 35, 91, 366, 9, 366, 1461, 9, 35, 91, 366, 1461, 2.3]
  np.testing.assert_allclose(floors, want, rtol=0.06)


def test_the_chunk_of_a_row_is_the_one_that_its_call_takes():
  need_library()
  for case in kernel_cases.standard():
    if case.op == "tree_attention":
      kernel, chunk = re.findall(r"heads,( hopper,)? chunk (\d+)$", case.shape)[0]
      text = lowered(case)
      name = "chunk_on_hopper" if kernel else "chunk"
      assert f" {name} = {chunk} : i64" in text, case.shape
      assert f"kernel = {2 if kernel else 1} : i64" in text, case.shape


def test_bytes_and_operations_are_counted():
  _, depths = kernel_cases.random_tree(5, seed=5)
  keys = 5 * (1024 + 1) + depths.sum()
  assert ATTENTION.flops == 2 * 2 * keys * (40 + 32)
  assert ATTENTION.bytes_moved == 4 * (1024 * 40 + 5 * 40 + 5 * 2 * (40 + 32))
  assert TINY[3].bytes_moved == 2 * 2 * 2 * 2 * 3 * 8
  assert TINY[4].bytes_moved == 2 * 2 * 4 * 2 * 8 + 4 * 4
  assert TINY[5].bytes_moved == 2 * 2 * 4 * 2 * (16 + 8) + 4 * 4
  assert TINY[6].bytes_moved == 2 * (2 * 4 * (16 + 8) + 16) + 4 * 4


def lowered(case: kernel_cases.Case) -> str:
  """The text of a call's program for CUDA."""
  arguments = [jax.eval_shape(case.inputs, jax.random.key(0))]
  if case.carried is not None:
    arguments.insert(0, jax.eval_shape(case.carried))
  if case.shared is not None:
    arguments = [*jax.eval_shape(case.shared, jax.random.key(1)), *arguments]
  return cuda_text(lambda *x: case.call(*x, "cuda"), *arguments)


def test_every_row_of_the_table_can_be_lowered_for_cuda():
  need_library()
  for case in kernel_cases.standard():
    assert f"@kdtree_jax.{case.op}(" in lowered(case), case.shape


def test_random_trees_are_deep_trees():
  parents, depths = kernel_cases.random_tree(64, seed=64)
  assert (parents[0], depths[0]) == (-1, 0)
  assert np.all(parents[1:] < np.arange(1, 64)) and np.all(parents[1:] >= 0)
  np.testing.assert_array_equal(depths[1:], depths[parents[1:]] + 1)
  assert depths.max() == kernel_cases.MAX_DEPTH


def test_the_target_follows_the_longest_branch():
  case = kernel_cases.accept_tree()
  tree, targets = case.inputs(jax.random.key(0))
  path, length, bonus = case.call((tree, targets), "xla")
  assert length.tolist() == [kernel_cases.MAX_DEPTH + 1]
  assert tree.depths[0, path[0]].tolist() == list(range(kernel_cases.MAX_DEPTH + 1))
  assert bonus.tolist() == [-1]


def test_input_sets_differ():
  for case in TINY:
    one, other = (case.inputs(jax.random.key(seed)) for seed in (0, 1))
    assert not np.array_equal(jax.tree.leaves(one)[0], jax.tree.leaves(other)[0])


@pytest.fixture(scope="module")
def measured():
  return kernels.run(TINY, LIMITS, runs=2, seconds=1e-4)


@pytest.fixture(scope="module")
def no_gpu():
  if jax.default_backend() == "gpu":
    pytest.skip("the CUDA forms run here")


def test_without_a_gpu_only_xla_is_timed(no_gpu, measured):
  assert [m["op"] for m in measured["measurements"]] == [c.op for c in TINY]
  for m in measured["measurements"]:
    assert m["cuda"] == {"missing": "no CUDA GPU"}
    assert m["xla"]["us"] > 0 and m["of"] == "xla"
    assert m["ratio"] is None and m["reached"] is None and m["difference"] is None
  assert not kernels.failed(measured)
  text = kernels.render(measured)
  assert text.count("no CUDA GPU") == 2 * len(TINY)  # in the table and below it


def test_report_is_text_json_markdown_and_picture(measured, tmp_path):
  head = kernels.render(measured)
  assert "Ceilings measured in this run: 1 GB/s" in head
  path = tmp_path / "k.json"
  report.write_json(path, measured)
  again = json.loads(path.read_text())
  for key in ("device", "versions", "date", "command"):
    assert again["environment"][key]
  assert markdown.table(again) == markdown.table(measured)
  plots.kernels(again, tmp_path / "k.png")
  assert (tmp_path / "k.png").read_bytes().startswith(b"\x89PNG")


def test_figures_of_a_kernel_that_moves_bytes():
  # 2,000 bytes at 1 GB/s; the operations take half as long.
  case = dataclasses.replace(ATTENTION, bytes_moved=2000, flops=10**6, bar_us=7.0)
  got = kernels.figures(case, LIMITS, {"cuda": timing(4.0), "xla": timing(10.0)})
  assert (got["of"], got["ratio"], got["reached"]) == ("cuda", 2.5, True)
  assert got["bytes_per_second"] == pytest.approx(5e8)
  assert got["flops_per_second"] == pytest.approx(2.5e11)
  assert got["share_of_floor"] == pytest.approx(0.5)
  there = kernels.ESTIMATED_CEILINGS.floor_us(2000, 10**6)
  assert got["estimate_us"] == pytest.approx(2 * there)
  slow = kernels.figures(case, LIMITS, {"cuda": timing(8.0)})
  assert slow["reached"] is False and slow["ratio"] is None


def test_latency_is_not_scaled_in_an_estimate():
  case = dataclasses.replace(ATTENTION, bytes_moved=1000, flops=0)
  got = kernels.figures(case, LIMITS, {"cuda": timing(20.0)})
  there = kernels.ESTIMATED_CEILINGS.floor_us(1000, 0)
  assert got["estimate_us"] == pytest.approx(20 - 1 + there)
  assert got["estimate_from"] == "same latency"


def test_a_form_that_fails_is_named_and_the_rest_goes_on(monkeypatch):
  monkeypatch.setattr(kernels, "why_missing", lambda op, form: None)

  def call(inputs, form):
    if form == "cuda":
      raise ValueError("no such shape")
    return inputs[0] * 2.0

  case = dataclasses.replace(ATTENTION, call=call)
  result = kernels.run([case], LIMITS, runs=1, seconds=1e-4)
  (m,) = result["measurements"]
  assert m["cuda"]["missing"] == "failed: ValueError: no such shape"
  assert m["xla"]["us"] > 0
  assert kernels.failed(result) and "no such shape" in kernels.render(result)


def test_both_forms_are_compared(monkeypatch):
  monkeypatch.setattr(kernels, "why_missing", lambda op, form: None)
  case = dataclasses.replace(
    ATTENTION, call=lambda inputs, form: inputs[0] + (0.25 if form == "cuda" else 0.0)
  )
  result = kernels.run([case], LIMITS, runs=1, seconds=1e-4)
  (m,) = result["measurements"]
  assert m["difference"] == pytest.approx(0.25, rel=1e-5)  # of fp32 sums near 1
  assert m["ratio"] == pytest.approx(m["xla"]["us"] / m["cuda"]["us"])
  assert re.search(r"2\.5e-01", kernels.render(result))
  carried = dataclasses.replace(
    TINY[3], call=lambda cache, inputs, form: TINY[3].call(cache, inputs, "xla")
  )
  (m,) = kernels.run([carried], LIMITS, runs=1, seconds=1e-4)["measurements"]
  assert m["difference"] == 0


def test_differences():
  inf = jnp.asarray([-jnp.inf, 1.0])
  assert kernels.largest_difference([inf, jnp.arange(3)], [inf, jnp.arange(3)]) == 0
  assert kernels.largest_difference([inf], [inf.at[1].set(3.0)]) == 2
  assert kernels.largest_difference([inf], [inf.at[0].set(3.0)]) == np.inf


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ((), "needs a CUDA GPU"),
    (("--kernels=rope,gemm",), "--kernels=gemm: it must be among tree_attention"),
  ],
)
def test_the_command_says_what_it_needs(arguments, words, no_gpu, tmp_path):
  done = command("--suite=kernels", *arguments, f"--output_dir={tmp_path}")
  assert done.returncode == 2
  assert words in done.stderr and "Traceback" not in done.stderr


def test_pages_are_filled_from_files(measured, tmp_path):
  page = tmp_path / "page.md"
  page.write_text(
    "before\n<!-- figures: k.json -->\nthe former table\n<!-- end of figures -->\n"
    "between\n"
    "<!-- figures: missing.json -->\n<!-- end of figures -->\nafter\n"
  )
  report.write_json(tmp_path / "k.json", measured)
  text = markdown.fill(page)
  assert "the former table" not in text and "| tree_attention |" in text
  assert text.count(markdown.NOT_MEASURED) == 1
  page.write_text(text)
  assert markdown.fill(page) == text
  with pytest.raises(ValueError, match="suite = 'speed'"):
    markdown.table({"suite": "speed"})


def block(name: str, old: str = "") -> str:
  return f"<!-- figures: {name} -->\n{old}\n<!-- end of figures -->\n"


@pytest.mark.parametrize(
  ("text", "words"),
  [
    (None, r"page\.md: No such file"),
    ("nothing to fill", r"page\.md has no line <!-- figures: FILE"),
    (block("k.json", "| a table |"), r"k\.json is missing, and its table would be"),
    (block("bad.json"), r"bad\.json is no report: Expecting"),
    (block("list.json"), r"list\.json is no report"),
    (block("empty.json"), r"empty\.json is no report: it lacks 'suite'"),
    (
      "<!-- figures: a.json -->\n" + block("b.json"),
      r"the table of a\.json has no end",
    ),
    ("<!-- figures: a.json -->\n", "a table has no end"),
  ],
)
def test_a_page_that_cannot_be_filled_is_left_alone(text, words, tmp_path, capsys):
  for name, content in (("bad", "{"), ("list", "[]"), ("empty", "{}")):
    (tmp_path / f"{name}.json").write_text(content)
  page, good = tmp_path / "page.md", tmp_path / "good.md"
  good.write_text(block("none.json"))
  if text is not None:
    page.write_text(text)
  with pytest.raises(SystemExit) as status:
    markdown.main([str(good), str(page)])
  assert status.value.code == 2
  assert re.search(words, capsys.readouterr().err)
  assert text is None or page.read_text() == text
  assert good.read_text() == block("none.json")


def test_the_command_fills_pages_and_needs_one(measured, tmp_path, capsys):
  report.write_json(tmp_path / "k.json", measured)
  page = tmp_path / "page.md"
  page.write_text(block("k.json") + block("none.json"))
  assert markdown.main([str(page)]) == 0
  text = page.read_text()
  assert "| tree_attention |" in text and markdown.NOT_MEASURED in text
  with pytest.raises(SystemExit) as status:
    markdown.main([])
  assert status.value.code == 2 and "page" in capsys.readouterr().err


def test_the_documents_have_their_files_figures():
  docs = Path(__file__).parents[2] / "docs"
  for page in docs.glob("*.md"):
    assert markdown.fill(page) == page.read_text(), page
