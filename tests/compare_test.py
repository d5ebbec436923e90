"""The command that compares drafts: what it is asked, what it makes of it."""

import copy
import functools
import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import heads
import numpy as np
import pytest

from configs import tiny
from specjax import compare, pair, play, predict, ranking, timing, title
from specjax.errors import UserError
from specjax.models import load

ROOT = Path(__file__).parents[1]
OPEN = functools.partial(load.opened, draft=True)


def _asked(drafts="ngram", lengths="1,2", *more, config=None):
  split = lambda text: text.split(",")
  config = config or tiny.get_config()
  return compare.asked(
    config.lock(), split(drafts), split(lengths), *map(split, more)
  )


def test_what_is_asked():
  asked = _asked("ngram,0+2,-1,0+2,hf://a/b+c", "4,1,4", "-1,0.5", "0.9,1")
  assert list(asked.configs) == ["ngram", "0+2", "-1", "hf://a/b+c"]
  drafts = [c.draft for c in asked.configs.values()]
  assert [d.name for d in drafts] == ["ngram", "lm", "lm", "lm"]
  assert [d.layers for d in drafts] == [(), (0, 2), (-1,), ()]
  assert [d.weights for d in drafts] == ["", "", "", "hf://a/b+c"]
  assert {d.num_tokens for d in drafts} == {4}
  assert asked.lengths == (1, 4)
  assert asked.variants == (
    dict(top_p=0.9),
    dict(top_p=1.0),
    dict(temperature=0.5, top_p=0.9),
    dict(temperature=0.5, top_p=1.0),
  )
  assert _asked().variants == ({},)


def test_a_configs_own_draft_does_not_leak():
  config = tiny.get_config()
  config.draft.update(name="lm", weights="folder", head=300, temperature=0.5)
  asked = _asked("ngram,0+1", config=config)
  ngram, layers = (c.draft for c in asked.configs.values())
  assert (ngram.weights, ngram.head, ngram.temperature) == ("", 0, -1.0)
  assert (layers.weights, layers.head, layers.temperature) == ("", 300, 0.5)
  assert config.draft.name == "lm" and config.verifier == "block"


@pytest.mark.parametrize(
  "args, said",
  [
    (("",), "no drafts"),
    (("replay",), "--drafts=replay: it knows the answer"),
    (("ngram", "0,1"), r"--lengths must be in 1..1000, got 0,1"),
    (("ngram", "1,2000"), "--lengths must be"),
    (("ngram", "two"), "--lengths: expected numbers, got 'two'"),
    (("ngram", "1", "a"), "--temperatures: expected numbers, got 'a'"),
    (("ngram", "1", "1", "0"), "--temperatures and --top_ps: top_p must be"),
    (("ngram", "1", "nan"), "temperature must be >= 0 and finite"),
  ],
)
def test_what_cannot_be_meant(args, said):
  with pytest.raises(UserError, match=said):
    _asked(*args)


def _opened(drafts, lengths="1"):
  config = tiny.get_config()
  target = load.random(config.architecture)
  sizes = play.Sizes(1, 256, 64, 100)
  asked = _asked(drafts, lengths)
  return compare.opened(asked, target, sizes, OPEN)


def test_what_does_not_fit_the_target():
  assert _opened("0+2", "254")["0+2"].layers == (0, 2)
  with pytest.raises(UserError, match="holds 256 tokens, so K may be 1 to 254"):
    _opened("ngram", "1,255")
  with pytest.raises(UserError, match=r"--drafts=0\+3: .* layers 0 to 2"):
    _opened("ngram,0+3")
  with pytest.raises(UserError, match="--drafts=nowhere: .*nowhere"):
    _opened("nowhere")


