"""benchmarks/peers.py: rates, equal texts, other processes, equal weights."""

import dataclasses
import json
import os
import sys

import export_test
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
import student_test
import weights_test
from weights_test import LLAMA, TINY, read_folder

from benchmarks import (
  peer_files,
  peer_ours,
  peer_results,
  peer_runs,
  peer_systems,
)
from configs import smollm2, tiny
from specjax import pair, terminal
from specjax.errors import UserError
from specjax.models import load, transformer, weights
from specjax.prompts import Prompt

parse = peer_systems.parse


def run(seconds, ids=(5, 6, 7, 2), calls=3, prefill=1.0):
  """Of a peer that draws its first token with the prompt."""
  return {
    "ids": list(ids),
    "prefill": prefill,
    "seconds": seconds,
    "timed": len(ids) - 1,
    "calls": calls,
  }


def shown(table):
  out = rich.console.Console(width=160)
  with out.capture() as text:
    out.print(table)
  return text.get()


# Numbers


def test_rates_and_ratios():
  """Sums over a turn's prompts; ratios of the same turn (B41)."""
  runs = {
    "transformers": [[run(1), run(2)], [run(2), run(4)]],
    "ours:plain": [[run(0.5), run(1)], [run(0.5), run(1)]],
  }
  systems = [parse(x) for x in [*runs, "llama.cpp:Q8_0"]]
  notes = {"llama.cpp:Q8_0": "not installed: pip install llama-cpp-python"}
  first, other, missing = peer_results.rows(systems, runs, notes, "float32")
  assert first["tokens_per_second"] == {"median": 1.5, "low": 1, "high": 2}
  assert first["with_the_prompt"]["high"] == pytest.approx(8 / 5)
  assert first["tokens"] == 8 and first["tokens_per_call"] == 4 / 3
  want = {"median": 3, "low": 2, "high": 4}  # not the medians' ratio, 8 / 3
  assert other["over_transformers"] == want
  assert "over_llama.cpp" not in other
  assert not missing["measured"] and missing["precision"] == "Q8_0"
  text = shown(peer_results.table([first, other, missing], []))
  assert "3.00 (2.00 to 4.00)" in text
  assert "pip install llama-cpp-python" in text  # never left out
  png = peer_results.picture([first, other, missing], [])
  assert png.startswith(b"\x89PNG")


@pytest.mark.parametrize(
  "a, b, place",
  [
    ([1, 2], [1, 2], None),
    ([1, 2], [1, 3], 1),
    ([1, 2], [1, 2, 3], 2),
    ([], [1], 0),
  ],
)
def test_first_difference(a, b, place):
  assert peer_results.first_difference(a, b) == place


@pytest.mark.parametrize(
  "lift, gap, said",
  [
    (1e-5, 1e-5, "1 of 2, 1 tie-flip"),
    (1e-5, 1e-3, "1 of 2, 1 FAULT"),  # rounding cannot close it
    (0.5, 0.1, "1 of 2, 1 FAULT"),  # that is no rounding
    (0.0, 0.1, "1 of 2, 1 FAULT"),
  ],
)
def test_ties_are_told_from_faults(lift, gap, said):
  """Both systems' logits of one text decide, not a tolerance of tokens."""
  asked = []

  def theirs(ids):
    asked.append(ids)
    return np.array([0, 20, 20 - gap, 3.0])

  logits = {"b": theirs, "a": lambda ids: theirs(ids) + [0, -lift, lift, 0]}
  runs = {"a": [[run(1, [5, 2]), run(1, [5, 2, 9])]]}
  runs["b"] = [[run(1, [5, 2]), run(1, [5, 1, 7, 7])]]
  prompts = {"x": [1, 1], "y": [3]}
  args = (prompts, runs, ("a", "b"), logits)
  found = peer_results.agreement(*args, "float32")
  assert peer_results.said(found) == said
  assert asked == [[3, 5], [3, 5]]  # the prompt and what both have said
  (one,) = found["differences"]
  assert (one["prompt"], one["place"], one["tokens"]) == ("y", 1, [2, 1])
  assert one["gap"] == pytest.approx(gap)
  other = peer_results.agreement(*args, "float32", same_weights=False)
  assert peer_results.said(other) == "1 of 2"


