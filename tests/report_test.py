"""The report's numbers add up, and its file is whole or is not there."""

import hashlib
import json
import struct

import jax
import numpy as np
import pytest

from configs import tiny
from specjax import memory, play, report
from specjax.errors import UserError
from specjax.models import load
from specjax.prompts import Prompt

CONFIG = tiny.get_config()
SIZES = play.Sizes(batch=2, slots=256, max_new=8)


def _batch(*rows, **changes):
  """A batch of (index, turn, number of tokens)."""
  answers = [
    play.Answer(
      turn=play.Turn(i, Prompt(f"p{i}", "chat", (), ("a", "b"), None), turn),
      prompt_ids=(1, 2, 300),
      token_ids=tuple(range(n)),
      text="é",
      finish_reason="length",
      rounds=tuple(range(n)),
    )
    for i, turn, n in rows
  ]
  numbers = dict(slots=256, compile_seconds=0.0, prefill_seconds=0.5)
  numbers |= dict(seconds=2.0, steps=max(n for _, _, n in rows))
  return play.Batch(tuple(answers), interrupted=False, **numbers | changes)


@pytest.fixture(scope="module")
def model():
  return load.model(load.random(CONFIG.architecture), dtype="float32")


def _build(model, batches, *, config=CONFIG, interrupted=False):
  seconds = {"load": 3.0, "compile": 1.5}
  return report.build(
    config, model, np.float32, SIZES, batches, seconds, interrupted
  )


def test_numbers_add_up(model):
  batches = [
    _batch((0, 0, 5), (1, 0, 7)),
    _batch((0, 1, 3), (1, 1, 1), slots=512, compile_seconds=0.25),
    _batch((2, 0, 2)),
  ]
  result = json.loads(json.dumps(_build(model, batches)))
  run = result["autoregressive"]
  outputs = run["outputs"]
  assert [(o["id"], o["turn"]) for o in outputs] == [
    ("p0", 0),
    ("p0", 1),
    ("p1", 0),
    ("p1", 1),
    ("p2", 0),
  ]
  assert run["tokens"] == 18 == sum(len(o["token_ids"]) for o in outputs)
  assert run["target_calls"] == 7 + 3 + 2
  assert run["seconds"] == 6.0 and run["prefill_seconds"] == 1.5
  assert run["tokens_per_second"] == 3.0
  assert run["compile_seconds"] == 1.75
  assert result["model"]["slots"] == 512
  data = struct.pack("<3i", 1, 2, 300)
  assert outputs[0]["prompt_sha256"] == hashlib.sha256(data).hexdigest()


def test_keys_of_the_schema(model):
  """Those that DESIGN promises, null where a run did not measure them."""
  result = _build(model, [_batch((0, 0, 5))])
  promised = """exact speedup tokens_per_call alpha acceptance_by_position
    predicted autoregressive speculative costs device versions config"""
  assert set(promised.split()) <= set(result)
  assert result["schema"] == 1 and result["interrupted"] is False
  assert result["config"]["sampling"]["temperature"] == 1.0
  nulls = {key for key, value in result.items() if value is None}
  assert nulls == set(promised.split()) - {
    "autoregressive",
    "device",
    "versions",
    "config",
  }


def _rows(model, batches=(), interrupted=False, **changes):
  config = tiny.get_config()
  config.update_from_flattened_dict(changes)
  built = _build(model, list(batches), config=config, interrupted=interrupted)
  return dict(report.rows(built))


def test_rows(model):
  rows = _rows(model, [_batch((0, 0, 5), (1, 0, 7))])
  assert rows["decoding"].startswith("6.0 tokens/s, 285.7 ms a target call")
  assert rows["new tokens"] == "12 in 7 target calls"
  assert rows["ended by"] == "length 2"
  assert rows["program"] == "float32, batch 1, 256 slots"
  assert rows["device"].endswith(f", {_cores()} cores")


def _cores():
  return report.runtime.device()["cores"]


