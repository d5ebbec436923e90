"""A report is of all that is below a folder, and of nothing that is amiss."""

import copy
import csv
import json
import math
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest

from specjax import (
  figures,
  gather,
  heat,
  lenient,
  naming,
  points,
  publish,
  rows,
)
from specjax.errors import UserError

CPU = {"platform": "cpu", "name": "a CPU", "cores": 2}
GPU = {"platform": "gpu", "name": "a GPU", "cores": 8, "count": 4}
VERSIONS = {"specjax": "0.1.0", "jax": "0.10.2", "python": "3.11.7"}
VERSIONS |= {"commit": "abc1234"}


def decode(K=2, T=0.0, batch=1, S=1.5, **changes):
  """A report of decode.py: what is read of one, and something else."""
  draft = dict(name="ngram", weights="", layers=[], head=0, num_tokens=K)
  draft |= dict(temperature=-1.0, top_p=-1.0, alpha=0.8, schedule="constant")
  found = {
    "schema": 1,
    "interrupted": False,
    "exact": True if T == 0 else None,
    "speedup": S,
    "tokens_per_call": 1.75,
    "alpha": 0.5,
    "acceptance_by_position": [0.5, 0.25, 0.125, 0.0625][:K],
    "alpha_by_position": [0.5] * K,
    "predicted": {"speedup": 1.4, "speedup_interval": [1.3, 1.6], "best_k": 2},
    "autoregressive": {"tokens_per_second": 50.0, "outputs": []},
    "speculative": {"tokens_per_second": 75.0, "tokens": 64, "outputs": []},
    "costs": {"C": 10.0},
    "draft": {"name": "ngram", "K": K, "verifier": "block"},
    "model": {"dtype": "float32"},
    "command": ["python", "decode.py", "--config=configs/tiny.py"],
    "device": CPU,
    "versions": VERSIONS,
    "config": {
      "target": "random",
      "draft": draft,
      "sampling": {"temperature": T},
      "batch_size": batch,
      "seed": 0,
    },
  }
  return _changed(found, changes)


def training(loss="forward_kl", seed=0, **changes):
  """A record of train_draft.py."""
  judged = lambda S: {"speedup": S, "best_k": 2, "tokens_per_call": S + 1}
  evaluation = lambda step, S: {
    "step": step,
    "alpha": 0.5,
    "agreement": 0.4,
    "forward_kl": 1.0,
    "alpha_by_depth": [0.5, 0.4],
    "block": judged(S) | {"survival": [1.0, 0.5]},
    "token": judged(S),
  }
  found = {
    "schema": 1,
    "kind": "training",
    "interrupted": False,
    "steps": 4,
    "steps_planned": 4,
    "loss": 0.25,
    "best_step": 2,
    "evaluations": [evaluation(0, 1.1), evaluation(2, 1.3), evaluation(4, 1.2)],
    "curve": {"step": [2, 4], "loss": [1.0, 0.25], "alpha": [0.3, 0.6]},
    "dtype": "float32",
    "command": ["python", "train_draft.py", "--config=configs/tiny_train.py"],
    "device": CPU,
    "versions": VERSIONS,
    "config": {
      "target": "random",
      "seed": seed,
      "loss": [[loss, 1.0]],
      "draft.num_tokens": 4,
      "draft.layers": [0],
    },
  }
  return _changed(found, changes)


def _changed(found, changes):
  """With {"config__seed": 3} and the like."""
  found = copy.deepcopy(found)
  for path, value in changes.items():
    *above, last = path.split("__")
    inner = found
    for key in above:
      inner = inner[key]
    inner[last] = value
  return found


def point(sweep, name, record=None, *, failed=None, log="", **asked):
  """A folder as specjax.sweep leaves it."""
  folder = sweep / name
  folder.mkdir(parents=True)
  trains = record is not None and record.get("kind") == "training"
  script = "train_draft.py" if trains else "decode.py"
  _write(
    folder / "point.json",
    dict(schema=1, script=script, config="configs/x.py", overrides={})
    | {"command": ["python", script, "--config=configs/x.py"]}
    | asked,
  )
  if record is not None:
    path = folder / "run" / "record.json" if trains else folder / "result.json"
    path.parent.mkdir(exist_ok=True)
    _write(path, record)
  if log:
    (folder / "log.txt").write_bytes(log.encode())
  if failed:
    _write(folder / "FAILED", failed)
  elif record is not None:
    _write(folder / "DONE", {"seconds": 1.0})
  return folder


