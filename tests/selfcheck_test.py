"""What selfcheck calls a fault, what a tie-flip, and what it says.

Faults are planted in the shipped code and in targets; rounding is imitated by a
target that answers a little differently to several tokens at once.
"""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from configs import common
from specjax import (
  agreement,
  attribution,
  findings,
  generate,
  pair,
  request,
  selfcheck,
  terminal,
  twosample,
  verify,
)
from specjax.drafters import lm, replay

ROOT = Path(__file__).parents[1]
V = 16


def no_bar(items):
  return (x for x in items)


# Pairs


def _target():
  """A table model whose logits change by params[1] [V] in passes of K + 1."""
  plain = toy.trigram(V)

  def apply(params, tokens, positions, cache, *, features=()):
    table, lift = params
    logits, taps, cache = plain.apply(table, tokens, positions, cache)
    return logits + lift * (1 < tokens.shape[1] < 64), taps, cache

  return plain._replace(apply=apply, unembed=lambda params, hidden: hidden)


# each target of its own compiles its own programs, so most tests share one
_shared = functools.cache(_target)


@functools.cache
def _drafter():
  return lm.make(toy.trigram(V), V)


@functools.cache
def _table():
  return toy.table(V)


def _noisy():
  """A draft that often agrees with the target."""
  return _table() + jax.random.normal(jax.random.key(3), (V, V, V))


def _case(target, table=None, *, lift=0.0, drafts=None, **values):
  config = common.decoding()
  config.batch_size = 16
  config.sampling.update(values)
  opened = pair.Opened("lm", 3, "block", -1.0, 0.8, None, (), None, None)
  drafts = _noisy() if drafts is None else drafts
  params = _table() if table is None else table, jnp.zeros(V).at[5].set(lift)
  return agreement.Case(
    model=SimpleNamespace(
      target=target, params=params, tokenizer=SimpleNamespace(stop_ids=())
    ),
    pair=pair.Pair(_drafter(), lambda plain: drafts, opened),
    config=config,
    asked=tuple(agreement.Asked(f"p{i}", (i, 0), i) for i in range(16)),
    max_new=48,
    slots=64,
    dtype=jnp.float32,
  )


def _law(case, verifier="block", samples=1000):
  return twosample.law(
    case, samples, verifier, temperature=1.0, length=3, track=no_bar
  )


def _equality(case, verifier, temperature):
  return agreement.equality(
    case, verifier, temperature=temperature, track=no_bar
  )


@pytest.mark.parametrize("verifier", ["block", "token"])
def test_law_of_shipped_code(verifier):
  law = _law(_case(_shared()), verifier)
  assert not law["fault"] and law["samples"] == 1000 and law["tokens"] == 3
  # some drafts are accepted and some are not
  assert 0.1 < law["accepted"] / law["tested"] < 0.9
  assert [x["cells"] > 10 for x in law["tests"]] == [True] * 5


@pytest.mark.slow
def test_replay_drafts_the_plain_tokens():
  case = _case(_shared())
  params = lambda plain: replay.Params(plain, np.float32(0.5))
  case = case._replace(pair=pair.Pair(replay.make(V), params, case.pair.opened))
  law = _law(case, samples=600)
  assert not law["fault"] and law["tested"]
  for verifier, t in (("block", 0.0), ("coupled", 1.0)):
    found = _equality(case, verifier, t)
    assert not found["mismatches"] and found["tokens"] == 16 * 48


def _residual_is_p(monkeypatch):
  monkeypatch.setattr(verify, "_residual", lambda p, q: p)


def _next_has_the_key_of_the_draft(monkeypatch):
  made = generate.keyed_noise

  def shared(state, num_draft, verifier):
    noise = made(state, num_draft, verifier)
    return noise._replace(next=lambda n, p: noise.draft(0, p))

  monkeypatch.setattr(generate, "keyed_noise", shared)


def _everything_passes(monkeypatch):
  made = verify.block

  def block(p, q, draft, u, *, length=None):
    return made(p, q, draft, jnp.full_like(u, -1), length=length)

  monkeypatch.setattr(verify, "block", block)