def test_weights_are_of_the_method_that_they_say(tmp_path):
  """A feature head beside others; a head's size is not for it."""
  model = load.model(load.random(tiny.get_config().architecture))
  head = heads.made(model, features=(1, 2))
  folder = heads.saved(tmp_path / "head", model, head)
  found = _opened(f"0,{folder},ngram")
  assert [x.name for x in found.values()] == ["lm", "feature", "ngram"]
  assert found[folder].features == (1, 2)
  copies = f"{folder}{title.COPIES}"
  found = _opened(f"{folder},{copies}")
  assert [x.lookup for x in found.values()] == [0, compare.LOOKUP]
  assert {x.name for x in found.values()} == {"feature"}
  config = tiny.get_config()
  config.draft.head = 300
  asked = compare.asked(config, [folder], ["1"])
  sizes, target = play.Sizes(1, 256, 64, 100), load.random(config.architecture)
  with pytest.raises(UserError, match="draft.head is for .*name=lm; the draft"):
    compare.opened(asked, target, sizes, OPEN)


def _texts(alpha, P=5, N=12, K=4, seed=0):
  """Of one alpha everywhere."""
  rng = np.random.default_rng(seed)
  log_q = np.where(rng.random((P, N, K)) < alpha, 0.0, -9.0)
  behind = np.arange(N)[:, None] + np.arange(K) >= N
  log_q[:, behind] = -np.inf
  full = np.full((P, N), alpha)
  return predict.Texts(np.full(P, N), np.zeros((P, N)), log_q, full)


def _costs(draft):
  cost = lambda x: timing.Cost(x, x, x)
  rounds = {K: cost(1 + 0.1 * K + draft * K) for K in (1, 2, 4)}
  calls = {K + 1: cost(1 + 0.1 * K) for K in (0, 1, 2, 4)}
  return timing.Costs(cost(1.0), calls, cost(draft), rounds, 1, 64)


def _rows():
  found = {
    "good": [({}, _texts(0.9)), (dict(temperature=0.5), _texts(0.7))],
    "fast": [({}, _texts(0.6))],
  }
  costs = {"good": _costs(0.2), "fast": _costs(0.01)}
  return ranking.rows(found, costs, (1, 4)), found, costs


def test_rows_are_predictions_in_order():
  rows, found, costs = _rows()
  assert len(rows) == 3 * 2 * 2
  S = [row["speedup"] for row in rows]
  assert sorted(S, reverse=True) == S
  intervals = np.array([row["speedup_interval"] for row in rows])
  assert (intervals[:, 0] < 0.98 * intervals[:, 1]).sum() > 6
  for row in rows:
    (some,) = (x for v, x in found[row["draft"]] if v == row["sampling"])
    want, K = predict.predict(some, row["verifier"]), row["K"]
    assert row["tokens_per_call"] == want.tokens.mean[K]
    speedups = predict.speedups(want, costs[row["draft"]])
    assert row["speedup"] == speedups.mean[K]
    low, high = row["speedup_interval"]
    assert low <= row["speedup"] <= high
    assert row["iid"]["speedup"] == speedups.iid[K]
    assert np.prod(list(row["parts"].values())) == pytest.approx(row["speedup"])
    assert 60 / sum(row["rounds"]) == pytest.approx(row["tokens_per_call"])


def _report(tmp_path, **changes):
  config = tiny.get_config()
  config.draft.update(name="lm", layers=(0, 2), num_tokens=4)
  found = {
    "config": config.to_dict(),
    "draft": {"K": 4, "verifier": "block"},
    "speedup": 1.5,
    "tokens_per_call": 2.5,
  }
  for name, value in changes.items():
    part = found
    *path, last = name.split("__")
    for key in path:
      part = part[key]
    part[last] = value
  path = tmp_path / "report.json"
  path.write_text(json.dumps(found))
  return [str(path)]


def test_what_was_measured_joins_its_row(tmp_path):
  paths = _report(tmp_path)
  points = ranking.measured(paths, tiny.get_config(), ["0+2", "ngram"])
  assert points[0]["draft"] == "0+2" and points[0]["speedup"] == 1.5
  row = lambda **x: dict(draft="0+2", sampling={}, verifier="block", K=4) | x
  rows = [row(), row(K=2), row(verifier="token"), row(draft="ngram")]
  rows.append(row(sampling=dict(temperature=0.5)))
  found = [r["measured"] for r in ranking.add_measured(rows, points)]
  assert found == [points[0], None, None, None, None]
  assert ranking.measured([""], tiny.get_config(), ["ngram"]) == []


