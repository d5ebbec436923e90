"""Hashes of 13 words in a row: what they find, and that they stay the same."""

import hashlib

import numpy as np
import pytest
import student_test as trained

from specjax import answers, overlap, prompts, trajectories
from specjax.errors import UserError
from specjax.models import tokenizer

WORDS = [f"word{i}" for i in range(40)]


def test_runs_are_hashed_as_documented():
  """By the first 8 bytes of blake2b, in every process and version."""
  found = overlap.grams("  ".join(WORDS[:15]))
  right = [" ".join(WORDS[i : i + 13]).encode() for i in range(3)]
  right = [hashlib.blake2b(run, digest_size=8).digest() for run in right]
  assert found.tobytes() == b"".join(right)


@pytest.mark.parametrize("count, runs", [(0, 0), (12, 0), (13, 1), (20, 8)])
def test_a_short_text_has_no_run(count, runs):
  assert overlap.grams(" ".join(WORDS[:count])).shape == (runs,)


def test_what_is_shared_is_found():
  """Whatever the case and the punctuation; 12 words are too few."""
  trained_on = overlap.grams(" ".join(WORDS[:30]))
  inside = "Tell me: " + ", ".join(WORDS[7:20]).upper() + " \u2014 why?"
  fewer = "Tell me: " + ", ".join(WORDS[7:19]) + " \u2014 why?"
  mixed = " ".join(WORDS[:12] + ["other"] + WORDS[12:24])
  found = overlap.shared(trained_on, [inside, fewer, mixed, ""])
  assert found.tolist() == [True, False, False, False]


def test_prompts_count_and_answers_do_not():
  """A given text has no prompt but itself. Each run is kept once, sorted."""
  tok = trained.teacher().tokenizer
  ids = lambda words: tokenizer.encode(tok, " ".join(words))
  rows = [
    (ids(WORDS[:14]), ids(WORDS[20:40]), 0.0),
    (ids(WORDS[:14]), ids(WORDS[:20]), 1.0),
    (ids(["a"])[:1], ids([*"bc", *WORDS[25:38]]), np.nan),
  ]
  found = overlap.of(tok, trajectories.make(rows))
  text = tokenizer.decode(tok, [*rows[2][0], *rows[2][1]])
  right = {*overlap.grams(" ".join(WORDS[:14])), *overlap.grams(text)}
  assert found.tolist() == sorted(map(int, right))


def test_they_come_back(tmp_path):
  assert overlap.read(tmp_path) is None
  right = np.unique(overlap.grams(" ".join(WORDS)))
  overlap.write(tmp_path, right)
  np.testing.assert_array_equal(overlap.read(tmp_path), right)
  overlap.write(tmp_path, np.empty(0, np.uint64))
  assert overlap.read(tmp_path).shape == (0,)


@pytest.mark.parametrize(
  "damage",
  [
    lambda path: path.write_bytes(path.read_bytes()[:-3]),
    lambda path: path.write_bytes(b""),
    lambda path: np.save(path, np.array([3, 2], np.uint64)),
    lambda path: np.save(path, np.array([2.0, 3.0])),
    lambda path: np.save(path, np.array([{}]), allow_pickle=True),
  ],
)
def test_a_damaged_file_is_refused(tmp_path, damage):
  """Never read as "nothing is shared"."""
  overlap.write(tmp_path, np.unique(overlap.grams(" ".join(WORDS))))
  damage(tmp_path / overlap.FILE)
  with pytest.raises(UserError, match="is damaged; copy the whole folder"):
    overlap.read(tmp_path)


def _batches(*prompts):
  turn = lambda i, p: answers.Turn(i, p, 0)
  found = [
    answers.Answer(turn(i, p), (), (), "", "stop", (), ())
    for i, p in enumerate(prompts)
  ]
  batch = answers.Batch("speculative", tuple(found), 0, 0, 0, 0, 0, None, False)
  return [batch, batch]


def test_a_run_tells_what_its_draft_was_trained_on(tmp_path):
  """In any turn, or what came before them; each prompt counts once."""
  text = " ".join(WORDS[:14])
  overlap.write(tmp_path, np.unique(overlap.grams(text)))
  one = lambda name, *turns, history=(): prompts.Prompt(
    name, "", history, turns, None
  )
  said = ({"role": "user", "content": text},)
  batches = _batches(
    one("a", "no"), one("b", "no", text), one("c", "no", history=said)
  )
  found = overlap.of_run(overlap.read(tmp_path), batches)
  assert found == {"prompts": 3, "shared": ["b", "c"]}
  ((_, told),) = overlap.rows(found)
  assert told == "on 2 of 3 prompts (b, c), by runs of 13 words"
  found = overlap.of_run(overlap.read(tmp_path), batches[:0])
  assert overlap.rows(found)[0][1].startswith("on none of 0 prompts,")


def test_a_draft_without_hashes_tells_nothing(tmp_path):
  for hashes in (None, overlap.read(tmp_path)):
    found = overlap.of_run(hashes, _batches())
    assert found is None and overlap.rows(found) == []