def test_shared_keys(monkeypatch):
  """Found by the law alone: each draft and each draw is right by itself."""
  _next_has_the_key_of_the_draft(monkeypatch)
  drafts = toy.table(V, seed=1)  # nothing like the target's
  assert _law(_case(_target(), drafts=drafts), samples=3000)["fault"]


def test_a_fault_is_named(monkeypatch, capsys):
  _residual_is_p(monkeypatch)
  case = _case(_target(), drafts=toy.table(V, seed=1))
  assert selfcheck.check(terminal.console(), case, 1000) == 1
  said = capsys.readouterr().err
  assert re.search(r"^law .*the laws differ", said, re.M)
  assert re.search(r"^verdict +FAULT in law", said, re.M)


# Equal tokens


def _tied():
  """Ids 3 and 5 are the two best, and equal, everywhere."""
  return _table().at[..., [3, 5]].set(6.0)


def test_tie_flip(capsys, tmp_path):
  """B10: two equal logits that a wide pass rounds apart: told, exit 0."""
  case = _case(_shared(), _tied(), lift=2e-6)
  path = tmp_path / "out.json"
  assert selfcheck.check(terminal.console(), case, 100, path) == 0
  result = json.loads(path.read_text())
  assert result["faults"] == [] and not result["coupled"]["mismatches"]
  first, *_ = found = result["greedy"]["mismatches"]
  assert {x["prompt"] for x in found} == {f"p{i}" for i in range(16)}
  assert (first["plain"], first["speculative"], first["gap"]) == (3, 5, 0.0)
  assert first["tie_flip"] and first["reproduced"] and first["place"] == 0
  assert first["difference"] == pytest.approx(2e-6, rel=0.3)
  largest = float(jnp.abs(_table()).max())
  assert 0 < first["ulp"] <= 2**-23 * largest
  said = capsys.readouterr().err
  assert re.search(r"^tie-flip +greedy, prompt 'p0', token 1 is 5", said, re.M)
  assert "and 11 more" in said
  assert re.search(r"^verdict +no fault; 16 answers part where", said, re.M)


def test_a_wide_pass_that_is_wrong(capsys):
  """A tie that more than rounding decides."""
  case = _case(_shared(), _tied(), lift=0.05)
  assert selfcheck.check(terminal.console(), case, 100) == 1
  said = capsys.readouterr().err
  assert re.search(r"^fault +greedy, prompt 'p0'", said, re.M)
  assert re.search(r"^verdict +FAULT in .*greedy", said, re.M)


def test_a_wide_pass_that_corrupts_its_cache():
  """Several tokens at once are stored as their successors."""
  target = _target()

  def apply(params, tokens, positions, cache, *, features=()):
    logits, taps, _ = target.apply(params, tokens, positions, cache)
    wrong = (tokens + 1) % V if 1 < tokens.shape[1] < 64 else tokens
    _, _, cache = target.apply(params, wrong, positions, cache)
    return logits, taps, cache

  found = _equality(_case(target._replace(apply=apply)), "block", 0.0)
  assert found["fault"] and len(found["mismatches"]) == 16
  assert not any(x["tie_flip"] for x in found["mismatches"])


def test_a_loop_that_is_wrong(monkeypatch):
  """The passes differ by rounding, the tokens by far more than that."""
  _everything_passes(monkeypatch)
  found = _equality(_case(_target(), lift=2e-6), "block", 0.0)
  assert found["fault"] and len(found["mismatches"]) > 8
  for x in found["mismatches"]:
    assert not x["tie_flip"] and not x["reproduced"]
    assert x["gap"] > 1e-3 and 0 < x["difference"] < 1e-5


def test_answers_that_end_differently(monkeypatch):
  """A row that stops early is a fault, whatever its tokens are."""
  real = generate.speculative

  def shorter(*args, **options):
    out = real(*args, **options)
    out.tokens[3, 40:], out.length[3] = -1, 40
    return out

  monkeypatch.setattr(generate, "speculative", shorter)
  found = _equality(_case(_shared()), "block", 0.0)
  (x,) = found["mismatches"]
  assert found["fault"] and (x["place"], x["speculative"]) == (40, -1)
  row = findings._mismatch_row("greedy", x, dict(K=3, dtype="float32"))
  assert row[0] == "fault" and "one of the two had ended" in row[1]


