"""The trainer: a run that is stopped anywhere ends as one that was not.

The pair is tiny and random. Runs are real: `train.run` in this process, and
`train_draft.py` in another one where a kill is the point.
"""

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import documented
import jax
import numpy as np
import pytest
import safetensors

from configs import tiny_train
from specjax import (
  checkpoint,
  costs,
  data,
  feed,
  generate,
  metrics,
  overlap,
  recipe,
  record,
  request,
  shards,
  terminal,
  train,
  trainlog,
  trajectories,
  workdir,
)
from specjax.drafters import lm
from specjax.errors import UserError
from specjax.models import load

ROOT = Path(__file__).parents[1]
# all that a run has: rows of the draft's own, a trimmed head, three schedules
SMALL = {
  "steps": 6,
  "batch_size": 4,
  "length": 40,
  "log_every": 1,
  "draft.head": 100,
  "optimiser.learning_rate": 1e-3,
  "data.samples": 1,
  "data.limit": 20,
  "data.max_new": 16,
  "data.from_draft": 0.25,
  "data.refresh_every": 3,
  "evaluation.every": 3,
  "evaluation.rows": 4,
  "checkpoint.every": 2,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return tmp_path_factory.mktemp("trajectories")


@pytest.fixture(scope="module")
def small(cache):
  """Give (changes) -> the config of a short run."""

  def make(**changes):
    config = tiny_train.get_config()
    config.architecture.update(hidden_size=32, num_hidden_layers=2)
    changes = {key.replace("__", "."): x for key, x in changes.items()}
    config.update_from_flattened_dict(
      SMALL | {"data.cache": str(cache)} | changes
    )
    return config.lock()

  return make


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
  """The folder of a run that nothing has stopped."""
  folder = tmp_path_factory.mktemp("whole") / "run"
  assert train.run(small(), folder) == 0
  return folder


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
  monkeypatch.chdir(ROOT)


def _state(folder):
  """{name: array} of the newest checkpoint, all of it."""
  import orbax.checkpoint as ocp

  number = checkpoint.numbers(folder / train.SAVES)[-1]
  where = folder / train.SAVES / str(number) / "tree"
  tree = ocp.StandardCheckpointer().restore(where.absolute())
  named = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(k): np.asarray(x) for k, x in named}


def _rows(folder):
  """What a run has logged, without what a clock says."""
  clocks = ("time", "tokens_per_second")
  return [
    {key: x for key, x in row.items() if key not in clocks}
    for row in trainlog.read(folder)
  ]


def _assert_same_run(folder, whole):
  """Parameters, moments, sums, counts, log and export: bit for bit."""
  got, want = _state(folder), _state(whole)
  assert got.keys() == want.keys() and len(want) > 30
  for name, x in want.items():
    np.testing.assert_array_equal(got[name], x, err_msg=name)
  assert _rows(folder) == _rows(whole)
  steps = [row["step"] for row in _rows(folder)]
  assert steps == sorted(set(steps))
  (weights,) = (whole / train.DRAFT).glob("*.safetensors")
  got = folder / weights.relative_to(whole)
  assert got.read_bytes() == weights.read_bytes()


def _stop_at(monkeypatch, number, *kinds):
  """Send signals to this process at its number-th micro-batch from 0."""
  batch = feed.batch

  def sent(config, fed, n):
    if n == number:
      for kind in kinds:
        os.kill(os.getpid(), kind)
    return batch(config, fed, n)

  monkeypatch.setattr(feed, "batch", sent)


def test_more_prompts_keep_the_answers_of_those_before(
  cache, small, monkeypatch
):
  monkeypatch.setattr(feed, "PART", 8)
  config, told = small(data__limit=20), []
  opened = load.random(config.architecture.to_dict(), seed=config.seed)
  target = load.model(opened, dtype="float32")
  watch = shards.QUIET._replace(note=told.append)
  some = feed.collect(small(data__limit=16), target, watch)
  made = []
  answers = data.from_target

  def counted(model, todo, *args, **options):
    before = {p.name for p in cache.iterdir()}
    result = answers(model, todo, *args, **options)
    made.append({p.name for p in cache.iterdir()} - before)
    return result

  monkeypatch.setattr(data, "from_target", counted)
  more = feed.collect(config, target, watch)
  assert [len(x) for x in made] == [0, 0, 1]  # folders; two were there
  rows = len(some.length)
  np.testing.assert_array_equal(more.length[:rows], some.length)
  width = min(more.tokens.shape[1], some.tokens.shape[1])
  np.testing.assert_array_equal(
    more.tokens[:rows, :width], some.tokens[:, :width]
  )
  assert len(more.length) > rows
  assert "prompts 17 to 20 of 20" in told


