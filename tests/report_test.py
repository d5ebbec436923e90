"""The report's numbers add up, and its file is whole or is not there."""

import hashlib
import json
import struct

import jax
import numpy as np
import pytest

from configs import tiny
from specjax import answers as answers_
from specjax import memory, metrics, pair, play, report, table, types
from specjax.errors import UserError
from specjax.models import load
from specjax.prompts import Prompt

CONFIG = tiny.get_config()
SIZES = play.Sizes(batch=2, slots=256, max_new=8, tokens=256)
PLAIN, SPECULATIVE = "autoregressive", "speculative"
K = 2


def _batch(*rows, decoder=PLAIN, **changes):
  """A batch of (index, turn, number of tokens).

  In speculation a round has two tokens, the first of them accepted.
  """
  each = 1 if decoder == PLAIN else 2
  answers = [
    answers_.Answer(
      turn=play.Turn(i, Prompt(f"p{i}", "chat", (), ("a", "b"), None), turn),
      prompt_ids=(1, 2, 300),
      token_ids=tuple(range(n)),
      text="é",
      finish_reason="length",
      rounds=tuple(t // each for t in range(n)),
      accepted=tuple(each == 2 and t % 2 == 0 for t in range(n)),
    )
    for i, turn, n in rows
  ]
  numbers = dict(slots=256, compile_seconds=0.0, prefill_seconds=0.5)
  numbers |= dict(seconds=2.0, steps=-(-max(n for _, _, n in rows) // each))
  numbers |= dict(interrupted=False, acceptance=None)
  if decoder == SPECULATIVE:
    numbers["acceptance"] = _acceptance([n for _, _, n in rows])
  return answers_.Batch(decoder, tuple(answers), **numbers | changes)


def _acceptance(lengths):
  """Of rounds whose first token is accepted; the last may be cut to it."""
  rounds = sum(-(-n // 2) for n in lengths)
  return metrics.Acceptance(
    rounds=rounds,
    tokens=sum(lengths),
    histogram=np.array([0, rounds, 0]),
    tested=np.array([rounds, rounds // 2]),
    overlap=np.array([0.75 * rounds, 0.25 * (rounds // 2)]),
  )


@pytest.fixture(scope="module")
def model():
  return load.model(load.random(CONFIG.architecture), dtype="float32")


def _build(model, batches, *, config=None, interrupted=False, dtype=np.float32):
  if config is None:
    config = tiny.get_config()
  config.draft.num_tokens = K
  seconds = {"load": 3.0, "compile": {PLAIN: 1.5, SPECULATIVE: 2.5}}
  draft = None
  if config.decoder != PLAIN:
    opened = load.Opened(model.config, model.tokenizer, None)
    draft = pair.opened(config, opened)
  return report.build(
    config, model, draft, dtype, SIZES, batches, seconds, interrupted
  )


def _both(*rows, **changes):
  fast = {"seconds": 1.0} | changes
  return [_batch(*rows), _batch(*rows, decoder=SPECULATIVE, **fast)]


def test_numbers_add_up(model):
  """B41: the same work, emitted tokens, compilation apart."""
  batches = [
    *_both((0, 0, 5), (1, 0, 7)),
    *_both((0, 1, 3), (1, 1, 1), slots=512, compile_seconds=0.25),
    *_both((2, 0, 2)),
  ]
  result = json.loads(json.dumps(_build(model, batches)))
  run, other = result[PLAIN], result[SPECULATIVE]
  for part in (run, other):
    outputs = part["outputs"]
    assert [(o["id"], o["turn"]) for o in outputs] == [
      ("p0", 0),
      ("p0", 1),
      ("p1", 0),
      ("p1", 1),
      ("p2", 0),
    ]
    assert part["tokens"] == 18 == sum(len(o["token_ids"]) for o in outputs)
    assert part["prefill_seconds"] == 1.5
    data = struct.pack("<3i", 1, 2, 300)
    assert outputs[0]["prompt_sha256"] == hashlib.sha256(data).hexdigest()
  assert run["target_calls"] == 7 + 3 + 2 and run["seconds"] == 6.0
  assert other["target_calls"] == 4 + 2 + 1 and other["seconds"] == 3.0
  assert run["tokens_per_second"] == 3.0 and other["tokens_per_second"] == 6.0
  assert result["speedup"] == 2.0
  assert run["compile_seconds"] == 1.5 and other["compile_seconds"] == 2.75
  assert result["model"]["slots"] == 512
  assert set(other["outputs"][0]) - set(run["outputs"][0]) == {"accepted"}


def test_acceptance_adds_up(model):
  """B02: rounds, tokens and the histogram are those of the outputs."""
  batches = _both((0, 0, 5), (1, 0, 7)) + _both((2, 0, 2))
  result = json.loads(json.dumps(_build(model, batches)))
  outputs = result[SPECULATIVE]["outputs"]
  rounds = sum(len(set(o["rounds"])) for o in outputs)
  accepted = sum(sum(o["accepted"]) for o in outputs)
  histogram = result["acceptance_histogram"]
  assert sum(histogram) == rounds == 3 + 4 + 1
  assert np.dot(histogram, range(K + 1)) == accepted == rounds
  assert result["tokens_per_call"] == 14 / rounds
  assert result["acceptance_by_position"] == [1.0, 0.0]
  assert result["alpha_by_position"] == [0.75, 0.25]
  assert result["rounds_tested"] == [rounds, 3]
  tested = rounds + 3 + 0  # 7 // 2 and 1 // 2
  assert result["alpha"] == (0.75 * rounds + 0.25 * 3) / tested
  assert result["draft"] == {
    "name": "ngram",
    "K": K,
    "chosen": None,
    "verifier": "block",
    "parameters": None,
    "layers": None,
    "features": None,
    "head": None,
    "lookup": None,
  }


def test_speedup_is_of_the_turns_that_both_ended(model):
  """Where Ctrl-C came, one decoder's work has no partner."""
  ended = _both((0, 0, 6))
  plain, speculative = _both((1, 0, 8))
  cut = speculative._replace(interrupted=True, seconds=50.0)
  for more in ([plain], [plain, cut], [plain._replace(interrupted=True)]):
    result = _build(model, ended + more, interrupted=True)
    assert result["speedup"] == 2.0
    assert result["compared"]["turns"] == 1
    assert result[PLAIN]["tokens"] == 14  # but told it is
  for alone in ([plain], [plain, cut], []):
    result = _build(model, alone, interrupted=True)
    assert result["speedup"] is result["exact"] is result["compared"] is None


def _greedy(**changes):
  config = tiny.get_config()
  config.sampling.temperature = 0.0
  config.update_from_flattened_dict(changes)
  return config


def test_exact(model):
  batches = _both((0, 0, 5), (1, 0, 7)) + _both((1, 1, 4))
  assert _build(model, batches)["exact"] is None  # T = 1: other draws
  result = _build(model, batches, config=_greedy())
  assert result["exact"] is True
  said = dict(table.rows(result))["exact"]
  assert said == "yes: all 16 tokens equal plain decoding"
  # in coupled mode tokens are equal at any temperature
  coupled = _greedy(**{"sampling.temperature": 1.0, "verifier": "coupled"})
  assert _build(model, batches, config=coupled)["exact"] is True


@pytest.mark.parametrize(
  "changes, said",
  [
    ({}, "greedy, seed 0"),
    ({"sampling.top_k": 5, "sampling.top_p": 0.9}, "greedy, seed 0"),
    (
      {"sampling.temperature": 0.7, "sampling.top_k": 5, "sampling.min_p": 0.1},
      "temperature 0.7, top_k 5, min_p 0.1, seed 0",
    ),
    (
      {
        "sampling.repetition_penalty": 1.2,
        "sampling.min_new_tokens": 4,
        "sampling.banned": (3, 5),
        "sampling.bias": '{"1": 2}',
      },
      'greedy, repetition_penalty 1.2, min_new_tokens 4, bias {"1": 2},'
      " banned 3,5, seed 0",
    ),
  ],
)
def test_the_sampling_that_is_in_force(model, changes, said):
  result = _build(model, _both((0, 0, 5)), config=_greedy(**changes))
  assert dict(table.rows(result))["sampling"] == said


def test_stops_and_logprobs(model):
  """In the table what else ends an answer; in the JSON what did, and when."""
  batches = _both((0, 0, 2))
  logprobs = types.Logprobs([-0.5, -1.0], [-0.25, -0.75])
  change = lambda a: a._replace(stop_text="x", logprobs=logprobs)
  batches = [b._replace(answers=tuple(map(change, b.answers))) for b in batches]
  config = _greedy(stop="x ", ignore_eos=True)
  result = _build(model, batches, config=config)
  assert dict(table.rows(result))["stop"] == "at 'x ', not at end tokens"
  for name in (PLAIN, SPECULATIVE):
    (output,) = result[name]["outputs"]
    assert output["stop_text"] == "x"
    assert output["logprobs"] == {"raw": [-0.5, -1.0], "law": [-0.25, -0.75]}
  result = _build(model, _both((0, 0, 2)), config=_greedy())
  assert "stop" not in dict(table.rows(result))
  assert "logprobs" not in result[PLAIN]["outputs"][0]


def test_not_exact(model):
  """Said with the first place, by prompt, whichever batch came first."""
  batches = _both((1, 0, 7), (2, 0, 3)) + _both((0, 1, 9)) + _both((3, 0, 2))
  change = lambda answer, at: answer._replace(
    token_ids=(*answer.token_ids[:at], 99, *answer.token_ids[at + 1 :])
  )
  batches[1] = batches[1]._replace(
    answers=(change(batches[1].answers[0], 2), batches[1].answers[1])
  )
  batches[3] = batches[3]._replace(answers=(change(batches[3].answers[0], 6),))
  result = _build(model, batches, config=_greedy(), dtype="bfloat16")
  assert result["exact"] is False
  found = result["compared"]
  assert found["equal_tokens"] == 2 + 3 + 6 + 2
  assert found["first_difference"] == {"id": "p0", "turn": 1, "token": 6}
  said = dict(table.rows(result))["exact"]
  assert said.startswith("no: 2 of 4 answers differ, 'p0' turn 2 from token 7")
  assert "bfloat16" in said


def test_an_answer_that_ends_early_is_not_exact(model):
  plain, other = _batch((0, 0, 5)), _batch((0, 0, 4), decoder=SPECULATIVE)
  result = _build(model, [plain, other], config=_greedy())
  assert result["exact"] is False
  assert result["compared"]["first_difference"]["token"] == 4


@pytest.mark.parametrize("decoder", [PLAIN, SPECULATIVE, "both"])
def test_keys_of_the_schema(model, decoder):
  """Those that DESIGN promises, null where a run did not measure them."""
  config = _greedy(decoder=decoder)
  names = {PLAIN, SPECULATIVE} if decoder == "both" else {decoder}
  batches = [b for b in _both((0, 0, 5)) if b.decoder in names]
  result = _build(model, batches, config=config)
  promised = """exact speedup tokens_per_call alpha acceptance_by_position
    predicted autoregressive speculative costs device versions config"""
  assert set(promised.split()) <= set(result)
  assert result["schema"] == 1 and result["interrupted"] is False
  assert result["config"]["sampling"]["temperature"] == 0.0
  nulls = {key for key, value in result.items() if value is None}
  compared = {"exact", "speedup", "compared"}
  drafted = {"tokens_per_call", "alpha", "acceptance_by_position", "draft"}
  drafted |= {"alpha_by_position", "acceptance_histogram", "rounds_tested"}
  expected = {"predicted", "costs", "overlap"} | {PLAIN, SPECULATIVE} - names
  expected |= compared if decoder != "both" else set()
  expected |= drafted if decoder == PLAIN else set()
  assert nulls == expected


def _rows(model, batches=(), interrupted=False, **changes):
  config = tiny.get_config()
  config.update_from_flattened_dict(changes)
  built = _build(model, list(batches), config=config, interrupted=interrupted)
  return dict(table.rows(built))


def test_rows(model):
  rows = _rows(model, _both((0, 0, 5), (1, 0, 7)))
  assert rows["plain"] == (
    "6.0 tokens/s, 285.7 ms a call (12 tokens in 7 calls, 2.00 s)"
  )
  assert rows["speculative"] == (
    "12.0 tokens/s, 250.0 ms a round (12 tokens in 4 rounds, 1.00 s)"
  )
  assert rows["speed-up"] == "2.00 x" and "slower" not in rows
  assert rows["exact"].startswith("in law; at temperature 0")
  assert rows["tokens a call"] == "1.71 of at most 3"
  assert rows["accepted"] == "1.00 .00 (positions 1 to 2)"
  assert rows["histogram"] == "0 0, 1 ████████ 7, 2 0 (accepted, rounds)"
  assert rows["alpha"] == "0.60, mean over the tested drafts"
  assert rows["ended by"] == "length 2"
  assert rows["prefill"] == "plain 0.50 s, speculative 0.50 s"
  assert rows["compile"].startswith("plain 1.5 s, speculative 2.5 s (not")
  assert rows["draft"] == "ngram, 2 tokens a round, verifier block"
  assert rows["program"] == "float32, batch 1, 256 slots"
  assert rows["device"].endswith(f", {_cores()} cores")


def test_rows_of_one_decoder(model):
  for decoder, gone in (
    (PLAIN, {"speculative", "draft", "alpha"}),
    (SPECULATIVE, {"plain"}),
  ):
    rows = _rows(model, [_batch((0, 0, 5), decoder=decoder)], decoder=decoder)
    assert not (gone | {"speed-up", "exact"}) & set(rows)
    assert rows["prefill"] == "0.50 s"


def test_slower_is_said_with_its_reason(model):
  """B42: the two measured factors whose ratio is the speed-up."""
  rows = _rows(model, _both((0, 0, 5), (1, 0, 7), seconds=4.0))
  assert rows["speed-up"] == "0.50 x"
  # 1 s a round over 2 / 7 s a call; 3 tokens a round over 12 / 7 a call
  assert rows["slower"].startswith(
    "a round takes 3.50 x a plain call's time and emits 1.75 x its tokens; try"
    " fewer --config.draft.num_tokens than 2, another draft or"
  )
  assert 1.75 / 3.5 == 0.5


@pytest.mark.parametrize(
  "changes, said",
  [
    ({"draft.name": "replay"}, "replay, alpha 0.8, 2 tokens a round"),
    (
      {"draft.name": "lm", "draft.layers": (0, 2), "draft.head": 99},
      "lm, layers 0,2 of the target, 0.1296 M parameters, a head of 100 ids,",
    ),
    (
      {"draft.name": "lm", "draft.layers": (0,), "draft.temperature": 0.5},
      "temperature 0.5, 2 tokens",
    ),
  ],
)
def test_draft_in_words(model, changes, said):
  assert said in _rows(model, **changes)["draft"]


def _cores():
  return report.runtime.device()["cores"]


def test_rows_of_a_run_without_answers(model):
  rows = _rows(model, interrupted=True)
  assert rows["answers"] == "0, to 0 prompt tokens, then interrupted"
  assert rows["plain"] == rows["speculative"] == "no token"
  assert rows["ended by"] == "-" and rows["speed-up"] == "not measured"
  assert not {"exact", "accepted", "alpha"} & set(rows)


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
  assert table.short_name(target) == name


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


def _size(tree):
  return sum(x.nbytes for x in jax.tree.leaves(tree))


def test_memory_estimate_counts_what_is_there(model):
  """The weights and cache exactly; [B, V] three times, float32."""
  shape = dict(dtype="float32", batch=2, slots=256, untie=True)
  assert memory.estimate(model.config, **shape) == {
    "weights": _size(model.params),
    "cache": _size(model.target.init_cache(2, 256)),
    "probabilities": 3 * 4 * 2 * 384,
  }


@pytest.mark.parametrize("draft", ["ngram", "layers", "head", "own"])
def test_memory_estimate_of_a_draft(model, draft):
  """p of K + 1 positions and q of K; what the draft adds, and no more."""
  config = tiny.get_config()
  config.draft.num_tokens = 4
  if draft != "ngram":
    config.draft.name = "lm"
    if draft == "own":
      config.draft.weights = "one.gguf"
    else:
      config.draft.layers = (0, 2)
    config.draft.head = 50 if draft == "head" else 0
  own = load.random(CONFIG.architecture)
  chosen = pair.opened(config, own, lambda reference: own)
  shape = dict(dtype="float32", batch=2, slots=256, untie=True)
  plain = memory.estimate(model.config, **shape)
  found = memory.estimate(model.config, draft=chosen, **shape)
  more = {k: n for k, n in found.items() if plain.get(k) != n}
  want = {"probabilities": 4 * 2 * 384 * (3 * 5 + 4)}
  if draft == "own":
    want |= {"draft weights": _size(model.params)}
  loaded = pair.load(chosen, model, dtype="float32").params(None)
  if draft == "head":
    want |= {"draft head": loaded["head"].nbytes}
  if draft != "ngram":
    layers = sum(name.startswith("layer_") for name in loaded)
    part = _size(model.target.init_cache(2, 256)) * layers // 3
    want |= {"draft cache": part}
  assert more == want
