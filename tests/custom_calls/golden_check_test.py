"""kdtr_check on golden cases: what it accepts, and that it finds each kind of fault."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtree_jax.checkpoint import golden, kdtr
from kdtree_jax.reference.golden import GoldenCase, golden_cases
from tests.custom_calls import checker

CASES = golden_cases(small=True)
ACCEPT = [case for case in CASES if case.op == "accept_tree"]


@pytest.fixture(scope="module")
def fake() -> Path:
  """The checker over a GPU that is none."""
  found = checker.fake_checker()
  if found is None:
    pytest.skip("needs a C++ compiler and the headers of CUDA")
  return found


@pytest.fixture(scope="module")
def full() -> Path:
  """The checker with the kernels."""
  found = checker.full_checker()
  if found is None:
    pytest.skip(
      "needs an up-to-date kdtr_check: cmake --build build/cuda --target kdtr_check"
    )
  return found


def check(
  program: Path, folder: Path, cases: list[GoldenCase], *flags: str, fault: str = ""
) -> tuple[int, list[str]]:
  """Exit status, and the lines between the first and the last."""
  golden.write_golden(folder / "x.kdtr", cases, seed=0)
  done = checker.run(program, *flags, "x.kdtr", cwd=folder, FAULT=fault)
  lines = done.stdout.split("\n")[:-1]
  assert lines, done.stderr
  return done.returncode, lines[1:-1]


@pytest.mark.parametrize("guard", ["0", "1", "256", "5000"])
def test_right_outputs(fake: Path, tmp_path: Path, guard: str):
  status, lines = check(fake, tmp_path, ACCEPT, f"--guard_bytes={guard}")
  assert status == 0
  assert len(lines) == len(ACCEPT)
  assert all(line.startswith("ok    accept_tree") for line in lines)
  assert "case 0    B=4 N=17 max_depth=6  (random)" in lines[0]


def test_time(fake: Path, tmp_path: Path):
  _, lines = check(fake, tmp_path, ACCEPT[:1], "--time")
  # 250 us for 20 launches, says the fake clock.
  assert lines[0].endswith("12.50 us")


@pytest.mark.parametrize(
  ("fault", "message"),
  [
    ("wrong", r"out/path\[0,1\]: got \d+, golden -?\d+ \(1 of 28 differ\)"),
    ("behind", "out/bonus: written 3 bytes behind its end"),
    ("before", "out/length: written 1 bytes before its start"),
    ("input", r"case/0/accept_tree/in/parents: an input was written, at byte \d+"),
    ("unwritten", r"out/bonus\[3\]: got -1, golden \d+ \(1 of 4 differ\)"),
    ("varies", r"out/length\[0\]: other bits in run 2 than in run 0"),
    ("replay", r"out/length\[0\]: other bits in run 4 than in run 0 \(replay of a gr"),
    ("refused", "launch: cudaErrorInvalidValue: invalid argument"),
  ],
)
def test_faults(fake: Path, tmp_path: Path, fault: str, message: str):
  status, lines = check(fake, tmp_path, ACCEPT[:1], fault=fault)
  assert status == 1
  assert lines[0].startswith("FAIL  accept_tree")
  assert re.search(message, lines[0]), lines[0]


def test_repeats_find_what_goes_wrong_now_and_then(fake: Path, tmp_path: Path):
  status, _ = check(fake, tmp_path, ACCEPT[:1], "--repeats=10", fault="rare")
  assert status == 0
  status, lines = check(fake, tmp_path, ACCEPT[:1], "--repeats=200", fault="rare")
  assert status == 1 and "other bits in run" in lines[0]


def test_a_failure_does_not_hide_later_cases(fake: Path, tmp_path: Path):
  case = ACCEPT[0]
  wrong = {**case.outputs, "bonus": case.outputs["bonus"] + 1}
  bad = dataclasses.replace(case, outputs=wrong)
  status, lines = check(fake, tmp_path, [case, bad, case])
  assert status == 1
  assert [line[:4] for line in lines] == ["ok  ", "FAIL", "ok  "]
  status, lines = check(fake, tmp_path, [case, bad, case], "--case=2")
  assert (status, len(lines)) == (0, 1)


def changed(case: GoldenCase, **parts: dict[str, Any]) -> GoldenCase:
  """The case with members of its parts replaced, or removed where they are None."""
  merged = {}
  for part, changes in parts.items():
    both = {**getattr(case, part), **changes}
    merged[part] = {k: v for k, v in both.items() if v is not None}
  return dataclasses.replace(case, **merged)


F32, BF16 = np.float32, ml_dtypes.bfloat16
INF, NAN = np.inf, np.nan


def after(x: float, steps: int, dtype=F32) -> float:
  """The number `steps` after x of the dtype."""
  kind = np.int32 if dtype == F32 else np.int16
  return float((np.array(x, dtype).view(kind) + kind(steps)).view(dtype))


@pytest.mark.parametrize(
  ("dtype", "rule", "got", "golden_value", "bound", "right"),
  [
    (F32, "bits", NAN, NAN, None, True),
    (F32, "bits", 0.0, -0.0, None, False),
    (F32, "bits", 1.0, after(1, 1), None, False),
    (np.float64, "bits", 1.0, 1.0 + 2**-52, None, False),
    (F32, {"ulp": 2}, 1.0, after(1, 2), None, True),
    (F32, {"ulp": 2}, 1.0, after(1, 3), None, False),
    (F32, {"ulp": 2}, -1.0, after(-1, 2), None, True),
    (F32, {"ulp": 1}, -(2.0**-149), 0.0, None, True),
    (F32, {"ulp": 1}, -(2.0**-149), 2.0**-149, None, False),
    (F32, {"ulp": 2}, -(2.0**-149), 2.0**-149, None, True),
    (F32, {"ulp": 0}, 0.0, -0.0, None, True),
    (F32, {"ulp": 9}, NAN, NAN, None, True),
    (F32, {"ulp": 9}, NAN, 1.0, None, False),
    (F32, {"ulp": 9}, INF, after(INF, -1), None, False),
    (BF16, {"ulp": 1}, 1.0, after(1, 1, BF16), None, True),
    (BF16, {"ulp": 1}, 1.0, after(1, 2, BF16), None, False),
    (F32, {"max_abs": 0.5}, 1.0, 1.5, None, True),
    (F32, {"max_abs": 0.5}, 1.0, after(1.5, 1), None, False),
    (F32, {"max_abs": 0.5}, -INF, -INF, None, True),
    (F32, {"max_abs": 0.5}, INF, -INF, None, False),
    (F32, {"max_abs": 0.5}, 1.0, NAN, None, False),
    (F32, {"max_abs": 0}, 2.0, 2.0, None, True),
    (np.float64, {"max_abs": 1e-9}, 2.0, 2.0 + 1e-8, None, False),
    (F32, "bound", 1.0, 1.25, 0.25, True),
    (F32, "bound", 1.0, 1.25, 0.125, False),
    (F32, "bound", 1.0, 1.25, NAN, False),
    (F32, "bound", 1.0, 1.0, 0.0, True),
    (F32, "bound", -INF, -INF, 0.0, True),
    (F32, "bound", -INF, -3e38, INF, False),
    (BF16, "bound", 1.0, 1.25, 0.25, True),
  ],
)
def test_rules(
  fake: Path, tmp_path: Path, dtype, rule, got, golden_value, bound, right
):
  # Elements that are right surround the one in question.
  case = GoldenCase(
    op="copy",
    name="rule",
    attributes={},
    inputs={"x": np.array([1, got, 2], dtype)},
    outputs={"out": np.array([1, golden_value, 2], dtype)},
    compare={"out": rule},
    bounds={} if bound is None else {"out": np.array([0.5, bound, 0.5], F32)},
  )
  status, lines = check(fake, tmp_path, [case])
  assert status == (0 if right else 1), lines
  assert right or "out/out[1]: got" in lines[0]
  assert ("of bound" in lines[0]) == (rule != "bits")


def test_a_bound_may_be_of_a_wider_golden(fake: Path, tmp_path: Path):
  case = GoldenCase(
    op="copy",
    name="bf16 beside f32",
    attributes={},
    inputs={"x": np.array([1.0, 3.0], BF16)},
    outputs={"out": np.array([1.001, 3.5], F32)},
    compare={"out": "bound"},
    bounds={"out": np.array([0.01, 0.25], F32)},
  )
  status, lines = check(fake, tmp_path, [case])
  assert status == 1
  assert "out/out[1]: got 3, golden 3.5 (1 of 2 differ), error up to 2.0" in lines[0]


ZEROS = np.zeros((4, 17), np.int32)


@pytest.mark.parametrize(
  ("parts", "message"),
  [
    ({"inputs": {"size": None}}, "in/size: is missing"),
    ({"inputs": {"size": ZEROS[:3, 0]}}, "in/size: has shape [3], but must have [4]"),
    ({"inputs": {"size": np.zeros(4)}}, "in/size: is f64, but must be i32"),
    ({"inputs": {"token_ids": ZEROS[0]}}, "token_ids: has shape [17], without axis 1"),
    ({"inputs": {"more": ZEROS}}, "in/more: is not used by accept_tree"),
    ({"outputs": {"path": ZEROS}}, "out/path: has shape [4,17], but must have [4,7]"),
    ({"outputs": {"bonus": None}}, "out/bonus: is missing"),
    ({"attributes": {"max_depth": None}}, "attribute max_depth: is missing"),
    ({"attributes": {"max_depth": -1}}, "attribute max_depth: must be an integer from"),
    ({"attributes": {"max_depth": 6.0}}, "attribute max_depth: must be an integer"),
    ({"attributes": {"scale": 1}}, "attribute scale: is not used by accept_tree"),
    ({"compare": {"path": None}}, 'compare path: must be "bits", "bound"'),
    ({"compare": {"path": "equal"}}, 'compare path: must be "bits", "bound"'),
    ({"compare": {"path": {"ulp": "1"}}}, 'compare path: must be "bits", "bound"'),
    ({"compare": {"path": {"ulp": 1}}}, "compare path: cannot hold i32 to golden i32"),
    ({"compare": {"path": "bound"}}, "bound/path: is missing"),
    ({"compare": {"other": "bits"}}, "compare other: is not used by accept_tree"),
  ],
)
def test_cases_that_do_not_fit_their_op(
  fake: Path, tmp_path: Path, parts: dict[str, dict[str, Any]], message: str
):
  golden.write_golden(tmp_path / "x.kdtr", [changed(ACCEPT[0], **parts)], seed=0)
  for flags in ([], ["--dry_run"]):
    done = checker.run(fake, *flags, "x.kdtr", cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stdout


def test_an_op_that_the_program_lacks_is_a_failure(fake: Path, tmp_path: Path):
  status, lines = check(fake, tmp_path, [dataclasses.replace(ACCEPT[0], op="lost")])
  assert status == 1
  assert "no such op in this program; it has accept_tree, copy" in lines[0]
  done = checker.run(fake, "--op=lost", "x.kdtr", cwd=tmp_path)
  assert done.returncode == 2
  assert "--op=lost: no such op" in done.stderr


@pytest.mark.parametrize(
  ("config", "message"),
  [
    ({}, "config.kind: is not 'golden'"),
    ({"kind": "golden"}, "config.format_version: must be 1"),
    ({"kind": "golden", "format_version": 2}, "config.format_version: must be 1"),
    ({"kind": "golden", "format_version": 1}, "config.cases: must be a JSON array"),
    (
      {"kind": "golden", "format_version": 1, "cases": [{"op": 1}]},
      "config.cases[0].op: must be a non-empty string",
    ),
    (
      {"kind": "golden", "format_version": 1, "cases": []},
      "tensor 'case/0/a/in/x': belongs to no case",
    ),
  ],
)
def test_files_that_are_no_cases(
  fake: Path, tmp_path: Path, config: dict[str, Any], message: str
):
  kdtr.write(tmp_path / "x.kdtr", {"case/0/a/in/x": ZEROS}, config)
  done = checker.run(fake, "x.kdtr", cwd=tmp_path)
  assert done.returncode == 1
  assert f"x.kdtr: {message}" in done.stderr


def test_no_case_is_no_success(fake: Path, tmp_path: Path):
  golden.write_golden(tmp_path / "x.kdtr", [], seed=0)
  done = checker.run(fake, "x.kdtr", cwd=tmp_path)
  assert done.returncode == 2
  assert "no case to run" in done.stderr


def test_all_cases_fit_their_drivers(full: Path, tmp_path: Path):
  golden.write_golden(tmp_path / "x.kdtr", CASES, seed=0)
  done = checker.run(full, "--dry_run", "x.kdtr", cwd=tmp_path)
  assert done.returncode == 0, done.stdout
  assert f"{len(CASES)} ok, 0 failed" in done.stdout


def test_the_kernel_of_attention_has_a_name(full: Path, tmp_path: Path):
  golden.write_golden(tmp_path / "x.kdtr", CASES, seed=0)
  for name in ("portable", "hopper", "hopper-1", "hopper-2", "hopper-4", "hopper-8"):
    done = checker.run(full, "--dry_run", f"--attention={name}", "x.kdtr", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
  for name in ("hopper-3", "hopper-", "auto"):
    done = checker.run(full, "--dry_run", f"--attention={name}", "x.kdtr", cwd=tmp_path)
    assert done.returncode == 2 and "or hopper-8" in done.stderr


def test_the_command_writes_what_the_checker_lists(tmp_path: Path, capsys):
  path = tmp_path / "x.kdtr"
  assert golden.main([f"--out={path}", "--small", "--op=accept_tree"]) == 0
  assert f"{len(ACCEPT)} cases" in capsys.readouterr().out
  with kdtr.open_kdtr(path, verify="open") as file:
    assert [case["op"] for case in file.config["cases"]] == ["accept_tree"] * len(
      ACCEPT
    )
    got = file.read("case/0/accept_tree/out/path")
    np.testing.assert_array_equal(got, ACCEPT[0].outputs["path"])
  with pytest.raises(SystemExit):
    golden.main([f"--out={path}", "--op=lost"])
  assert "--op=lost: no such op" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    (["--out="], "--out=: must name a file"),
    (["--out={folder}"], "must name a file, not a folder"),
    (["--out={folder}/none/x.kdtr"], "none/x.kdtr: No such file or directory"),
    (["--out={folder}/x", f"--seed={2**63}"], f"--seed={2**63}: must lie in 0 .. "),
    (["--out={folder}/x", "--seed=-1"], "--seed=-1: must lie in 0 .. "),
  ],
)
def test_the_command_says_what_it_cannot_do(flags, words, tmp_path: Path, capsys):
  with pytest.raises(SystemExit) as status:
    golden.main(
      [flag.format(folder=tmp_path) for flag in flags] + ["--small", "--op=compact"]
    )
  assert status.value.code == 2 and words in capsys.readouterr().err
  assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_the_kernels_give_the_golden_outputs(full: Path, tmp_path: Path):
  status, lines = check(full, tmp_path, golden_cases())
  assert status == 0, "\n".join(line for line in lines if not line.startswith("ok"))