def test_answers_that_change_by_turn_are_told():
  runs = {"a": [[run(1, [5])], [run(1, [6])]], "b": [[run(1, [5])]] * 2}
  found = peer_results.agreement({"x": [1]}, runs, ("a", "b"), {}, "float32")
  with pytest.raises(KeyError):  # only differences of the first are explained
    runs["b"] = [[run(1, [7])]]
    peer_results.agreement({"x": [1]}, runs, ("a", "b"), {}, "float32")
  assert peer_results.said(found) == "1 of 1, changes by turn"


def test_break_even():
  row = lambda B, p, m: dict(system="a", batch=B, predicted=p, measured=m)
  rows = [row(1, 2, 2), row(4, 1.25, 1.5), row(16, 0.8, 1.2)]
  predicted, measured = peer_ours.break_even(rows)["a"]
  assert predicted == pytest.approx(8)  # half way, in logs
  assert measured is None


# Names


def test_every_default_has_a_name():
  for name in peer_systems.DEFAULT:
    assert parse(name).name == name
  assert parse("llama.cpp:lookup2") == ("llama.cpp:lookup2", *_L2)
  assert parse("transformers:assistant").drafts
  assert parse("ours:auto").drafts and not parse("ours:ngram4").drafts
  assert parse("ours:config").speculates and not parse("ours:config").drafts
  assert parse("llama.cpp").precision("float32") == "float32"


_L2 = ("llama.cpp", "lookup", 2)


def test_what_each_row_decodes_with():
  """The head that ships is a feature head, by its folder alone."""
  config = peer_ours.check(smollm2.get_config())
  head = config.draft.weights
  of = lambda name: peer_ours.config_of(parse(name), config, head)
  assert of("ours:config") == config
  assert of("ours:plain").decoder == "autoregressive"
  draft = of("ours:draft2").draft
  own = load.opened(draft.weights, draft=True)
  assert draft.weights == head and pair.method(own) == "feature"
  assert (draft.num_tokens, draft.schedule, draft.lookup) == (2, "constant", 0)
  draft = of("ours:ngram4").draft
  assert (draft.name, draft.num_tokens, draft.lookup) == ("ngram", 4, 0)
  assert of("ours:auto").draft.schedule == "auto"
  with pytest.raises(UserError, match="no such assistant"):
    peer_files.assistant(head, None, "nowhere")


@pytest.mark.parametrize(
  "name", ["lama.cpp", "ours", "ours:ngram", "llama.cpp:F15", "ours:plain4"]
)
def test_an_unknown_name_says_the_known_ones(name):
  with pytest.raises(UserError, match=r"is none of .*ours:ngramK.*"):
    parse(name)


@pytest.mark.parametrize(
  "key, value", [("temperature", 1.0), ("repetition_penalty", 1.1)]
)
def test_greedy_without_penalties(key, value):
  config = tiny.get_config()
  config.sampling.temperature = 0.0
  peer_ours.check(config)
  config.sampling[key] = value
  with pytest.raises(UserError, match=f"type --config.sampling.{key}="):
    peer_ours.check(config)


# Other processes

FAKE = """
import json, sys
for line in sys.stdin:
  ask = json.loads(line)
  if ask["do"] == "load":
    there = ask["folder"] != "no"
    what = {"about": {"x": 1}} if there else {"missing": "torch"}
  elif ask["do"] == "logits":
    what = {"logits": [0.0] * 95 + [1.0]}
  else:
    if ask["max_new"] == 13:
      sys.exit("out of luck")
    new = [95] * ask["max_new"]
    what = dict(ids=new, prefill=1, seconds=1, timed=len(new) - 1, calls=1)
  print(json.dumps(what), flush=True)
"""


@pytest.fixture
def fake(tmp_path):
  path = tmp_path / "fake.py"
  path.write_text(FAKE)
  return path


def test_a_process_that_answers(fake):
  worker = peer_systems.start(sys.executable, fake)
  found = peer_systems.ask(worker, "load", folder="yes")
  assert found == {"about": {"x": 1}} and not peer_systems.reason(found)
  found = peer_systems.ask(worker, "load", folder="no")
  want = "not installed: pip install torch transformers"
  assert peer_systems.reason(found) == want
  assert peer_systems.ask(worker, "decode", max_new=2)["ids"] == [95, 95]
  peer_systems.stop(worker)
  assert worker.process.returncode == 0