def _write(path, found):
  path.write_text(json.dumps(found))


def _sweep(folder):
  """K x T x batch of decode.py, and 2 losses x 2 seeds of train_draft.py."""
  names = []
  for K in (1, 10, 2):
    for T in (0.0, 0.7):
      for batch in (1, 4):
        names.append(f"K={K},T={T},batch={batch}")
        asked = {"draft.num_tokens": K, "sampling.temperature": T}
        S = 1.4 - 0.1 * K - 0.05 * batch + T / 10
        point(folder / "a", names[-1], decode(K, T, batch, S), overrides=asked)
  _write(folder / "a" / "sweep.json", {"schema": 1, "points": names})
  for loss in ("forward_kl", "total_variation"):
    for seed in (0, 1):
      record = training(loss, seed)
      asked = {"loss": record["config"]["loss"], "seed": seed}
      point(folder / "b", f"{loss},{seed}", record, overrides=asked)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The folder of two sweeps and their report."""
  folder = tmp_path_factory.mktemp("sweeps") / "both"
  _sweep(folder)
  point(
    folder / "a",
    "K=99",
    failed={"reason": "NaN <b>loss</b>\nand more", "returncode": 1},
    log="at 1 %\rat 99 %\n\x1b[31mTrace\x1b[0mback\nValueError: <script>\n",
    overrides={"draft.num_tokens": 99},
  )
  publish.publish(folder)
  return folder


def _csv(folder):
  with open(folder / "report.csv", newline="") as file:
    return list(csv.DictReader(file))


def _html(folder):
  return (folder / "report.html").read_text()


def _published(folder):
  publish.publish(folder)
  return _html(folder), {row["run"]: row for row in _csv(folder)}


def test_a_row_a_run_with_the_overrides_as_columns(whole):
  """B41: what was run is beside what came of it."""
  with open(whole / "report.csv", newline="") as file:
    header = next(csv.reader(file))
  assert [x for x in header if not x.startswith("config.")] == list(
    rows.COLUMNS
  )
  own = {"draft.num_tokens", "sampling.temperature", "batch_size", "loss"}
  own |= {"seed"}
  assert {x for x in header if x.startswith("config.")} == {
    f"config.{key}" for key in own
  }
  found = _csv(whole)
  assert len(found) == 12 + 4 + 1
  # K = 10 before K = 2, as the sweep has them; what it did not name is last
  names = [row["run"] for row in found]
  assert names[:2] == ["a/K=1,T=0.0,batch=1", "a/K=1,T=0.0,batch=4"]
  assert names.index("a/K=10,T=0.7,batch=4") == 7 and names[12] == "a/K=99"
  row = found[names.index("a/K=2,T=0.7,batch=4")]
  expected = dict(
    kind="decode", status="done", draft="ngram", K="2", temperature="0.7"
  )
  expected |= {"config.batch_size": "4", "batch": "4", "dtype": "float32"}
  expected |= {"predicted_speedup_high": "1.6", "device": "a CPU", "cores": "2"}
  expected |= {"exact": "", "accepted_by_position": "0.5 0.25", "jax": "0.10.2"}
  expected |= {"commit": "abc1234", "config_file": "configs/x.py"}
  expected |= {"command": "python decode.py --config=configs/x.py"}
  assert {key: row[key] for key in expected} == expected
  assert float(row["speedup"]) == pytest.approx(1.4 - 0.2 - 0.2 + 0.07)
  trained = found[names.index("b/total_variation,1")]
  assert trained["config.loss"] == '[["total_variation",1.0]]'
  # of the step whose draft is kept, not of the last one
  assert trained["best_step"] == "2" and trained["predicted_speedup"] == "1.3"


PARTS = (
  "Best setting of each draft",
  *(title for title, *_ in figures.KINDS.values()),
  "Training runs",
  "Decoding runs",
  "Failures",
  "Machines and versions",
  "Commands",
)


def test_the_page_has_every_part_and_needs_nothing_else(whole):
  html = _html(whole)
  titles = re.findall(r"<h2>(.*?)</h2>", html)
  assert titles == list(PARTS)
  assert "17 runs: 16 done, 1 failed." in html
  sources = re.findall(
    r"""(?:src|href|action|data)\s*=\s*["']?([^"'\s>]*)""", html
  )
  assert len(sources) == 5
  assert all(x.startswith("data:image/png;base64,") for x in sources)
  style = html[html.index("<style>") : html.index("</style>")]
  assert "url(" not in style and "@import" not in style
  assert not re.search(r"<(script|link|iframe|object|base)\b|https?:", html)
  assert "@media print" in style and "size: A4" in style
  for name in ("python decode.py --config=configs/x.py", "abc1234", "a CPU"):
    assert name in html
  names = sorted(path.stem for path in (whole / "figures").iterdir())
  assert names == sorted(figures.KINDS)