def test_what_copied_joins_what_copies(tmp_path):
  """As it was done: other methods have the key in their config as well."""
  ask = dict(config__draft__layers=(), config__draft__lookup=2)
  plain = _report(tmp_path, **ask, config__draft__name="ngram")
  (point,) = ranking.measured(plain, tiny.get_config(), ["ngram"])
  assert point["draft"] == "ngram"
  ask |= dict(config__draft__name="feature", config__draft__weights="a")
  copied = _report(tmp_path, **ask, draft__lookup=2)
  (point,) = ranking.measured(copied, tiny.get_config(), ["a+ngram"])
  assert point["draft"] == "a+ngram"


def test_a_temperature_that_the_config_gives_the_draft(tmp_path):
  """Its report belongs to the row that changes nothing."""
  config = tiny.get_config()
  config.draft.temperature = 0.5
  row = dict(draft="0+2", sampling={}, verifier="block", K=4)
  for T, joins in ((0.5, True), (0.7, False)):
    paths = _report(tmp_path, config__draft__temperature=T)
    points = ranking.measured(paths, config, ["0+2"])
    (found,) = ranking.add_measured([row], points)
    assert (found["measured"] is not None) == joins


@pytest.mark.parametrize(
  "changes, said",
  [
    (dict(speedup=None), "is not what is predicted"),
    (dict(config__batch_size=2), "0\\+2 at batch 2 is not what"),
    (dict(config__draft__layers=[1]), "1 at batch 1 is not what"),
    (dict(config__target="other"), "it has another target"),
    (dict(config__sampling__temperature=0.3), "it has another sampling"),
    (dict(config__draft__head=300), "it has another draft.head"),
    (dict(draft=None), "is no report of decode.py that speculated"),
  ],
)
def test_a_report_of_something_else(tmp_path, changes, said):
  paths = _report(tmp_path, **changes)
  with pytest.raises(UserError, match=said):
    ranking.measured(paths, tiny.get_config(), ["0+2", "ngram"])


def test_no_report_at_all(tmp_path):
  path = tmp_path / "x.json"
  with pytest.raises(UserError, match="cannot read --measured=.*No such file"):
    ranking.measured([str(path)], tiny.get_config(), ["ngram"])
  path.write_text("{")
  with pytest.raises(UserError, match="is no report"):
    ranking.measured([str(path)], tiny.get_config(), ["ngram"])


@pytest.mark.parametrize(
  "draft, said",
  [
    ("0+1+2+6+7+8+9", "0..2+6..9"),
    ("0+1+28+29", "0+1+28+29"),
    ("9+3+0+1+2", "9+3+0..2"),
    ("29", "29"),
    ("runs/a+b/draft", "a+b/draft"),  # or all trained drafts are one
    ("/models/small/", "small"),
    ("runs/a/draft+ngram", "a/draft and copies"),
  ],
)
def test_many_layers_have_a_short_name(draft, said):
  assert title.label(dict(draft=draft, sampling={})) == said