def test_rows_of_a_run_without_answers(model):
  rows = _rows(model, interrupted=True)
  assert rows["answers"] == "0, to 0 prompt tokens, then interrupted"
  assert rows["decoding"] == "no token" and rows["ended by"] == "-"


@pytest.mark.parametrize(
  "changes, said",
  [
    ({}, "temperature 1.0, seed 0"),
    ({"sampling.temperature": 0.0, "sampling.top_k": 3}, "greedy, seed 0"),
    (
      {
        "sampling.min_p": 0.1,
        "sampling.top_p": 0.9,
        "sampling.top_k": 5,
        "sampling.temperature": 0.7,
        "seed": 2,
      },
      "temperature 0.7, top_k 5, top_p 0.9, min_p 0.1, seed 2",
    ),
  ],
)
def test_sampling_in_words(model, changes, said):
  assert _rows(model, **changes)["sampling"] == said


@pytest.mark.parametrize(
  "target, name",
  [
    ("random", "random weights"),
    ("pypi://llm==0.1/llm/A.Q4.gguf#sha256=ab", "A.Q4.gguf"),
    ("hf://org/name@main", "org/name@main"),
    ("/models/smol/", "smol"),
    ("a.gguf", "a.gguf"),
  ],
)
def test_short_name(target, name):
  assert report.short_name(target) == name


def test_save_replaces_a_file_whole(tmp_path):
  real, link = tmp_path / "real.json", tmp_path / "link.json"
  real.write_text("old")
  link.symlink_to(real)
  report.check_path(str(link))
  assert real.read_text() == "old"
  report.save(str(link), {"text": "é", "name": "\udcff", "path": tmp_path})
  assert link.is_symlink()
  assert json.loads(real.read_text("utf-8")) == {
    "text": "é",
    "name": "\udcff",
    "path": str(tmp_path),
  }
  assert {p.name for p in tmp_path.iterdir()} == {"real.json", "link.json"}


def test_save_leaves_nothing_behind(tmp_path):
  real = tmp_path / "real.json"
  real.write_text("old")
  with pytest.raises(TypeError):
    report.save(str(real), {"fine": 1, ("no", "key"): 2})
  assert real.read_text() == "old"
  assert [p.name for p in tmp_path.iterdir()] == ["real.json"]


@pytest.mark.parametrize(
  "path", ["", ".", "/dev/null", "/proc/x.json", "none/x.json", "x" * 300]
)
def test_path_that_cannot_be_written(tmp_path, monkeypatch, path):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(UserError, match="^cannot write --json="):
    report.check_path(path)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "num_bytes, text",
  [
    (0, "0 kB"),
    (4_610, "4.61 kB"),
    (999_600, "1,000 kB"),
    (23.6e6, "23.6 MB"),
    (1.26e9, "1.26 GB"),
    (2e16, "20,000,000 GB"),
  ],
)
def test_human(num_bytes, text):
  assert memory.human(num_bytes) == text


def test_memory_check(monkeypatch):
  parts = {"weights": 6e9, "cache": 3e9}
  monkeypatch.setattr(memory, "available", lambda: 8e9)
  with pytest.raises(UserError, match="= 9 GB, but 8 GB is free; lower"):
    memory.check(parts)
  monkeypatch.setattr(memory, "available", lambda: 10e9)
  assert (
    memory.check(parts) == "memory: 6 GB weights + 3 GB cache of 10 GB free"
  )
  monkeypatch.setattr(memory, "available", lambda: None)
  assert memory.check(parts) == "memory: 6 GB weights + 3 GB cache"


def test_memory_estimate_counts_what_is_there(model):
  """The weights and cache exactly; [B, K + 1, V] three times, float32."""
  cache = model.target.init_cache(2, 256)
  size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
  parts = memory.estimate(
    model.config, dtype="float32", batch=2, slots=256, queries=5, untie=True
  )
  assert parts == {
    "weights": size(model.params),
    "cache": size(cache),
    "probabilities": 3 * 4 * 2 * 5 * 384,
  }