def test_a_process_that_dies(fake):
  worker = peer_systems.start(sys.executable, fake)
  with pytest.raises(
    UserError, match="ended with 1; it last said: out of luck"
  ):
    peer_systems.ask(worker, "decode", max_new=13)
  peer_systems.stop(worker)


def test_no_such_interpreter(tmp_path):
  with pytest.raises(UserError, match="--bench_python=.*No such file"):
    peer_systems.start(str(tmp_path / "python"))


LLAMA_CPP = """
import numpy as np
GGML_TYPE_F32, GGML_TYPE_F16 = 0, 1
print("noise on stdout")

class Llama:
  def __init__(self, path, **options):
    self.options, self.ctx, self.fresh = options, None, False
  def reset(self):
    self.fresh = True
  def eval(self, tokens):
    pass
  def n_vocab(self):
    return 3
  def generate(self, tokens, temp, repeat_penalty):
    assert self.fresh and temp == 0
    self.fresh = False
    for token in (7, 8, 9, 2, 5):
      if token != 9:  # two of one call
        self.eval(tokens)
      yield token

def llama_get_logits_ith(ctx, i):
  return [0.5, 1.5, 2.5, 9.0]

def llama_print_system_info():
  return b"AVX2 = 1"
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
  """Start the real worker, by an interpreter that has a made-up llama.cpp."""
  (tmp_path / "llama_cpp").mkdir()
  (tmp_path / "llama_cpp" / "__init__.py").write_text(LLAMA_CPP)
  text = "def LlamaPromptLookupDecoding(num_pred_tokens):\n  return None\n"
  (tmp_path / "llama_cpp" / "llama_speculative.py").write_text(text)
  about = tmp_path / "llama_cpp_python-9.dist-info"
  about.mkdir()
  (about / "METADATA").write_text("Name: llama-cpp-python\nVersion: 9\n")
  (tmp_path / "torch.py").write_text(
    "raise ModuleNotFoundError('no torch', name='torch')\n"
  )
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  found = peer_systems.start(sys.executable)
  yield found
  peer_systems.stop(found)


_LOAD = dict(folder="x", device="cpu", threads=2, slots=64, dtype="float32")
_LOAD |= dict(cache="F32", lookup=0, assistant=None)


def test_the_worker(worker):
  """Stops at an end token; prefill ends with the first; noise is kept out."""
  ask = lambda do, **what: peer_systems.ask(worker, do, **what)
  found = ask("load", library="llama.cpp", **_LOAD)["about"]
  assert found["llama-cpp-python"] == "9" and found["system"] == "AVX2 = 1"
  options = dict(prompt=[1, 2], how="", k=0)
  for _ in range(2):  # each begins anew
    found = ask("decode", max_new=9, stop=[2, 4], **options)
    assert found["ids"] == [7, 8, 9, 2]
    assert (found["timed"], found["calls"]) == (3, 3)
    assert found["prefill"] >= 0 and found["seconds"] >= 0
  assert ask("decode", max_new=2, stop=[], **options)["ids"] == [7, 8]
  assert ask("logits", ids=[1])["logits"] == [0.5, 1.5, 2.5]


def test_a_package_that_is_not_installed(worker):
  """One line that says what to type; the process goes on."""
  found = peer_systems.ask(worker, "load", library="transformers", **_LOAD)
  want = "not installed: pip install torch transformers"
  assert peer_systems.reason(found) == want
  found = peer_systems.ask(worker, "load", library="llama.cpp", **_LOAD)
  assert "about" in found


# Weights


def _gguf(tmp_path):
  """A tiny model, stored as Q8_0."""
  config, tensors = read_folder(LLAMA / "mha_llama3")
  return weights_test.write_gguf(
    tmp_path / "tiny.gguf", config, tensors, "Q8_0"
  )


def test_copies_have_the_same_weights(tmp_path):
  """Folder and F32 bit for bit; the others as they are stored (B26)."""
  path, said = _gguf(tmp_path), []
  names = ("transformers", "llama.cpp", "llama.cpp:F16", "llama.cpp:Q8_0")
  systems = [parse(x) for x in names]
  paths = peer_files.needed(str(path), systems, tmp_path / "copies")
  assert [*paths] == ["transformers", "F32", "F16", "Q8_0"]
  assert not peer_files.write(str(path), paths, said.append)
  assert sum("writing" in x for x in said) == 4
  digest = peer_files.check(str(path), paths)
  # what was 8 bits wide still is that
  assert peer_files.digest(paths["Q8_0"]) == digest
  assert peer_files.digest(paths["F16"]) != digest
  first = load.opened(str(path))
  for kind in ("F32", "F16", "Q8_0"):
    again = load.opened(str(paths[kind]))
    assert again.config == first.config
    assert again.tokenizer.vocab_size == first.tokenizer.vocab_size
  again, same = (
    dataclasses.replace(x, inv_freq=())
    for x in (load.source(str(paths["transformers"])).config, first.config)
  )
  assert again == same  # the frequencies' last digits come from a description
  peer_files.write(str(path), paths, said.append)
  assert sum("writing" in x for x in said) == 4  # once


def test_another_copy_is_refused(tmp_path):
  path = _gguf(tmp_path)
  paths = peer_files.needed(str(path), [parse("llama.cpp")], tmp_path)
  other = weights_test.write_gguf(
    tmp_path / "other.gguf", *read_folder(LLAMA / "mha_llama3")
  )
  paths["F32"].parent.mkdir()
  os.rename(other, paths["F32"])
  with pytest.raises(UserError, match="has other weights than the target"):
    peer_files.check(str(path), paths)


def test_a_folder_has_no_gguf(tmp_path):
  paths = {"F32": tmp_path / "F32.gguf"}
  left = peer_files.write(str(LLAMA / TINY[0]), paths, print)
  assert left == {"F32": "needs a target that is a GGUF file"}


@pytest.mark.parametrize("name", ["own", "both"])
def test_an_assistant_drafts_what_the_draft_does(tmp_path, name):
  """Rows for ids that a trimmed head lacks never win; all else is equal."""
  teacher, student = student_test.teacher(), export_test._student("tied", name)
  folder = export_test._save(tmp_path / "draft", student)
  path = tmp_path / "assistant"
  peer_files.assistant(str(folder), teacher, path)
  source = load.source(str(path))
  params, config = weights.load(source, dtype="float32")
  tokens = np.random.default_rng(0).integers(0, student_test.V, (2, 30))
  at = jnp.broadcast_to(jnp.arange(30), (2, 30))

  def law(target, params):
    hidden, _, _ = target.apply(params, jnp.asarray(tokens), at, None)
    return np.asarray(target.unembed(params, hidden))

  got = law(transformer.make(config), params)
  want = law(student.model, {**student.params, **student.shared})
  ids = np.arange(student_test.V) if student.ids is None else student.ids
  ids = np.asarray(ids)
  assert got.shape[-1] == student_test.V
  np.testing.assert_allclose(got[..., ids], want, atol=1e-5)
  np.testing.assert_array_equal(got.argmax(-1), ids[want.argmax(-1)])


# All of it


def test_from_end_to_end(tmp_path, fake, capsys):
  """Ours and a made-up system, which differs; one that is not there."""
  python = tmp_path / "python"
  python.write_text(f"#!/bin/sh\nexec {sys.executable} {fake}\n")
  python.chmod(0o755)
  config = tiny.get_config()
  config.target, config.max_new_tokens = str(_gguf(tmp_path)), 8
  config.sampling.temperature = 0.0
  opened = load.opened(config.target)
  prompt = lambda i: Prompt(f"p{i}", "", (), ("!" * (i + 3),), None)
  case = peer_runs.Case(
    *(load.model(opened), opened, config, tuple(map(prompt, range(2)))),
    *("float32", 1, 2, "", str(python), str(tmp_path / "copies")),
  )
  names = ("transformers", "ours:plain", "ours:ngram2", "ours:draft4")
  found = peer_runs.compare(terminal.console(), case, [*map(parse, names)])
  rows = {row["system"]: row for row in found["rows"]}
  assert [*rows] == [*names]
  assert rows["ours:draft4"]["note"] == "needs --draft=FOLDER"
  assert rows["transformers"]["tokens"] == 16
  plain, ngram = (found["runs"][x] for x in names[1:3])
  assert [r["ids"] for r in plain[0]] == [r["ids"] for r in ngram[1]]
  assert rows["ours:plain"]["tokens_per_call"] == 1
  for row in found["agreement"]:  # it says nothing but 95
    assert row["equal"] == 0 and not row["unstable"]
    assert not any(x["tie_flip"] for x in row["differences"])
  json.dumps(found)
  assert not [*(tmp_path / "copies").rglob("tmp*")]