def test_the_winner_says_what_to_type():
  rows, _, _ = _rows()
  rows = ranking.add_measured(rows, [])
  drafts = {
    "good": dict(name="lm", layers=[0, 2], lookup=None),
    "fast": dict(name="ngram", layers=None, lookup=None),
  }
  found = dict(rows=rows, winner=rows[0], drafts=drafts)
  best = rows[0]
  said = ranking.winner(found)
  assert said.startswith(f"{best['draft']}: {best['speedup']:.2f} x with ")
  assert f"--config.draft.num_tokens={best['K']} " in said
  assert "--config.verifier=block" in said
  other = next(r for r in rows if r["sampling"])
  said = ranking.winner(found | dict(winner=other))
  assert "good T 0.5: " in said and "draft.temperature=0.5" in said
  assert "--config.draft.name=lm --config.draft.layers=0,2" in said
  copies = f"runs/a/draft{title.COPIES}"
  head = dict(name="feature", layers=None, lookup=3)
  best = best | dict(draft=copies)
  said = ranking.winner(dict(rows=[best], winner=best, drafts={copies: head}))
  assert "draft.weights=runs/a/draft --config.draft.lookup=3 " in said
  cut = other | dict(sampling=dict(top_p=0.9))
  assert "--config.draft.top_p=0.9 " in ranking.winner(found | dict(winner=cut))
  drafts["good"] = dict(name="feature", layers=None, lookup=None)
  said = ranking.winner(found | dict(winner=other))
  assert "--config.draft.name=feature --config.draft.weights=good" in said
  said = ranking.winner(found | dict(winner=None))
  assert said.startswith("no draft pays") and "plain decoding is faster" in said


def _cells(rows):
  found = ranking.table(dict(rows=rows))
  columns = [list(column.cells) for column in found.columns]
  return list(zip(*columns, strict=True))


def test_the_table_says_once_what_both_verifiers_do():
  rows = ranking.add_measured(_rows()[0], [])
  rows = [r | dict(speedup=r["speedup"] * 0.99**i) for i, r in enumerate(rows)]
  apart = _cells(rows)
  assert len(apart) == len(rows) and apart[0][2] == str(rows[0]["K"])
  best = rows[0]
  low, high = best["speedup_interval"]
  assert apart[0][4] == f"{best['speedup']:.2f} ({low:.2f}-{high:.2f})"
  error = best["iid"]["speedup"] / best["speedup"] - 1
  assert apart[0][6] == f"{best['iid']['speedup']:.2f} ({error:+.0%})"
  token = dict(verifier="token", measured=dict(speedup=1.234))
  twice = [
    x for row in rows for x in (row | dict(verifier="block"), row | token)
  ]
  merged = _cells(twice)
  assert {cells[1] for cells in merged} == {"either"}
  assert merged[0][-1] == "1.23" and len(merged) == len(rows)


def test_an_unsteady_clock_is_told():
  spread = dict(plain_step=[1, 1.05], round_2=[1.9, 2.05], drafted_token=[0, 9])
  costs = dict(plain_step=1.0, round_2=2.0, drafted_token=1.0, spread=spread)
  found = dict(drafts=dict(x=dict(costs=costs)))
  assert ranking.noise(found) is None
  spread["round_2"] = [1.5, 2.1]
  assert "round_2 of x by 30%" in ranking.noise(found)


def test_the_picture(monkeypatch):
  """With one draft and with many, with and without what was measured."""
  from specjax import plots

  rows, _, _ = _rows()
  point = dict(draft="good", verifier="block", K=4, temperature=-1.0)
  point |= dict(top_p=-1.0, tokens_per_call=2.0, speedup=1.4)
  drafts = {
    "good": dict(costs=dict(C=5.0, modelled=False)),
    "fast": dict(costs=dict(C=None, modelled=False)),  # free
  }
  figures, close = [], plots.plt.close
  monkeypatch.setattr(plots.plt, "close", figures.append)
  for points in ([], [point]):
    some = ranking.add_measured(copy.deepcopy(rows), points)
    found = dict(rows=some, lengths=[1, 4], drafts=drafts, batch=1)
    png = plots.prediction(found)
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert 1500 < width < 2500 and 500 < height < 1500
  drafts["good"]["costs"]["modelled"] = True
  plots.prediction(found | dict(batch=8))
  titles = [figure.axes[0].get_title() for figure in figures]
  assert titles[1:] == [
    "Predicted speed-up at batch 1",
    "Modelled speed-up at batch 8",
  ]
  for figure in figures:
    close(figure)


def _run(*args):
  command = [sys.executable, "-m", "specjax.predict"]
  return subprocess.run(
    [*command, "--config=configs/tiny.py", *args],
    cwd=ROOT,
    env=dict(os.environ, COLUMNS="80"),
    capture_output=True,
    text=True,
    timeout=500,
  )