# of 12 micro-batches, two a step: within a step, at a step's end, at a refresh,
# at the very first and the very last
@pytest.mark.parametrize(
  "number", [6, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 5, 11))]
)
def test_a_stop_changes_nothing(
  small, whole, tmp_path, monkeypatch, capfd, number
):
  """Gradient sums of half a step, moments, schedules, data (B18, B54)."""
  folder = tmp_path / "run"
  _stop_at(monkeypatch, number, signal.SIGTERM)
  assert train.run(small(), folder) == 128 + signal.SIGTERM
  monkeypatch.undo()
  monkeypatch.chdir(ROOT)
  assert checkpoint.numbers(folder / train.SAVES)[-1] == number + 1
  found = json.loads((folder / trainlog.RECORD).read_text())
  documented.check("Training", found)
  assert found["interrupted"] is True and found["draft"] is None
  assert (found["steps"], found["steps_planned"]) == ((number + 1) // 2, 6)
  told = " ".join(capfd.readouterr().err.split())
  assert f"SIGTERM: saved at step {(number + 1) // 2}; to go on, type:" in told
  assert sys.orig_argv[-1] in told
  shape = _state(folder)["['gradient']['embed']"]
  assert shape.any() == (number % 2 == 0)
  assert train.run(small(), folder) == 0
  assert "going on from step" in capfd.readouterr().err
  _assert_same_run(folder, whole)
  ended = json.loads((folder / trainlog.RECORD).read_text())
  assert (ended["interrupted"], ended["first_step"]) == (False, found["steps"])
  same = "loss", "tokens", "curve", "evaluations", "best_step", "config"
  want = json.loads((whole / trainlog.RECORD).read_text())
  assert {key: ended[key] for key in same} == {key: want[key] for key in same}


HEAD = {
  "draft.name": "feature",
  "draft.layers": (),
  "draft.features": (0, -1),
  "draft.depth_weights": (1.0, 0.5),
  "draft.embedding": "shared",
  "data.from_draft": 0.0,
  "loss": (("forward_kl", 0.5), ("expected_rounds", 1.0, {"num_draft": 2})),
}


def test_a_feature_head_is_trained_and_goes_on(
  small, whole, tmp_path, monkeypatch
):
  """Stopped within a step or not, bit for bit (B18); logged as an lm is."""
  folders = [tmp_path / name for name in ("whole", "run")]
  assert train.run(small(**HEAD), folders[0]) == 0
  with monkeypatch.context() as m:
    _stop_at(m, 6, signal.SIGTERM)
    assert train.run(small(**HEAD), folders[1]) == 128 + signal.SIGTERM
  assert train.run(small(**HEAD), folders[1]) == 0
  _assert_same_run(*folders[::-1])
  state = _state(folders[0])
  assert "['params']['fuse']['kernel']" in state
  assert "['params']['embed']" not in state
  assert _rows(folders[0])[-1].keys() == _rows(whole)[-1].keys()


def test_a_run_begins_with_an_export(small, whole, tmp_path):
  """Its export knows the prompts of both, and is as narrow as was asked."""
  letters = "abcdefghijklmnopqrstu"
  rows = [letters[i:] + letters[:i] for i in range(20)]  # 13 of these are a run
  path = tmp_path / "others.jsonl"
  rows = [json.dumps({"prompt": " ".join(row[:14])}) for row in rows]
  path.write_text("\n".join(rows))
  draft = shutil.copytree(whole / train.DRAFT, tmp_path / "draft")
  overlap.write(draft, np.array([1, 2, 3], np.uint64))
  more = {"draft.weights": str(draft), "draft.layers": (), "draft.head": 0}
  more |= {"data.path": str(path), "data.from_draft": 0.0, "steps": 1}
  folder = tmp_path / "run"
  config = small(**more, export_dtype="float16")
  assert train.run(config, folder) == 0
  both = overlap.read(folder / train.DRAFT)
  assert both[:3].tolist() == [1, 2, 3] and len(both) > 20
  (weights,) = (folder / train.DRAFT).glob("*.safetensors")
  with safetensors.safe_open(weights, "numpy") as f:
    assert {f.get_slice(name).get_dtype() for name in f.keys()} == {"F16"}  # noqa: SIM118
  assert "float16" in (folder / train.DRAFT / "README.md").read_text()


@pytest.mark.slow
def test_stops_again_and_again(small, whole, tmp_path, monkeypatch):
  """Ctrl-C at every third micro-batch, by resumed runs too."""
  folder = tmp_path / "run"
  for number in (2, 5, 8):
    with monkeypatch.context() as m:
      _stop_at(m, number, signal.SIGINT)
      assert train.run(small(), folder) == 128 + signal.SIGINT
  assert train.run(small(), folder) == 0
  _assert_same_run(folder, whole)
  lines = (folder / trainlog.RUNS).read_text().splitlines()
  assert [json.loads(line)["step"] for line in lines] == [0, 1, 3, 4]


@pytest.mark.slow
def test_a_run_with_hidden_states_kept(small, tmp_path, cache, monkeypatch):
  """It is the run without, but for rounding, and goes on bit for bit.

  The draft's head is trimmed: the target's other logits are not made.
  """
  config = lambda kept: small(data__from_draft=0.0, data__keep_hidden=kept)
  folders = [tmp_path / name for name in ("without", "kept", "stopped")]
  for kept, folder in zip((False, True), folders, strict=False):
    assert train.run(config(kept), folder) == 0
  (states,) = cache.glob("hidden-*")
  number = states.stat().st_mtime_ns
  _stop_at(monkeypatch, 4, signal.SIGTERM)
  assert train.run(config(True), folders[2]) == 128 + signal.SIGTERM
  monkeypatch.undo()
  monkeypatch.chdir(ROOT)
  assert train.run(config(True), folders[2]) == 0
  _assert_same_run(folders[2], folders[1])
  assert states.stat().st_mtime_ns == number  # nothing was computed again
  for plain, row in zip(*map(_rows, folders[:2]), strict=True):
    for key in plain.keys() & {"loss", "alpha", "mix/alpha", "mix/S_block"}:
      assert row[key] == pytest.approx(plain[key], rel=1e-2), key


def test_a_second_signal_stops_at_once(small, whole, tmp_path, monkeypatch):
  """What is saved stays, and the run goes on from it."""
  folder = tmp_path / "run"
  _stop_at(monkeypatch, 7, signal.SIGINT, signal.SIGINT)
  with pytest.raises(KeyboardInterrupt):
    train.run(small(), folder)
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
  monkeypatch.undo()
  monkeypatch.chdir(ROOT)
  # a process would be gone now; here a thread goes on to save
  while any(folder.glob("*/*tmp*")):
    time.sleep(0.05)
  assert checkpoint.numbers(folder / train.SAVES)[-1] <= 6
  assert train.run(small(), folder) == 0
  _assert_same_run(folder, whole)


def test_a_finished_run_stays_finished(small, whole, capfd):
  """Typing the command again adds nothing and shows the table (B18)."""
  before, rows = _state(whole), _rows(whole)
  told = (whole / trainlog.RECORD).read_bytes()
  assert train.run(small(), whole) == 0
  assert "predicted" in capfd.readouterr().err
  assert _rows(whole) == rows
  # how long it took, not how long it took to see that nothing is left
  assert (whole / trainlog.RECORD).read_bytes() == told
  for name, x in _state(whole).items():
    np.testing.assert_array_equal(x, before[name])


def test_what_is_beside_a_run(whole):
  config = json.loads((whole / "config.json").read_text())
  assert config["draft.head"] == 100 and config["steps"] == 6
  first = json.loads((whole / "runs.jsonl").read_text().splitlines()[0])
  assert first["command"] == sys.orig_argv
  assert first["versions"]["jax"] == jax.__version__
  assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")
  rows = _rows(whole)
  assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
  judged = [row["step"] for row in rows if "mix/S_block" in row]
  assert judged == [0, 3, 6]
  assert [step_ for step_, _ in _events(whole)] == [row["step"] for row in rows]
  for (_, tags), row in zip(_events(whole), rows, strict=True):
    assert {t: x for t, x in tags.items() if t in row} == pytest.approx(
      {t: x for t, x in row.items() if t != "step"}, rel=1e-6
    )


def test_the_record_of_a_run(whole):
  """Its keys are the documented ones, its numbers those of the log."""
  found = json.loads((whole / trainlog.RECORD).read_text())
  documented.check("Training", found)
  rows = trainlog.read(whole)
  steps = [row for row in rows if "loss" in row]
  assert found["curve"] == {
    key: [row[key] for row in steps] for key in ("step", "loss", "alpha")
  }
  assert found["tokens"] == sum(row["tokens"] for row in steps) > 0
  assert found["loss"] == steps[-1]["loss"] and found["dtype"] == "float32"
  assert (found["steps"], found["interrupted"]) == (6, False)
  assert found["config"] == json.loads((whole / "config.json").read_text())
  assert (whole / found["draft"] / "config.json").exists()
  judged = {row["step"]: row for row in rows if "mix/S_block" in row}
  assert [x["step"] for x in found["evaluations"]] == [*judged]
  assert found["best_step"] == _check_best(whole)
  for told in found["evaluations"]:
    row, K = judged[told["step"]], found["config"]["draft.num_tokens"]
    assert (
      told["alpha"] == row["mix/alpha"] and len(told["alpha_by_depth"]) == K
    )
    for rule in ("block", "token"):
      own = told[rule]
      assert own["survival"] == [
        1.0,
        *(row[f"mix/A_{j}_{rule}"] for j in range(1, K + 1)),
      ]
      assert own["tokens_per_call"] == row[f"mix/E_N_{rule}"]
      assert own["speedup"] == row[f"mix/S_{rule}"]
      assert own["best_k"] == row[f"mix/k_{rule}"]


def test_a_record_has_no_nan(whole, tmp_path, monkeypatch):
  """JSON has none: null; and a file that was there is whole until then."""
  rows = trainlog.read(whole)
  rows[-1] |= {"loss": math.nan, "mix/forward_kl": math.inf}
  start = json.loads((whole / trainlog.RUNS).read_text().splitlines()[0])
  config = tiny_train.get_config()
  job = types.SimpleNamespace(config=config, folder=tmp_path, best=None)
  job.costs = costs.given(config.costs, config.draft.num_tokens)
  monkeypatch.setattr(record.checkpoint, "latest", lambda manager: 3)
  record.save(job, rows, start, 6, 0.0)
  text = (tmp_path / trainlog.RECORD).read_text()
  found = json.loads(text, parse_constant=pytest.fail)
  assert found["loss"] is None
  assert found["evaluations"][-1]["forward_kl"] is None


def _events(folder):
  """[(step, {tag: value})] of TensorBoard's file: its records, by hand."""
  from tensorboardX.proto import event_pb2

  (path,) = folder.glob("events.out.tfevents.*")
  data, at, found = path.read_bytes(), 0, []
  while at < len(data):
    size = int.from_bytes(data[at : at + 8], "little")
    event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
    at += 16 + size
    if event.summary.value:
      tags = {value.tag: value.simple_value for value in event.summary.value}
      found.append((event.step, tags))
  return found


def _check_best(folder):
  """Kept is what has the largest predicted S of all evaluations."""
  rows = {row["step"]: row for row in _rows(folder) if "mix/S_block" in row}
  best = max(rows, key=lambda n: rows[n]["mix/S_block"])
  assert checkpoint.numbers(folder / train.BEST) == [best]
  with checkpoint.opened(folder / train.BEST, 1) as manager:
    told = checkpoint.meta(manager, best)
  assert told["score"] == rows[best]["mix/S_block"]
  return best


def test_the_best_is_the_one_with_the_largest_prediction(whole):
  _check_best(whole)


def _command(*more):
  return [
    *(sys.executable, "train_draft.py", "--config=configs/tiny_train.py"),
    *more,
  ]


def _wait_for(folder, step_, process):
  """Until the log of a run has a step."""
  until = time.time() + 200
  while not any(row["step"] >= step_ for row in trainlog.read(folder)):
    assert time.time() < until and process.poll() is None
    time.sleep(0.05)


@pytest.mark.slow
def test_killed_at_a_random_step(tmp_path, cache):
  """kill -9, SIGTERM and Ctrl-C by the command line, bit-equal at the end."""
  more = [f"--config.{key}={x}" for key, x in SMALL.items()]
  more += [
    f"--config.data.cache={cache}",
    "--config.steps=60",
    "--config.checkpoint.every=7",
  ]
  run = lambda folder: [*_command(*more), f"--workdir={folder}"]
  quiet = dict(stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
  straight, folder = tmp_path / "straight", tmp_path / "killed"
  assert not subprocess.run(run(straight), **quiet, check=False).returncode
  at = np.random.default_rng().integers(1, 50, 3)
  print("stopped at", sorted(at))
  kinds = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
  for kind, number in zip(kinds, sorted(at), strict=True):
    with subprocess.Popen(run(folder), **quiet) as process:
      _wait_for(folder, number, process)
      process.send_signal(kind)
      _, told = process.communicate()
      wanted = -9 if kind == signal.SIGKILL else 128 + kind
      assert process.returncode == wanted, told
    if kind != signal.SIGKILL:
      assert f"--workdir={folder}" in told and "to go on, type" in told
  assert not subprocess.run(run(folder), **quiet, check=False).returncode
  _assert_same_run(folder, straight)


def test_tiny_train_raises_what_is_measured(tmp_path):
  """E[N] predicted of held-out texts, then measured by decoding.

  As the README's command has it, within a minute; measured on prompts that
  were held out, seeds that training did not see, each row's own tokens a round.
  """
  config = tiny_train.get_config()
  config.data.cache = str(tmp_path / "cache")
  began = time.process_time()  # of both cores: others may use them too
  assert train.run(config, tmp_path / "run") == 0
  assert time.process_time() - began < 60
  assert _check_best(tmp_path / "run") > 0
  rows = [r for r in _rows(tmp_path / "run") if "mix/E_N_block" in r]
  first, last = rows[0], rows[-1]
  assert last["mix/E_N_block_low"] > first["mix/E_N_block_high"] + 0.8
  assert last["mix/S_block"] > first["mix/S_block"] + 0.3
  opened = load.random(config.architecture.to_dict(), seed=config.seed)
  target = load.model(opened, dtype="float32")
  trained = load.model(str(tmp_path / "run" / "draft"), dtype="float32")
  untrained = load.part(target, layers=(0,))
  found = feed.collect(config, target, shards.QUIET)
  held = feed.split(config, found, print).held_out
  hashes = overlap.of(target.tokenizer, found)
  np.testing.assert_array_equal(overlap.read(tmp_path / "run/draft"), hashes)
  assert overlap.told(hashes) in (tmp_path / "run/draft/README.md").read_text()
  before, after = (_measured(target, x, held) for x in (untrained, trained))
  gain = after.mean() - before.mean()
  noise = np.sqrt((before.var() + after.var()) / len(before))
  assert gain > 0.8 and gain > 8 * noise
  assert abs(after.mean() - last["mix/E_N_block"]) < 0.35


def _measured(target, draft, held):
  """[rows] tokens a round of held-out prompts, two new seeds each."""
  held = trajectories.take(held, np.arange(len(held.length)).repeat(2))
  asked = [
    row[:n].tolist()
    for row, n in zip(held.tokens, held.prompt_length, strict=True)
  ]
  ask = request.make(
    asked,
    max_new=48,
    temperature=0.05,
    seed=np.arange(len(asked)) + 10_000,
    stop_ids=target.tokenizer.stop_ids,
  )
  drafter = lm.make(draft.target, target.target.vocab_size)
  out = generate.speculative(
    target.target,
    drafter,
    target.params,
    draft.params,
    ask,
    num_draft=4,
    max_new_tokens=48,
  )
  one = lambda r: out._replace(
    **{
      key: getattr(out, key)[r : r + 1]
      for key in ("length", "round", "accepted", "overlap")
    }
  )
  rows = range(len(asked))
  return np.array([metrics.acceptance(one(r), 4).tokens_per_call for r in rows])


def _bad(tmp_path, small, **changes):
  with pytest.raises(UserError) as error:
    train.run(small(**changes), tmp_path / "run")
  told = str(error.value)
  assert "\n" not in told
  return told


def _given(tmp_path, *rows):
  path = tmp_path / "given.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return {"data__source": "given", "data__path": str(path)}


def test_a_set_smaller_than_a_batch(tmp_path, small):
  told = _bad(tmp_path, small, batch_size=64)
  assert "sequences are left to train on, a batch needs 64" in told
  assert "--config.batch_size" in told
  # nothing is left that would refuse the repaired command
  assert not (tmp_path / "run").exists()


def test_sequences_that_are_cut_to_nothing(tmp_path, small):
  """Prompts fill the whole length: an error, not a loss of 0.0 (B20)."""
  told = _bad(tmp_path, small, length=3)
  assert "have nothing to learn from" in told
  assert "have a prompt of more than 3 tokens" in told


def test_no_supervised_token(tmp_path, small):
  rows = [{"text": letter} for letter in "abcdefgh"]
  told = _bad(tmp_path, small, **_given(tmp_path, *rows))
  assert "8 of 8 sequences have nothing to learn from" in told


def test_one_prompt_cannot_be_split(tmp_path, small):
  told = _bad(tmp_path, small, data__limit=1)
  assert "would be empty" in told


@pytest.mark.parametrize(
  "changes, why",
  [
    ({"steps": 0}, "steps must be at least 1"),
    ({"length": 0}, "length must be at least 1"),
    ({"accumulate": 0}, "accumulate must be at least 1"),
    ({"evaluation.every": 0}, "evaluation.every must be at least 1"),
    ({"checkpoint.keep": 0}, "checkpoint.keep must be at least 1"),
    ({"draft.num_tokens": 0}, "draft.num_tokens must be at least 1"),
    ({"seed": -1}, "seed must be in 0..4294967295"),
    ({"dtype": "floot32"}, "did you mean float32"),
    ({"data.source": "prompt"}, "did you mean prompts"),
    ({"data.path": ""}, "type --config.data.path=FILE.jsonl of prompts"),
    ({"export_dtype": "float8"}, "export_dtype must be one of float32"),
    ({"data.held_out": 0.0}, "held_out must be between 0 and 1"),
    ({"data.held_out": float("nan")}, "held_out must be between 0 and 1"),
    ({"data.from_draft": 1.0}, r"from_draft must be in \[0, 1\)"),
    ({"data.from_draft": 0.01}, "is 0 sequences; it must leave at least one"),
    ({"data.from_draft": 0.5, "data.keep_hidden": True}, "choose one of them"),
    ({"data.temperatures": ((-1.0, 1.0),)}, "data.temperatures must be pairs"),
    ({"data.max_new": 0}, "data.max_new must be at least 1"),
    ({"optimiser.learning_rate": float("nan")}, "learning_rate must be in"),
    ({"optimiser.warmup": 1.0}, "optimiser.warmup must be in 0..0.99"),
    ({"optimiser.clip": 0.0}, "optimiser.clip must be in"),
    ({"sampling.top_p": 2.0}, "sampling.top_p must be in 0..1"),
    ({"loss": (("forward_lk", 1.0),)}, "--config.loss: no loss 'forward_lk'"),
    ({"loss": (("js", 0.5),)}, "--config.loss: a schedule's ends must rise"),
    ({"draft.layers": ()}, "a draft starts from exactly one of"),
    ({"draft.weights": "x"}, r"layers; type --config.draft.layers='\(\)'"),
    ({"draft.features": (1,)}, "draft.features is for .*name=feature"),
    (HEAD | {"data.from_draft": 0.5}, "type --config.data.from_draft=0, got"),
    (HEAD | {"draft.depth_weights": (1.0,)}, "of num_draft=2 needs as many"),
    ({"draft.embedding": "sharde"}, "embedding must be own or shared"),
    ({"costs.verify": ((1, 1.0), (3, 1.0))}, "a round of 4 drafted ones"),
  ],
)
def test_impossible_value(changes, why):
  config = tiny_train.get_config()
  config.update_from_flattened_dict(changes)
  with pytest.raises(UserError, match=why):
    recipe.check(config)


def test_a_config_for_decoding():
  with pytest.raises(UserError, match="none for training: it has no 'data'"):
    recipe.check(tiny_train.get_config("decode"))


def test_random_needs_an_architecture():
  config = tiny_train.get_config()
  del config.architecture
  with pytest.raises(UserError, match=r"configs/tiny_train\.py"):
    recipe.check(config)


def test_a_workdir_of_another_config(whole, small):
  """The keys that differ are named; what only logs may differ (B54)."""
  with pytest.raises(UserError) as error:
    train.run(small(steps=9, draft__head=99), whole)
  told = str(error.value)
  assert "draft.head: 100, now 99; steps: 6, now 9" in told
  assert f"--workdir={whole} holds a run of another config" in told
  free = dict(log_every=5, checkpoint__every=3, checkpoint__keep=3)
  before = _state(whole)
  assert train.run(small(**free), whole) == 0
  for name, x in _state(whole).items():
    np.testing.assert_array_equal(x, before[name])


def test_a_workdir_of_something_else(tmp_path, small):
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "thesis.tex").write_text("")
  assert "holds files but no run" in _bad(tmp_path, small)
  shutil.rmtree(tmp_path / "run")
  (tmp_path / "run").write_text("")
  assert "is a file; name a folder" in _bad(tmp_path, small)


@pytest.fixture
def copy(whole, tmp_path):
  """A copy of the finished run, to be damaged."""
  return Path(shutil.copytree(whole, tmp_path / "run"))


def test_checkpoints_that_are_gone(copy, tmp_path, small):
  shutil.rmtree(copy / train.SAVES)
  told = _bad(tmp_path, small)
  assert "has metrics of a run but none of its checkpoints" in told


def test_a_new_run_takes_nothing_of_an_old_one(copy, small):
  """Its best draft, with a better score, nor the answers of its draft."""
  shutil.rmtree(copy / train.SAVES)
  (copy / trainlog.METRICS).unlink()
  (copy / "costs.json").write_text("{}")
  kept = {path.name for path in (copy / feed.DRAFTED).iterdir()}
  mark = copy / feed.DRAFTED / min(kept) / "old"
  mark.write_text("")
  with checkpoint.opened(copy / train.BEST, 1) as manager:
    params = {"x": np.zeros(3, np.float32)}
    checkpoint.save(manager, 99, params, {"step": 99, "score": 1e9})
  config = small(optimiser__learning_rate=0.0)
  workdir.begin(copy, config)
  assert not (copy / trainlog.RECORD).exists()
  assert train.run(config, copy) == 0
  assert checkpoint.numbers(copy / train.BEST) == [0]
  assert not mark.exists() and not (copy / "costs.json").exists()


@pytest.mark.parametrize("key", ["data", "config"])
def test_the_best_of_another_run(copy, tmp_path, small, key):
  """It is known by its data and its config, and is not exported."""
  (number,) = checkpoint.numbers(copy / train.BEST)
  with checkpoint.opened(copy / train.BEST, 1) as manager:
    told = checkpoint.meta(manager, number)
    params = {"x": np.zeros(3, np.float32)}
    checkpoint.save(manager, number + 1, params, told | {key: "another"})
  told = _bad(tmp_path, small)
  assert f"{copy / train.BEST / str(number + 1)} is the best draft of" in told


def test_a_best_that_is_gone(copy, tmp_path, small):
  shutil.rmtree(copy / train.BEST)
  told = _bad(tmp_path, small)
  assert f"{copy / train.BEST} is missing or empty" in told
  assert "put it back, or name a new --workdir" in told


def test_two_at_once(whole, tmp_path, small, monkeypatch):
  """The second one is refused before it reads or writes anything."""
  monkeypatch.setattr(terminal, "open_target", None)
  for folder in (tmp_path / "run", whole):
    with workdir.locked(folder), pytest.raises(UserError) as error:
      train.run(small(), folder)
    told = str(error.value)
    assert f"another train_draft.py is at work in {folder}" in told
  assert not (tmp_path / "run").exists()  # nothing came to be there
  with workdir.locked(whole):  # as it is free again
    pass


@pytest.mark.parametrize(
  "changes, why",
  [
    ({"draft__layers": (0, 7)}, "layers=0,7: the target has layers 0 to 1"),
    ({"length": 513}, "type --config.length=512 or less"),
    ({"draft__head": 100_000}, "head must be 0 or in"),
    (
      {"draft__layers": (), "draft__weights": "none/such"},
      "none/such does not exist",
    ),
  ],
)
def test_what_the_target_rules_out(tmp_path, small, monkeypatch, changes, why):
  """It is told before anything is sampled, which may take hours."""
  monkeypatch.setattr(feed, "collect", None)
  assert why in _bad(tmp_path, small, **changes)
  assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written(tmp_path, small, monkeypatch):
  monkeypatch.setattr(terminal, "open_target", None)
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match="lies in a file, not a folder; name"):
    train.run(small(), tmp_path / "file" / "run")
  monkeypatch.setattr(os, "access", lambda *args: False)  # root may do all
  told = _bad(tmp_path, small)
  assert "Permission denied; make it writable" in told