def test_a_failed_point_has_its_reason_and_the_end_of_its_log(whole):
  html = _html(whole)
  part = html[html.index("<h2>Failures") : html.index("<h2>Machines")]
  assert "NaN &lt;b&gt;loss&lt;/b&gt; and more (exit code 1)" in part
  assert "at 99 %\nTraceback\nValueError: &lt;script&gt;" in part
  assert "at 1 %" not in part
  (row,) = [row for row in _csv(whole) if row["status"] == "failed"]
  assert row["config.draft.num_tokens"] == "99" and row["speedup"] == ""


def test_the_best_setting_is_the_fastest(whole):
  table = rows.flat(gather.gather(whole).runs)[1]
  best = {
    row["temperature"]: (row, n) for row, n in naming.best_settings(table)
  }
  assert best.keys() == {0.0, 0.7}
  for T, (row, n) in best.items():
    assert (row["K"], row["batch"], n) == (1, 1, 6), T


def test_what_is_shown_at_the_end(whole, capsys):
  publish.publish(whole)
  out, err = capsys.readouterr()
  assert "17 runs: 16 done, 1 failed." in out and "ngram" in out
  told = re.findall(r"^wrote (.*)$", err, re.M)
  assert told[:2] == [f"{whole}/report.csv", f"{whole}/report.html"]
  assert len(told) == 2 + len(figures.KINDS)


DEEP = "[" * 100_000


@pytest.mark.parametrize(
  "data, why",
  [
    (json.dumps(decode())[:300], "no whole JSON"),
    ("", "no whole JSON"),
    (b"\xff\x00{", "no whole JSON"),
    (DEEP, "no whole JSON"),
    ("[1, 2]", "not an object"),
    ('{"a": 1}', "neither decode.py"),
    (json.dumps(decode() | {"schema": 2}), "of schema 2"),
    (json.dumps(decode() | {"draft": [1]}), "its &#39;draft&#39; is not"),
    (json.dumps(decode() | {"prediction": {}}), "a prediction of"),
    (json.dumps(training() | {"curve": 3}), "its &#39;curve&#39; is not"),
  ],
)
def test_a_file_that_is_amiss_is_named_and_skipped(tmp_path, data, why):
  """B36: what was cut while it was written is not taken for a run."""
  data = data if isinstance(data, bytes) else data.encode()
  (tmp_path / "bad<i>.json").write_bytes(data)
  _write(tmp_path / "good.json", decode())
  html, found = _published(tmp_path)
  assert list(found) == ["good.json"]
  part = html[html.index("<h2>Skipped") :]
  assert "bad&lt;i&gt;.json" in part and why in part


# what a value may be, where another one belongs
AMISS = (None, True, "x", [], [None], {}, {"a": [1]}, -1, 10**400, float("nan"))


@pytest.mark.parametrize("amiss", AMISS, ids=str)
@pytest.mark.parametrize("make", [decode, training])
def test_no_value_is_trusted(tmp_path, make, amiss):
  """Of the right outline, with every value in turn another one."""
  good, n = make(), 0
  for key, value in good.items():
    if key in ("schema", "kind"):
      continue
    inner = value if isinstance(value, dict) else {None: None}
    for name in inner:
      change = key if name is None else f"{key}__{name}"
      _write(tmp_path / f"{n}.json", make(**{change: amiss}))
      n += 1
  _write(tmp_path / "good.json", good)
  found = gather.gather(tmp_path)
  columns, table = rows.flat(found.runs)
  publish.as_csv(columns, table)
  for row in table:
    assert row.keys() == {*columns}
    assert all(isinstance(x, str | int | float) for x in row.values())
    assert all(math.isfinite(x) for x in row.values() if isinstance(x, float))


def test_a_page_of_values_that_are_amiss(tmp_path):
  for n, amiss in enumerate(AMISS):
    for key in (
      "device__name",
      "draft__K",
      "acceptance_by_position",
      "speedup",
    ):
      _write(tmp_path / f"{key}{n}.json", decode(**{key: amiss}))
    changes = dict(evaluations=[amiss], curve__loss=amiss, config__loss=amiss)
    for key, value in changes.items():
      _write(tmp_path / f"{key}{n}.json", training(**{key: value}))
  _write(tmp_path / "device.json", decode(device__name=[1], versions=7))
  _published(tmp_path)