def _spread():
  """One id at -16000: the last place of the largest logit is 2e-3."""
  return _table().at[..., 7].set(-16000.0)


SAMPLED = {
  "T = 1": {},
  "T = 0.7, truncated": dict(temperature=0.7, top_p=0.8),
  "penalties": dict(repetition_penalty=1.2, frequency_penalty=0.3),
}
SLOW = {"penalties"}  # programs of its own


@pytest.mark.parametrize(
  "values",
  [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in SAMPLED],
)
def test_tie_flips_of_coupled_draws(values):
  """What is compared is log p and noise: some draws are as close as rounding.

  A lift of 0.05 is rounding where the largest |logit| is 16000, 0.5 is not.
  """
  options = {"temperature": 1.0, **SAMPLED[values]}
  rounding, fault = (
    _equality(
      _case(_shared(), _spread(), lift=size, **options),
      "coupled",
      options["temperature"],
    )
    for size in (0.05, 0.5)
  )
  assert rounding["mismatches"] and not rounding["fault"]
  for x in rounding["mismatches"]:
    assert x["reproduced"] and x["difference"] == pytest.approx(0.05, rel=0.1)
    # a token that the truncation left out in one of the passes has none
    assert x["gap"] <= 0.1 if x["gap"] is not None else "truncated" in values
  assert fault["fault"] and len(fault["mismatches"]) > 8
  assert not any(x["tie_flip"] for x in fault["mismatches"])


def test_faults_of_coupled_draws(monkeypatch):
  """Noise that is not that of plain decoding."""
  real = generate.keyed_noise

  def shifted(state, num_draft, verifier):
    before = state.prompt_length - 1
    return real(state._replace(prompt_length=before), num_draft, verifier)

  monkeypatch.setattr(generate, "keyed_noise", shifted)
  found = _equality(_case(_target(), lift=2e-6), "coupled", 1.0)
  assert found["fault"] and not any(x["tie_flip"] for x in found["mismatches"])


def test_the_gap_is_what_decides_a_draw():
  """A token's logit lifted by its gap, and no less, makes it the one drawn."""
  rng = np.random.default_rng(0)
  ask = request.make([[0]], max_new=1, temperature=0.7)
  values = jax.tree.map(lambda x: x[0], ask.sampling)
  for seed in range(20):
    key = jax.random.key(seed)
    logits = jnp.asarray(rng.normal(0, 1, 200), jnp.float32)
    gap = lambda token, x=logits, key=key: attribution._gap(
      x, values, None, key, [token]
    )
    assert gap(_drawn(logits, values, key)) == 0.0
    token = int(np.argsort(logits)[-1 - seed % 5])
    need = gap(token)
    lifted = [logits.at[token].add(need + x) for x in (1e-3, -1e-2)]
    drawn = [_drawn(x, values, key) for x in lifted]
    assert drawn[0] == token and (need == 0 or drawn[1] != token)


def _drawn(logits, values, key):
  return int(attribution._draw(attribution._law(logits, values, None), key))


def test_draws_of_many_blocks_have_a_gap_of_zero():
  ask = request.make([[0]], max_new=1, temperature=1.0)
  values = jax.tree.map(lambda x: x[0], ask.sampling)
  logits = jax.random.normal(jax.random.key(0), (1000,))
  for seed in range(20):
    key = jax.random.key(seed)
    token = _drawn(logits, values, key)
    gap = attribution._gap(logits, values, None, key, [token, token])
    assert gap == 0.0
    other = attribution._gap(logits, values, None, key, [token, token ^ 256])
    assert other > 0


# The command


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return tmp_path_factory.mktemp("cache")


def _command(*args):
  return [sys.executable, "-m", "specjax.selfcheck", *map(str, args)]


def _run(*args, cache, command=_command):
  return subprocess.run(
    command("--config=configs/tiny.py", *args),
    cwd=ROOT,
    env=dict(os.environ, SPECJAX_CACHE=str(cache), COLUMNS="80"),
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    timeout=500,
  )