def test_a_foreign_file_in_the_export(copy, tmp_path, small, monkeypatch):
  monkeypatch.setattr(terminal, "open_target", None)
  (copy / train.DRAFT / "thesis.tex").write_text("")
  told = _bad(tmp_path, small)
  assert f"cannot export to {copy / train.DRAFT}" in told
  assert "it holds thesis.tex" in told


def test_a_damaged_checkpoint(copy, whole, tmp_path, small):
  """It is named; without it the run goes on from the one before (B36)."""
  numbers = checkpoint.numbers(copy / train.SAVES)
  last = copy / train.SAVES / str(numbers[-1])
  for path in last.rglob("d/*"):
    path.write_bytes(b"")
  told = _bad(tmp_path, small)
  assert f"delete that folder to go on from {numbers[0]}" in told
  shutil.rmtree(last)
  assert train.run(small(), copy) == 0
  _assert_same_run(copy, whole)


def test_a_checkpoint_of_another_shape(copy, tmp_path, small):
  """Even where the config's keys agree: the tree itself is compared (B17)."""
  changed = dict(draft__layers=(0, 1))
  config = json.loads((copy / "config.json").read_text())
  config["draft.layers"] = [0, 1]
  (copy / "config.json").write_text(json.dumps(config))
  told = _bad(tmp_path, small, **changed)
  assert "it has nothing as 'gradient/layer_1/attn_norm/scale'" in told