EVIL = "<script>alert(1)</script>&\"'$\\frac{$ {{ 7 * 7 }} _" + "w" * 80


def test_hostile_names_are_text(tmp_path):
  """In HTML, in matplotlib's formulas, on a terminal."""
  config = dict(config__draft__name="lm")
  for K, name in enumerate([EVIL, "_hidden", "日本", "a\nb\x1b"], 1):
    own = decode(K, config__draft__weights=f"{name}/draft", **config)
    point(tmp_path, f"<img src=x onerror=alert({K})>", own)
  asked = {"command": ["python", EVIL], "overrides": {"a</td><b>": EVIL}}
  point(tmp_path, "fails", failed={"reason": EVIL}, log=EVIL, **asked)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    html, found = _published(tmp_path)
  tags = set(re.findall(r"<(\w+)", html))
  assert not tags & {"script", "b"} and html.count("<img") == 3
  assert (
    "49" not in re.sub(r"base64,[^\"]*", "", html).split("{{ 7 * 7 }}")[1][:9]
  )
  drafts = {row["draft"] for row in found.values() if row["draft"]}
  assert len(drafts) == 4 and "_hidden/draft" in drafts
  assert all(draft.isprintable() for draft in drafts)
  assert found["fails"]["config.a</td><b>"] == EVIL


def test_runs_of_two_devices_are_never_in_one_picture(tmp_path):
  """B41: speeds of two machines, models or dtypes do not make a curve."""
  _write(tmp_path / "a.json", decode(1))
  _write(tmp_path / "b.json", decode(2))
  _write(tmp_path / "c.json", decode(4, device=GPU))
  _write(tmp_path / "d.json", decode(4, model__dtype="bfloat16", device=GPU))
  _write(tmp_path / "e.json", decode(4, config__target="x/other.gguf"))
  html, _ = _published(tmp_path)
  assert re.findall(r'alt="Speed-up against K by draft: (.*)" width', html) == [
    "random weights, float32, a CPU, 2 cores",
    "random weights, float32, a GPU, 4 devices, 8 cores",
    "random weights, bfloat16, a GPU, 4 devices, 8 cores",
    "other.gguf, float32, a CPU, 2 cores",
  ]
  assert "These runs are of 4 kinds of model, dtype and device" in html
  assert (tmp_path / "figures" / "speedup_by_k_4.png").exists()
  table = rows.flat(gather.gather(tmp_path).runs)[1]
  assert len(naming.best_settings(table)) == 4


def test_what_there_is_no_data_for_is_left_out_and_said(tmp_path):
  _write(tmp_path / "a.json", decode())
  html, _ = _published(tmp_path)
  told = html[html.index("<h2>Left out") :]
  assert "Speed-up over batch and K: no draft was run at more than" in told
  assert "Training curves: there is no training run." in told
  assert "<h2>Failures" not in html and "batch_by_k" not in html
  names = {path.name for path in (tmp_path / "figures").iterdir()}
  assert names == {
    f"{name}.png"
    for name in ("speedup_by_k", "predicted_measured", "acceptance")
  }


def test_pictures_that_are_no_more_go(tmp_path):
  """A page and its folder tell the same; what else is there stays."""
  _write(tmp_path / "a.json", decode())
  _write(tmp_path / "b.json", decode(batch=4))
  _published(tmp_path)
  own = [tmp_path / "figures" / f"{x}.png" for x in ("mine", "training_mine")]
  for mine in own:
    mine.write_bytes(b"")
  assert (tmp_path / "figures" / "batch_by_k.png").exists()
  (tmp_path / "b.json").unlink()
  _published(tmp_path)
  assert all(mine.exists() for mine in own)
  assert not (tmp_path / "figures" / "batch_by_k.png").exists()


