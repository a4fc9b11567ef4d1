"""The slice suite at a tiny scale: the pair it makes, its parts, floors and report."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kdtree_jax.bench import kimi_slice, markdown, report, slice_work
from kdtree_jax.bench import slice as suite
from kdtree_jax.bench.rounds import Effort
from kdtree_jax.bench.slice_parts import LayerParts
from kdtree_jax.bench.slice_work import PARTS, TARGET_PARTS
from kdtree_jax.bench.timing import Ceilings
from kdtree_jax.cli.flags import load_experiment
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decoding import modules
from kdtree_jax.decoding.rounds import verify_step
from kdtree_jax.model.cache import LatentCache
from kdtree_jax.model.moe import Experts
from kdtree_jax.training.config import Experiment
from kdtree_jax.tree import Tree
from tests.bench.suites_test import command
from tests.decoding import models
from tests.ops.custom_calls import cuda_text, need_library

ROOT = Path(__file__).parents[2]
EFFORT = Effort(calls=2, repeats=2, runs=1, seconds=1e-4, warmups=1)
LIMITS = Ceilings(bytes_per_second=1e9, flops_per_second=1e12, link_us=0.5)
CONFIG = models.model_config(
  num_hidden_layers=3, q_lora_rank=32, n_routed_experts=24, num_experts_per_tok=3
)
TINY = Experiment(model=CONFIG, drafter=models.drafter_config())
BF16 = jnp.dtype(jnp.bfloat16)


@pytest.fixture(scope="module")
def target():
  return kimi_slice.random_target(CONFIG, BF16)


@pytest.fixture(scope="module")
def start(target):
  drafter = kimi_slice.random_drafter(TINY.drafter, 3, BF16)
  return kimi_slice.random_start(target, drafter, context=100, rounds=2)


@pytest.fixture(scope="module")
def measured():
  settings = suite.Settings(contexts=(100,), budgets=(5,), rounds=2, effort=EFFORT)
  return suite.run(TINY, settings, LIMITS)


def test_the_configuration_is_a_slice_of_kimi():
  experiment = load_experiment(ROOT / "configs" / "kimi_slice.py")
  whole = load_experiment(ROOT / "configs" / "kimi_k2_6.py")
  layers = experiment.model.num_hidden_layers
  assert layers < 61 and experiment.drafter == whole.drafter
  # The published taps, and as many different ones of the slice's layers.
  assert kimi_slice.spread_taps(6, 61) == whole.drafter.target_layer_ids
  assert kimi_slice.spread_taps(6, layers) == (1, 2, 4, 5, 7, 8)
  # Weights, and two copies of a context of 128k tokens, leave room on 139 GiB.
  weights = kimi_slice.weight_bytes(experiment, BF16)
  assert 95e9 < weights < 125e9


def test_weights_are_of_unit_gain_and_all_made(target):
  for path, variable in nnx.iter_graph(target):
    if isinstance(variable, nnx.Variable):
      assert isinstance(variable.get_value(), jax.Array), path
  experts = [n for _, n in nnx.iter_graph(target) if isinstance(n, Experts)]
  assert len(experts) == 2 and all(e.int4 for e in experts)
  assert experts[0].gate_up[...].dtype == jnp.uint8
  first, second = (np.asarray(e.gate_up[...]) for e in experts)
  assert not np.array_equal(first, second)
  assert abs(float(target.embed_tokens[...].astype(jnp.float32).std()) - 1) < 0.1
  norm = target.layers[0].input_layernorm.weight[...]
  assert bool((norm == 1).all())
  kernel = target.layers[1].self_attn.o_proj.kernel[...].astype(jnp.float32)
  # 64 x 64 values: the deviation is known within some per cent.
  assert float(kernel.std()) == pytest.approx(kernel.shape[0] ** -0.5, rel=0.1)
  assert kimi_slice.bytes_of(target) == sum(
    math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(target))
  )
  drafter = kimi_slice.random_drafter(TINY.drafter, 3, BF16)
  made = kimi_slice.bytes_of(target) + kimi_slice.bytes_of(drafter)
  wanted = dataclasses.replace(TINY, drafter=drafter.config)
  assert kimi_slice.weight_bytes(wanted, BF16) == made


def test_the_seed_decides_the_weights(target):
  again, other = (kimi_slice.random_target(CONFIG, BF16, seed) for seed in (0, 1))
  one, same, different = (
    np.asarray(t.lm_head.kernel[...].astype(jnp.float32))
    for t in (target, again, other)
  )
  assert np.array_equal(one, same) and not np.array_equal(one, different)
  floats = kimi_slice.random_target(CONFIG, BF16, experts="as_dtype")
  assert floats.layers[1].mlp.experts.down[...].dtype == BF16
  with pytest.raises(ValueError, match="experts = 'int8' is not allowed"):
    kimi_slice.random_target(CONFIG, BF16, experts="int8")


def test_large_arrays_are_made_in_blocks(monkeypatch):
  monkeypatch.setattr(kimi_slice, "_BLOCK", 40)
  values = kimi_slice._normal(jax.random.key(0), (12, 20), 2.0, jnp.dtype("float32"))
  assert values.shape == (12, 20)
  assert len(np.unique(values)) > 230  # no block repeats another
  assert float(values.std()) == pytest.approx(2.0, rel=0.15)


def test_the_trace_is_the_step_that_decoding_takes(start):
  parts = LayerParts(start, budget=5, rows=8, implementation="auto", effort=EFFORT)
  assert parts.finite()
  target = start.target
  _, features, _ = verify_step(
    target, start.state.cache, parts._tree, (0, 1, 2), "auto"
  )
  streams = jnp.split(features, 3, axis=-1)
  for layer in (1, 2):
    wanted = target.layers[layer].input_layernorm(streams[layer - 1])
    got = parts._inputs[layer].attention
    # Two programs may round bf16 values of unit scale apart, by a few of its steps.
    np.testing.assert_allclose(
      got.astype(jnp.float32), wanted.astype(jnp.float32), atol=0.05, rtol=0.05
    )


def test_rows_are_routed_to_different_experts(start):
  parts = LayerParts(start, budget=11, rows=16, implementation="auto", effort=EFFORT)
  live, padded = parts.distinct(), parts.distinct(live=False)
  expected = slice_work.expected_distinct(CONFIG, 12)
  assert len(live) == 2 and all(a <= b for a, b in zip(live, padded, strict=True))
  # 12 rows of 3 of 24 experts: 19 are expected, 3 where all went the same way.
  assert expected == pytest.approx(19.17, abs=0.01)
  assert all(count > expected / 2 for count in live)


def test_every_part_is_measured(measured):
  plain, tree = measured["measurements"]
  assert [(m["name"], m["budget"], m["rows"]) for m in (plain, tree)] == [
    ("plain", 0, 1),
    ("ddtree", 5, 8),
  ]
  for m in (plain, tree):
    assert set(m["parts"]) == set(m["floors"]) == set(PARTS)
    assert sum(m["parts"].values()) == pytest.approx(m["round_us"])
    assert m["ratio"] == pytest.approx(m["round_us"] / sum(m["floors"].values()))
    for part in ("attention", "router", "experts", "shared", "dense", "head"):
      assert m["parts"][part] > 0, part
    assert m["finite"] and m["workspace_in_bounds"] in (True, None)
    assert m["estimate"]["round"] > 0
  assert plain["parts"]["draft"] == plain["floors"]["draft"] == 0
  assert tree["parts"]["draft"] > 0 < tree["floors"]["draft"]
  assert plain["distinct"] == [3, 3]
  assert (plain["bar"], tree["bar"]) == (suite.BAR, None)
  assert not suite.failed(measured)


def test_floors_are_counted_from_shapes(start):
  target, drafter = start.target, start.drafter
  round_ = slice_work.Round((0, 1, 1), 100, (5, 7), plain=False)
  work = slice_work.round_work(target, drafter, round_)
  D, V, N = 64, models.VOCAB, 3
  assert work["head"].bytes_moved == 2 * D * V + 2 * N * D + 4 * N * V
  assert work["head"].flops == 2 * N * D * V
  tiles = kimi_slice.bytes_of(target.layers[1].mlp.experts)
  assert work["experts"].bytes_moved == 12 * tiles / 24 + 2 * 2 * 2 * N * D
  assert work["experts"].flops == 2 * (2 * N * 3 * 3 * D * 32)
  keys = 3 * 100 + 1 + 2 + 2
  width, R, H = 24, 16, 4
  assert work["attention"].flops == 3 * 2 * (width + R) * H * keys
  assert work["attention"].bytes_moved == 3 * 2 * (
    (100 + N) * width + N * H * (width + R)
  )
  router = kimi_slice.bytes_of(target.layers[1].mlp.gate)
  assert work["router"].bytes_moved == 2 * (router + 2 * N * D)
  assert work["router"].flops == 2 * (2 * N * (D * 24 + 24))
  plain = slice_work.round_work(
    target, drafter, dataclasses.replace(round_, plain=True)
  )
  assert plain["draft"] == plain["build"] == slice_work.Work()
  weights = kimi_slice.bytes_of(drafter)
  assert work["draft"].bytes_moved + work["observe"].bytes_moved > weights


def test_the_estimate_scales_what_it_says(start):
  round_ = slice_work.Round((0,), 100, (3, 3), plain=True)
  parts = dict.fromkeys(PARTS, 0.0) | {
    "experts": 2 * 800.0,
    "router": 2 * 5.0,
    "dense": 80.0,
    "head": 160.0,
    "shared": 2 * 4.0,
    "loop": 7.0,
  }
  got = slice_work.estimate_us(start.target, start.drafter, round_, parts, 1e12, 61)
  assert got["experts"] == pytest.approx(60 * 100)
  assert got["router"] == pytest.approx(60 * 5)
  assert got["dense"] == pytest.approx(10)
  assert got["head"] == pytest.approx(20)
  assert got["shared"] == pytest.approx(60 * slice_work.SHORTEST_US)
  assert got["loop"] == 7
  assert got["all_reduce"] > 2 * 61 * slice_work.ALL_REDUCE_US
  assert got["round"] == pytest.approx(sum(v for k, v in got.items() if k != "round"))


def test_report_is_text_json_and_markdown(measured, tmp_path):
  text = suite.render(measured)
  for words in ("ESTIMATE, not measured", "x floors", "the bar of 1.5 is", "Memory:"):
    assert words in text
  path = tmp_path / "slice.json"
  report.write_json(path, measured)
  again = json.loads(path.read_text())
  assert markdown.table(again) == markdown.table(measured)
  assert "| experts |" in markdown.table(again)
  assert {row[3] for row in suite.part_rows(again)} >= set(TARGET_PARTS)


def test_the_verdict_names_what_is_wrong(measured):
  (plain, _) = measured["measurements"]
  bad = plain | {"finite": False, "workspace_in_bounds": False, "host_transfers": 2}
  one = measured | {
    "measurements": [bad],
    "left_out": [{"context": 5, "name": "ddtree", "budget": 3}],
  }
  text = suite.verdict(one)
  for words in ("NOT FINITE", "WORKSPACE", "2 HOST TRANSFERS", "left out, no time"):
    assert words in text
  assert suite.failed(one)


def test_no_time_leaves_measurements_out():
  settings = suite.Settings(
    contexts=(100,), budgets=(5,), parts=False, max_seconds=0.0, effort=EFFORT
  )
  got = suite.run(TINY, settings, LIMITS)
  assert got["measurements"] == [] and len(got["left_out"]) == 2
  assert "left out" in suite.render(got)


def test_what_cannot_be_measured_is_refused():
  with pytest.raises(ValueError, match="needs a configuration with a drafter"):
    suite.run(dataclasses.replace(TINY, drafter=None), suite.Settings(), LIMITS)
  with pytest.raises(ValueError, match="num_hidden_layers = 3 and a context of 1000"):
    suite.check_fits(TINY, BF16, 1000, without_gpu=1 << 20)
  settings = suite.Settings(base=DecodeConfig(implementation="cuda"))
  if jax.default_backend() != "gpu":
    with pytest.raises(NotImplementedError, match="'cuda' of .* (needs|cannot)"):
      suite.run(TINY, settings, LIMITS)
  drafter = kimi_slice.random_drafter(TINY.drafter, 3, BF16)
  target = kimi_slice.random_target(CONFIG, BF16)
  with pytest.raises(ValueError, match="context = 510 is not allowed"):
    kimi_slice.random_start(target, drafter, 510, 2)


def test_steps_of_full_width_can_be_lowered_for_cuda():
  need_library()
  config = load_experiment(ROOT / "configs" / "kimi_slice.py").model
  config = dataclasses.replace(config, num_hidden_layers=2)
  target = kimi_slice._abstract(config, BF16, int4_experts=True)
  target.set_rope_tables()
  static, arrays = modules.split(target)

  def step(arrays, cache, tree):
    return verify_step(modules.merge(static, arrays), cache, tree, (0, 1), "auto")

  root = jnp.zeros((1,), jnp.int32)
  shapes = jax.eval_shape(
    lambda: (LatentCache.empty(config, 1, 1024, BF16), Tree.root_only(root, 72))
  )
  text = cuda_text(step, arrays, *shapes)
  assert text.count("@kdtree_jax.tree_attention(") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
  ("arguments", "file"),
  [
    (("--budgets=5", "--contexts=100,200", "--rounds=2"), "slice.json"),
    (("--exact", "--widths=1,2", "--slots=1", "--contexts=120"), "slice_exact.json"),
  ],
)
def test_the_command_on_a_tiny_pair(arguments, file, tmp_path, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.chdir(ROOT)
  config = tmp_path / "tiny.py"
  config.write_text(
    "from tests.bench.slice_test import TINY\n\ndef get_config():\n  return TINY\n"
  )
  done = command(
    "--suite=slice", f"--config={config}", *arguments, f"--output_dir={tmp_path}"
  )
  # XLA's sums may depend on the width on a CPU, which is a status of 1.
  assert done.returncode in (0, 1), done.stderr
  again = json.loads((tmp_path / file).read_text())
  assert len(again["measurements"]) == (2 if "--exact" in arguments else 4)
  assert markdown.table(again)


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ((), "the device (cpu) gives 8.6 GB: take a GPU with more memory, fewer layers"),
    (("--config.model.num_hidden_layers=2",), "num_hidden_layers = 2 and a context"),
    (("--contexts=1k,x",), "--contexts=1k,x is not allowed"),
    (("--widths=3",), "--widths needs --exact"),
    (("--exact", "--rounds=3"), "--rounds: --exact does not take it"),
    (("--exact", "--contexts=1,2"), "--contexts: --exact takes one number"),
    (("--target=t",), "--target: --suite=slice does not take it"),
  ],
)
def test_bad_flags_are_one_line(arguments, words, tmp_path, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  monkeypatch.chdir(tmp_path)  # It needs no file of the repository.
  done = command("--suite=slice", *arguments)
  assert done.returncode == 2
  assert words in done.stderr
  assert "Traceback" not in done.stderr
  assert not list(tmp_path.iterdir())