def test_other_data(copy, tmp_path, small, monkeypatch):
  """A file of prompts that has changed since is no way to go on (B18)."""
  split = feed.split

  def one_less(config, found, note):
    return split(config, trajectories.take(found, np.s_[:-1]), note)

  monkeypatch.setattr(feed, "split", one_less)
  assert "the data is not what the run" in _bad(tmp_path, small)


def test_drafted_rows_that_are_gone(small, tmp_path, monkeypatch):
  """They came from parameters that are no more: nothing takes their place."""
  _stop_at(monkeypatch, 8, signal.SIGTERM)  # behind the refresh at step 3
  assert train.run(small(), tmp_path / "run") == 143
  monkeypatch.undo()
  monkeypatch.chdir(ROOT)
  shutil.rmtree(tmp_path / "run" / "drafted")
  told = _bad(tmp_path, small)
  assert "the draft wrote it at step 3" in told


def test_a_loss_that_is_not_finite(tmp_path, small):
  """The step is named, and what was saved before it is finite."""
  told = _bad(tmp_path, small, optimiser__learning_rate=1e6, dtype="float32")
  assert "came out wrong: its loss is" in told
  assert "lower --config.optimiser.learning_rate" in told
  for x in _state(tmp_path / "run").values():
    assert np.isfinite(x).all()