def _files(folder):
  """{name: bytes} of all below a folder."""
  paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
  return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_its_own_files_are_no_runs(tmp_path):
  """A report of a sweep, of it again, of a point, of the sweep once more.

  Wherever files of its names lie, they are neither read nor, in folders that
  are not the one that was named, touched.
  """
  sweep = tmp_path / "a"
  one = point(sweep, "K=1", decode(1), overrides={"draft.num_tokens": 1})
  two = point(sweep, "K=2", decode(2), overrides={"draft.num_tokens": 2})
  trained = point(sweep, "seed=1", training(), overrides={"seed": 1})
  for name in ("report.html", "report.csv", "curves.png", "report.json"):
    (one / name).write_text("another's")
  (two / "figures").mkdir()
  (two / "figures" / "acceptance.png").write_text("another's")
  before = _files(sweep)
  publish.publish(sweep)
  first = _files(sweep)
  assert {name: first[name] for name in before} == before
  assert all(
    name.startswith(("report.", "figures/")) for name in first.keys() - before
  )
  publish.publish(sweep)
  assert _files(sweep) == first
  for folder in (one, trained / "run", tmp_path):
    publish.publish(folder)
    assert len(_csv(folder)) == (3 if folder == tmp_path else 1)
  publish.publish(sweep)
  again = _files(sweep)
  assert {name: again[name] for name in first if name[:3] != "K=1"} == {
    name: data for name, data in first.items() if name[:3] != "K=1"
  }
  assert points.read(one / "point.json")  # and it is a point still
  assert points.state(one) == points.state(trained) == "done"


@pytest.mark.parametrize("name", ["report.csv", "report.html", "figures"])
def test_a_name_that_is_taken_is_said_before_anything_is_written(
  tmp_path, name
):
  _write(tmp_path / "a.json", decode())
  if name == "figures":
    (tmp_path / name).write_text("")
  else:
    (tmp_path / name).mkdir()
  with pytest.raises(UserError, match=f"cannot write .*{name}/?: it is a f"):
    publish.publish(tmp_path)
  assert {path.name for path in tmp_path.iterdir()} == {"a.json", name}


def test_points_that_are_not_done(tmp_path):
  """Never begun, at work or killed, stopped, and without a result."""
  done = point(tmp_path, "done", decode())
  point(tmp_path, "at work", log="step 3\n")
  point(tmp_path, "made")
  stopped = training(interrupted=True, steps=2)
  (point(tmp_path, "stopped", stopped) / "DONE").unlink()
  (point(tmp_path, "lost", decode()) / "result.json").unlink()
  _write(point(tmp_path, "both", decode()) / "FAILED", {"reason": "before"})
  names = ["done", "at work", "made", "stopped", "lost", "both", "never"]
  _write(tmp_path / "sweep.json", {"script": "decode.py", "points": names})
  (tmp_path / "training" / "checkpoints").mkdir(parents=True)
  (tmp_path / "training" / "runs.jsonl").write_text("{}\n")
  _write(tmp_path / "training" / "checkpoints" / "a.json", decode())
  found = gather.gather(tmp_path)
  status = {run.name: (run.status, run.reason) for run in found.runs}
  assert status == {
    "done": ("done", ""),
    "at work": ("interrupted", "neither DONE nor FAILED: at work, or killed"),
    "made": ("not run", ""),
    "stopped": ("interrupted", "after 2 of 4 steps"),
    "lost": ("unreadable", "result.json: it is not there"),
    "both": ("done", ""),
    "never": ("not run", ""),
  }
  assert [name for name, _ in found.skipped] == ["lost/result.json", "training"]
  # a training run that was stopped has its curves, half a decode run no speed
  _write(done / "result.json", decode(interrupted=True))
  _, table = rows.flat(gather.gather(tmp_path).runs)
  drawn, _ = figures.draw(table, {"stopped": stopped})
  assert {x.kind for x in drawn} == {"speedup_by_k", "predicted_measured"} | {
    "acceptance",
    "training",
  }
  assert [row["run"] for row in naming.done(table, "decode")] == ["both"]


def test_a_training_folder_alone(tmp_path):
  """Its own JSON files are not runs."""
  (tmp_path / "draft").mkdir()
  _write(tmp_path / "draft" / "config.json", {"a": 1})
  _write(tmp_path / "config.json", {"a": 1})
  _write(tmp_path / "record.json", training())
  (run,) = gather.gather(tmp_path).runs
  assert (run.name, run.kind, run.status) == (tmp_path.name, "training", "done")
  assert run.config == "configs/tiny_train.py"