def test_command(cache, tmp_path):
  """Plain lines on stderr, nothing on stdout, all of it in the JSON file."""
  path = tmp_path / "out.json"
  # the law's batch, so that both share programs
  batch = f"--config.batch_size={twosample.ROWS}"
  run = _run("--samples=400", batch, f"--json={path}", cache=cache)
  assert (run.returncode, run.stdout) == (0, ""), run.stderr
  assert not re.search(r"[\x00-\x09\x0b-\x1f─█]", run.stderr)
  rows = ["law", "would see", "sampled", "greedy", "coupled", "verdict"]
  for name in rows:
    assert re.search(rf"^{name}  +\S", run.stderr, re.M), name
  assert re.search(r"^400 texts each way \.\.\.$", run.stderr, re.M)
  assert re.search(r"^13 of 25, \d+ s left$", run.stderr, re.M)
  assert "1 of 1 answers equal plain decoding (64 tokens, K = 4" in run.stderr
  assert run.stderr.splitlines()[-2:] == [
    "verdict    no fault",
    f"wrote {path}",
  ]
  result = json.loads(path.read_text())
  assert result["schema"] == 1 and result["faults"] == []
  law = result["law"]
  assert (law["samples"], law["tokens"], law["temperature"]) == (400, 3, 1.0)
  assert law["verifier"] == "block" and len(law["tests"]) == 5
  for test in law["tests"]:
    assert set(test) == {"name", "cells", "p_value", "level", "smallest_bias"}
    assert test["level"] == 2e-5 < test["p_value"]
  for name in ("greedy", "coupled"):
    part = result[name]
    assert (part["answers"], part["tokens"]) == (1, 64)
    assert part["mismatches"] == [] and part["fault"] is False
  assert result["greedy"]["temperature"] == 0.0
  assert result["config"]["draft"]["name"] == "ngram"
  assert result["device"]["platform"] == "cpu" and result["K"] == 4


BROKEN = """
import runpy, sys
from specjax import verify
verify._residual = lambda p, q: p
sys.argv[0] = "selfcheck"
runpy.run_module("specjax.selfcheck", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_command_finds_a_fault(cache):
  """A residual that is p, with a draft that is often wrong."""
  run = _run(
    "--config.sampling.temperature=0.1",
    "--config.verifier=token",
    "--config.draft.name=lm",
    "--config.draft.layers=0",
    "--samples=1000",
    "--config.max_new_tokens=4",
    cache=cache,
    command=lambda *args: [sys.executable, "-c", BROKEN, *args],
  )
  assert run.returncode == 1, run.stderr
  assert re.search(r"^verdict +FAULT in law: ", run.stderr, re.M)


@pytest.mark.parametrize(
  "args, message",
  [
    (["--config.decoder=autoregressive"], "has no draft to check"),
    (["--config.max_new_tokens=0"], "leaves no token to check"),
    (["--samples=99"], "--samples must be at least 100, got 99"),
    (["--samples=many"], "expected a whole number"),
    (["--smples=99"], "did you mean --samples?"),
    (["--json=/nowhere/a.json"], "cannot write --json=/nowhere/a.json"),
    (["--config.prompt=" + "x" * 2048], "leaves no room for an answer"),
  ],
)
def test_mistakes(args, message, tmp_path):
  own = [] if args[0].startswith("--json") else [f"--json={tmp_path}/a.json"]
  run = _run(*own, *args, cache=tmp_path / "cache")
  assert (run.returncode, run.stdout) == (2, "")
  assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1
  assert message in run.stderr
  assert not list(tmp_path.glob("*.json"))


def test_interrupt(cache):
  """Ctrl-C while it samples: one line, code 130."""
  run = subprocess.Popen(
    _command("--config=configs/tiny.py", "--samples=4000"),
    cwd=ROOT,
    env=dict(os.environ, SPECJAX_CACHE=str(cache)),
    stderr=subprocess.PIPE,
    text=True,
  )
  with contextlib.closing(run.stderr) as lines:
    while " s left" not in lines.readline():
      assert run.poll() is None
    run.send_signal(signal.SIGINT)
    rest = lines.read().splitlines()
  assert run.wait(timeout=60) == 130
  assert rest == ["interrupted"]