def test_a_full_disk(tmp_path, small):
  """The log's file is /dev/full: one line, and the checkpoint is whole."""
  folder = tmp_path / "run"
  write = trainlog._replace

  def full(path, data):
    write(path, data)
    if path.name == trainlog.METRICS:
      path.unlink()
      path.symlink_to("/dev/full")

  with pytest.MonkeyPatch.context() as m:
    m.setattr(trainlog, "_replace", full)
    told = _bad(tmp_path, small)
  assert "No space left on device" in told and "free space there" in told
  assert checkpoint.numbers(folder / train.SAVES) == [0]
  assert _state(folder)["['step']"] == 0


def test_a_disk_that_was_full_at_once(tmp_path, small, monkeypatch):
  """Nothing is left that would refuse the same command; a kill may leave it."""

  def full(file):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  folder = tmp_path / "run"
  with monkeypatch.context() as m:
    m.setattr(os, "fsync", full)
    with (
      pytest.raises(UserError, match="No space left on device"),
      workdir.locked(folder),
    ):
      workdir.begin(folder, small())
  assert not folder.exists()
  folder.mkdir()
  (folder / ".config.json.part").write_text('{"steps')
  with workdir.locked(folder):
    workdir.check(folder, small())
    workdir.begin(folder, small())
  assert {path.name for path in folder.iterdir()} == {"config.json", "lock"}


def test_measured_costs_are_kept_with_the_run():
  """What best means must not drift when a run goes on."""
  given = costs.given(tiny_train.get_config().costs, 4)
  assert train._costs_of(json.loads(json.dumps(given._asdict()))) == given