@pytest.mark.parametrize(
  "make, why",
  [
    (lambda x: "", "no folder: type python -m specjax.report FOLDER"),
    (lambda x: x, "no run below"),
    (lambda x: x / "fodler", "there is no folder"),
    (lambda x: x / "a" / "b", "there is no folder"),
    (lambda x: x / "file", "is a file"),
  ],
)
def test_nothing_to_gather(tmp_path, make, why):
  (tmp_path / "folder").mkdir()
  (tmp_path / "file").write_text("")
  (tmp_path / "x.json").write_text("{")
  with pytest.raises(UserError, match=why) as e:
    publish.publish(make(tmp_path))
  if "fodler" in str(e.value):
    assert f"did you mean {tmp_path}/folder?" in str(e.value)
  if why == "no run below":
    assert "x.json: it is no whole JSON file" in str(e.value)
  assert {path.name for path in tmp_path.iterdir()} == {
    "folder",
    "file",
    "x.json",
  }


def test_the_command_says_one_line(tmp_path):
  command = [sys.executable, "-m", "specjax.report"]
  run = lambda *args: subprocess.run(
    [*command, *args], capture_output=True, text=True
  )
  found = run(str(tmp_path))
  assert found.returncode == 2 and found.stdout == ""
  assert found.stderr.startswith(f"error: no run below {tmp_path}")
  assert found.stderr.count("\n") == 1


def test_cells_and_the_line_between_them():
  """The mean of a cell's runs; a border only between 1 and less than 1."""
  runs = [(1, 1, 1.5), (1, 2, 0.5), (4, 1, 0.75), (4, 1, 1.05), (8, 2, 2.0)]
  runs += [(8, 1, 0.8)]
  runs = [dict(batch=b, K=k, speedup=S) for b, k, S in runs]
  batches, lengths, S = heat.table(runs)
  assert (batches, lengths) == ([1, 4, 8], [1, 2])
  np.testing.assert_allclose(S, [[1.5, 0.5], [0.9, np.nan], [0.8, 2.0]])
  assert heat.edges(S) == [
    ((0.5, 0.5), (-0.5, 0.5)),  # batch 1: between K = 1 and 2
    ((-0.5, 0.5), (0.5, 0.5)),  # K = 1: between batch 1 and 4
    ((0.5, 0.5), (1.5, 2.5)),  # batch 8: between K = 1 and 2
  ]


def test_drafts_have_names_of_their_own():
  """Every export of the trainer is a folder called draft."""
  weights = "runs/a/draft", "runs/b/draft", "x/runs/a/draft", "runs/a/draft"
  records = [
    decode(config__draft__weights=x, config__draft__name="lm") for x in weights
  ]
  layers = [0, 1, 2, 3, 9]
  records.append(
    decode(
      config__draft__name="lm",
      config__draft__layers=layers,
      config__draft__head=128,
      config__draft__temperature=0.5,
    )
  )
  records += [decode(1), decode(2)]
  lookup = dict(config__draft__lookup=2)  # of a feature head alone
  head = dict(config__draft__name="feature", config__draft__weights="runs/h")
  records += [decode(**lookup), decode(**lookup, **head), decode(**head)]
  assert naming.labels(records) == [
    "a/draft",
    "b/draft",
    "runs/a/draft",
    "a/draft",
    "layers 0..3+9 head 128 T 0.5",
    "ngram",
    "ngram",
    "ngram",
    "h copies of 2",
    "h",
  ]


def test_a_setting_is_what_runs_differ_in():
  changed = dict(config__loss=[["forward_kl", 1 / 3], ["total_variation", 1.0]])
  records = [training(), training(seed=1), training(**changed)]
  runs = [
    gather.Run(str(n), "training", "done", record=record)
    for n, record in enumerate(records)
  ]
  table = rows.flat(runs)[1]
  assert naming.settings(table) == [
    "forward_kl",
    "forward_kl",
    "forward_kl to 0.33, then total_variation",
  ]
  assert naming.settings(table[:1]) == [""]


def test_numbers_in_names_are_in_order(tmp_path):
  for K in (10, 9):
    _write(tmp_path / f"K={K}.json", decode(K))
  names = [run.name for run in gather.gather(tmp_path).runs]
  assert names == ["K=9.json", "K=10.json"]


def test_a_log_is_what_a_terminal_would_show(tmp_path):
  path = tmp_path / "log.txt"
  lines = [f"line {n}" for n in range(5000)]
  path.write_bytes("\n".join(lines).encode() + b"\n\xff\x07end\n\n")
  assert (
    lenient.tail(path, 3)
    == "line 4998\nline 4999\n\N{REPLACEMENT CHARACTER}end"
  )
  assert "no log" in lenient.tail(tmp_path / "none")