def test_a_run(tmp_path):
  """Its file has all that it takes to check it later."""
  prompts = tmp_path / "prompts.jsonl"
  prompts.write_text(
    '{"prompt": "To be", "seed": 5}\n{"turns": ["a", "b"]}\n', "utf-8"
  )
  files = tmp_path / "found.json", tmp_path / "found.png"
  model = load.model(load.random(tiny.get_config().architecture))
  head = heads.made(model, features=(0, 2), token=0.8)
  folder = heads.saved(tmp_path / "head", model, head)
  run = _run(
    f"--drafts=ngram,0+2,{folder}",
    "--lengths=1,3",
    "--turns=1",
    "--temperatures=-1,0.5",
    f"--config.prompts.path={prompts}",
    "--config.batch_size=2",
    "--config.max_new_tokens=16",
    "--at=4,4096",
    "--machine=2e10,2e11",
    f"--json={files[0]}",
    f"--png={files[1]}",
  )
  assert run.returncode == 0, run.stderr
  assert "3 of 3 answers" in run.stderr and "Traceback" not in run.stderr
  assert "tokens a call" in run.stdout and "0+2 T 0.5" in run.stdout
  assert "head T 0.5" in run.stdout
  assert files[1].read_bytes()[:4] == b"\x89PNG"
  found = json.loads(files[0].read_text())
  plain, prediction = found["autoregressive"], found["prediction"]
  assert found["config"]["seed"] == 0 and found["versions"]["jax"]
  assert [o["seed"] for o in plain["outputs"]] == [5, 0, 0]
  text = np.array(list(b"To be"), "<i4").tobytes()
  sha = hashlib.sha256(text).hexdigest()
  assert plain["outputs"][0]["prompt_sha256"] == sha
  assert len(prediction["rows"]) == (1 + 2 + 2) * 2 * 2
  length = [len(o["token_ids"]) for o in plain["outputs"]]
  assert sum(length) == 48
  for row in prediction["rows"]:
    costs = prediction["drafts"][row["draft"]]["costs"]
    tokens = sum(length) / sum(row["rounds"])
    assert row["tokens_per_call"] == pytest.approx(tokens)
    cost = costs[f"round_{row['K']}"] / costs["plain_step"]
    assert row["speedup"] == pytest.approx(tokens / cost)
    assert (costs["batch"], costs["context"]) == (4, 4096)
    assert costs["modelled"] and prediction["batch"] == 4
  assert "modelled for batch 4" in run.stdout
  assert prediction["flags"]["drafts"] == ["ngram", "0+2", folder]
  assert prediction["drafts"][folder]["features"] == [0, 2]
  assert prediction["interval"]["level"] == 0.95
  assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
  "args, said",
  [
    (("--drafts=replay",), "--drafts=replay: it knows the answer"),
    (("--at=8,2048",), "takes both --at=BATCH,CONTEXT and --machine="),
    (("--at=8,x", "--machine=1,1"), "above 0, such as --at=8,2048"),
    (("--at=8,0", "--machine=1,1"), "got --at=8,0 --machine=1,1"),
    (
      ("--at=8,9", "--machine=1,1", "--measured=x.json"),
      "leave one of them away",
    ),
    (("--png=/nowhere/x.png",), "cannot write --png=/nowhere/x.png"),
    (("--lengths=300",), "K may be 1 to 254"),
  ],
)
def test_mistakes_cost_one_line(args, said):
  run = _run(*args)
  assert run.returncode == 2 and run.stdout == ""
  assert said in run.stderr and run.stderr.count("\n") == 1


def test_pairs_of_a_sweep_share_their_model():
  """A part of the target has the target's own arrays."""
  drafts = _opened("0+2")
  model = load.model(load.random(tiny.get_config().architecture))
  loaded = pair.load(drafts["0+2"], model, dtype="float32")
  ours, theirs = model.params, loaded.model.params
  assert theirs["embed"] is ours["embed"]
