"""Faults planted in the shipped code, each of which a check must find.

A mutant is the shipped code with some of its text replaced, or with other
noise. It must fail a check that the code as it is passes. `docs/exactness.md`
lists them; `python tests/mutants_test.py` prints that table, with the exact
distance of each mutant's law from the target's.
"""

import contextlib
import functools
import inspect
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import coupling_test
import jax
import jax.numpy as jnp
import keys_test
import numpy as np
import pytest
import round_test
import survival_test
from jax import lax

from specjax import generate, loop, request, rounds, sampling, verify
from specjax.drafters import lm

V, K = 3, 2

# Checks of the law by enumeration


def _case(verifier, dtype=jnp.float64):
  """A draft with a cache of its own; the law is of K + 2 = 4 tokens."""
  # behind half of the texts more than one token has p > q: where it is one, a
  # residual is that token, whatever its formula
  case = round_test.lm_case(V, K, 1, dtype, dense=True)
  return case._replace(verifier=verifier)


def _cut(dtype=jnp.float64):
  return round_test.with_top_p(_case("token", dtype), 0.8)


def _check_law(case, tolerance=1e-12):
  """The law alone, without the marks that a round leaves."""
  with jax.enable_x64(True):
    assert round_test.law_error(case(), checks=False) <= tolerance


def check_token_law():
  _check_law(lambda: _case("token"))


def check_block_law():
  _check_law(lambda: _case("block"))


def check_top_p_law():
  _check_law(_cut)


def check_float32_law():
  _check_law(lambda: _case("token", jnp.float32), 1e-6)


def check_prefixes():
  """The law, that each draft is drawn from its own, and the marks."""
  with jax.enable_x64(True):
    assert round_test.law_error(_case("token")) <= 1e-12


def _coupled():
  return coupling_test.plain_case(V, K, 4, 1, "same")


def check_coupled_law():
  with jax.enable_x64(True):
    coupling_test.check_law(_coupled(), jnp.float64)


def check_coupled_marks():
  """The draft says itself where it ends."""
  case = coupling_test.adversary(V, K, 4, 1, "ends before it is wrong")
  with jax.enable_x64(True):
    coupling_test.check_coupling(case, jnp.float64)


def check_token_survival():
  survival_test.check_survival("token")


def check_block_survival():
  survival_test.check_survival("block")


def check_adversaries():
  round_test.check_adversaries("token")


def check_block_adversaries():
  round_test.check_adversaries("block")


# Checks of tokens


def _tokens(verifier, ask, n, draft=None):
  """Of plain decoding (verifier None) or of speculation, [B, n]."""
  target = coupling_test.target_of(V)
  p, q = (jnp.asarray(np.log(x), jnp.float32) for x in keys_test.laws())
  options = dict(max_new_tokens=n, slots=64)
  if not verifier:
    return generate.autoregressive(target, p, ask, **options)
  q = q if draft is None else draft
  return generate.speculative(
    target,
    lm.make(target, V),
    p,
    q,
    ask,
    num_draft=K,
    verifier=verifier,
    **options,
  )


def check_plain_sample():
  """Coupled: the plain sample of that seed; an equal draft is always right."""
  n, rows = 9, 64
  ask = request.make(
    [[1, 2]] * rows, max_new=n, seed=np.arange(rows), temperature=1.0
  )
  want = _tokens(None, ask, n).tokens
  np.testing.assert_array_equal(_tokens("coupled", ask, n).tokens, want)
  p = jnp.asarray(np.log(keys_test.laws()[0]), jnp.float32)
  equal = _tokens("coupled", ask, n, draft=p)
  np.testing.assert_array_equal(equal.tokens, want)
  assert (equal.stats.steps == n // (K + 1)) and equal.accepted[:, :K].all()


def check_histories():
  """B12, B49: penalties and a minimum, sampled and greedy, as when plain."""
  n, rows = 9, 64
  ask = request.make(
    [[i % V, i % 2] for i in range(rows)],
    max_new=n,
    seed=np.arange(rows),
    temperature=[1.0, 1.0, 0.0, 0.0] * (rows // 4),
    stop_ids=[2],
    min_new_tokens=[0, 6] * (rows // 2),
    frequency_penalty=0.9,
    repetition_penalty=[1.0, 1.5] * (rows // 2),
  )
  want = _tokens(None, ask, n).tokens
  np.testing.assert_array_equal(_tokens("coupled", ask, n).tokens, want)


# How far a mutant's law is from the target's


def _exact(case):
  def distance():
    with jax.enable_x64(True):
      return round_test.total_variation(case())

  return distance


def _of_coupled():
  with jax.enable_x64(True):
    case = _coupled()
    _, tokens, _, _ = coupling_test.run(case, jnp.float64)
    got, want = coupling_test.counts(case, tokens)
  return np.abs(got - want).sum() / 2 / len(tokens)


def _counted(verifier, num_draft, calls=4, rows=2**16):
  """By 262,144 rows: up to .005 of it may be chance."""

  def distance():
    both = [
      keys_test.counts(verifier, num_draft, rows=rows, seed=seed)
      for seed in range(calls)
    ]
    got = sum(counts for counts, _ in both) / (calls * rows)
    return np.abs(got - both[0][1]).sum() / 2

  return distance


_of_token = _exact(lambda: _case("token"))
DISTANCE = {  # of the mutants that a check kills; others may leave the law
  check_token_law: _of_token,
  check_float32_law: _of_token,
  check_block_law: _exact(lambda: _case("block")),
  check_top_p_law: _exact(_cut),
  check_coupled_law: _of_coupled,
  keys_test.check_counts: _counted("token", 2),
  keys_test.check_counts_block: _counted("block", 3),
}


class Mutant(NamedTuple):
  check: Callable  # what kills it
  module: Any
  name: str  # in the module
  broken: Callable  # instead of what is there


# Faults in the noise

_NOISE = generate.keyed_noise
_fold = jax.vmap(jax.random.fold_in, (0, None))
_fold_each = jax.vmap(jax.random.fold_in)


def _draw(p, keys):
  return jax.vmap(sampling.draw)(p, keys)


def _one_u(noise, state):
  """One u for all positions: each token has its law, two together do not."""
  u = jnp.broadcast_to(noise.accept[:, :1], noise.accept.shape)
  return noise._replace(accept=u)


def _draft_keys(state):
  return _fold(_fold(state.key, rounds._DRAFT), state.steps)


def _next_has_the_key_of_a_draft(noise, state):
  """B07: of the draft at the place that is drawn again."""
  keys = _draft_keys(state)
  return noise._replace(next=lambda n, p: _draw(p, _fold_each(keys, n)))


def _next_has_the_key_of_the_first_draft(noise, state):
  keys = _draft_keys(state)
  return noise._replace(next=lambda n, p: _draw(p, _fold(keys, 0)))


def _draft_by_the_uniforms_of_the_test(noise, state):
  """B07: an inverse CDF at u, and then the test with the same u."""

  def draft(i, q):
    below = q.cumsum(-1) <= noise.accept[:, i, None] * q.sum(-1, keepdims=True)
    return jnp.minimum(below.sum(-1), q.shape[-1] - 1).astype(jnp.int32)

  return noise._replace(draft=draft)


def _rounds_share_keys(noise, state):
  first = state._replace(steps=0 * state.steps)
  return _NOISE(first, noise.accept.shape[1], "token")


def _drafts_share_a_key(noise, state):
  return noise._replace(draft=lambda i, q: noise.draft(0, q))


def _rows_share_keys(noise, state):
  first = jnp.broadcast_to(state.key[:1], state.key.shape)
  return _NOISE(state._replace(key=first), noise.accept.shape[1], "token")


def drafts_keyed_by_place(noise, state):
  """A place that is drafted again gets the same noise again."""
  keys = _fold(state.key, rounds._DRAFT)
  place = state.length - state.prompt_length
  return noise._replace(
    draft=lambda i, q: _draw(q, _fold_each(keys, place + i))
  )


def _fresh_sample(noise, state):
  keys = _fold(_fold(state.key, rounds._NEXT), state.steps)
  return noise._replace(next=lambda i, p: _draw(p, _fold_each(keys, i)))


def _draft_one_place_late(noise, state):
  return noise._replace(draft=lambda i, q: rounds.draw_at(state, i + 1, q))


def _sample_one_place_late(noise, state):
  return noise._replace(next=lambda i, p: rounds.draw_at(state, i + 1, p))


def _noise(check, change):
  def broken(state, num_draft, verifier):
    return change(_NOISE(state, num_draft, verifier), state)

  return Mutant(check, generate, "keyed_noise", broken)


# Faults in what a draft is drawn from


def _argmax(q, p):
  return jax.nn.one_hot(jnp.argmax(q, -1), V, dtype=q.dtype)


def _cold(q, p):
  return q ** (1 / 0.7)


def _top_two(q, p):
  return jnp.where(q >= jnp.sort(q, -1)[..., 1:2], q, 0)


def _best_of_two(q, p):
  """The law of the one of two draws that the target likes more."""
  i = jnp.arange(V)
  above = p[..., :, None] > p[..., None, :]
  above |= (p[..., :, None] == p[..., None, :]) & (i[:, None] < i)
  beaten = jnp.where(above, q[..., None, :], 0).sum(-1)
  return q * (q + 2 * beaten)


def _coarse_logits(q, p):
  # not by astype there and back, which XLA is free to leave out
  return jax.nn.softmax(lax.reduce_precision(jnp.log(q), 8, 7), -1)


def _drawn_from(change):
  """B05, B06: `lm.make` that draws from change(q, p) and says q; K = 2."""
  shipped = lm.make

  def make(model, vocab_size):
    drafter = shipped(model, vocab_size)

    def propose(params, state, context, noise):
      rows = jnp.arange(len(context.tokens))
      last = context.tokens[rows, context.length - 1]
      before = context.tokens[rows, jnp.maximum(context.length - 2, 0)]
      before = jnp.where(context.length > 1, before, 0)
      first = []

      def draft(i, q):
        inside = not isinstance(i, int)  # of the loop: the second one
        seen = (last, first[0]) if inside else (before, last)
        p = jnp.asarray(_case("token").p, q.dtype)[seen]
        token = noise.draft(i, change(q, p))
        if not inside:
          first.append(token)
        return token

      noisy = noise._replace(draft=draft)
      return drafter.propose(params, state, context, noisy)

    return drafter._replace(propose=propose)

  return Mutant(check_token_law, lm, "make", make)


# Faults in the text


def _text(check, module, name, *changes):
  """The shipped function with some of its text replaced."""
  source = inspect.getsource(getattr(module, name))
  for old, new in changes:
    assert source.count(old) == 1, old
    source = source.replace(old, new)
  names = dict(vars(module))
  exec(source, names)
  return Mutant(check, module, name, names[name])


_token = functools.partial(_text, check_token_law, verify, "token")
_block = functools.partial(_text, check_block_law, verify, "block")
_history = functools.partial(_text, check_histories, sampling, "extend")
_commit = functools.partial(_text, check_histories, loop, "commit")

RAW = (  # the ratio before top-p, the residual behind it
  (
    "  n, following = _judge(verifier, p, proposal, noise)",
    "  raw = jax.nn.softmax(logits)\n"
    "  n, _ = _judge(verifier, raw, proposal, noise)\n"
    "  behind = jnp.pad(proposal.probs, ((0, 0), (0, 1), (0, 0)))\n"
    "  following = noise.next(n, jax.vmap(verify._residual)("
    "p[jnp.arange(len(n)), n], behind[jnp.arange(len(n)), n]))",
  ),
)
COARSE = (
  (
    "    p, proposal.probs, draft, noise.accept",
    "    *(jax.lax.reduce_precision(x, 8, 7) for x in (p, proposal.probs)),"
    " draft, noise.accept",
  ),
)

MUTANTS = {
  # the noise
  "one u": _noise(keys_test.check_counts, _one_u),
  "block: one u": _noise(keys_test.check_counts_block, _one_u),
  "draft by the u of the test": _noise(
    keys_test.check_counts, _draft_by_the_uniforms_of_the_test
  ),
  "next: the draft's key": _noise(
    keys_test.check_counts, _next_has_the_key_of_a_draft
  ),
  "next: the first draft's key": _noise(
    keys_test.check_keys, _next_has_the_key_of_the_first_draft
  ),
  "rounds share keys": _noise(keys_test.check_counts, _rounds_share_keys),
  "drafts share a key": _noise(keys_test.check_counts, _drafts_share_a_key),
  "rows share keys": _noise(keys_test.check_keys, _rows_share_keys),
  "block: drafts keyed by place": _noise(
    keys_test.check_counts_block, drafts_keyed_by_place
  ),
  # what is drawn from
  "argmax draft": _drawn_from(_argmax),
  "draft at T = 0.7": _drawn_from(_cold),
  "draft from the top two": _drawn_from(_top_two),
  "the better of two drafts": _drawn_from(_best_of_two),
  "draft from bfloat16 logits": _drawn_from(_coarse_logits),
  # the laws that are compared
  "raw ratio": _text(check_top_p_law, rounds, "_judged", *RAW),
  "bfloat16 p and q": _text(check_float32_law, rounds, "_judge", *COARSE),
  "scored one place too late": _text(
    check_token_law,
    loop,
    "positions",
    ("state.length - 1, state", "state.length, state"),
  ),
  # token verification
  "resample from p": _text(
    check_token_law, verify, "_residual", ("jnp.maximum(p - q, 0)", "p")
  ),
  "bonus from the residual": _token(
    ("jnp.concatenate([q, jnp.zeros_like(p[:1])])", "q")
  ),
  "drop what the draft finds unlikely": _token(
    ("(q_draft > 0)", "(q_draft > 0.2)")
  ),
  "count behind a reject": _token(
    ("jnp.cumprod(keep.astype(jnp.int32))", "keep.astype(jnp.int32)")
  ),
  "residual of the next place": _token(
    ("_residual(p[n]", "_residual(p[n + 1]")
  ),
  "u <= p / q": _text(
    check_adversaries,
    verify,
    "token",
    ("u * q_draft < p_draft", "u * q_draft <= p_draft"),
  ),
  "without q > 0": _text(
    check_adversaries, verify, "token", ("(q_draft > 0) & ", "")
  ),
  "the length of a draft is not passed": _text(
    check_adversaries,
    rounds,
    "_judge",
    ("noise.accept, length=length", "noise.accept"),
  ),
  "the last draft is never tested": _text(
    check_token_survival,
    verify,
    "token",
    ("K if length is None else length", "K - 1"),
  ),
  # block verification
  "block: the residual of token": _block(
    ("_residual(pi[n] * p[n], q[n])", "_residual(p[n], q[n])")
  ),
  "block: residual of the next place": _block(
    ("_residual(pi[n] * p[n], q[n])", "_residual(pi[n] * p[n + 1], q[n])")
  ),
  "block: a prefix passes by pi": _block(("u < h[1:]", "u < pi[1:]")),
  "block: all K by the ratio of the whole": _block(
    (
      "  passes =",
      "  h = h.at[K].set(jnp.minimum(1, jnp.prod(ratio)))\n  passes =",
    )
  ),
  "block: the product without the min": _block(
    ("jnp.minimum(1, pi[-1] * r)", "pi[-1] * r")
  ),
  "block: u one place early": _block(("u < h[1:]", "u < h[:-1]")),
  "block: stops at the first failure": _block(
    ("(passes * jnp.arange", "(jnp.cumprod(passes) * jnp.arange")
  ),
  "block: bonus from the residual": _block(
    ("jnp.concatenate([q, jnp.zeros_like(p[:1])])", "q[jnp.arange(K + 1)]")
  ),
  "block: without q > 0": _text(
    check_block_adversaries, verify, "block", ("(q_draft > 0) & ", "")
  ),
  "block: the last draft is never tested": _text(
    check_block_survival,
    verify,
    "block",
    ("K if length is None else length", "K - 1"),
  ),
  # coupled verification
  "coupled: accept behind a mismatch": _text(
    check_coupled_law, verify, "coupled", ("jnp.cumprod(same)", "same")
  ),
  "coupled: the sample of the place before": _text(
    check_coupled_law,
    rounds,
    "_judge",
    ("sample[jnp.arange(B), n]", "sample[jnp.arange(B), n - (n > 0)]"),
  ),
  "coupled: the length is not passed": _text(
    check_coupled_marks,
    rounds,
    "_judge",
    ("(draft, sample, length=length)", "(draft, sample)"),
  ),
  "coupled: the sample from a fresh key": _noise(
    check_plain_sample, _fresh_sample
  ),
  "coupled: the sample's noise one place late": _noise(
    check_plain_sample, _sample_one_place_late
  ),
  "coupled: the draft's noise one place late": _noise(
    check_plain_sample, _draft_one_place_late
  ),
  # what a round leaves behind
  "the draft misses an accepted token": _text(  # B04: exact, but slower
    check_prefixes, lm, "make", ("jnp.array([-2, -1])", "jnp.array([-1, -1])")
  ),
  "overlap at the wrong place": _text(
    check_prefixes, rounds, "_overlap", ("p[:, :K]", "p[:, 1:]")
  ),
  "one history for all places": _history(
    ("jnp.cumsum(more, 0)", "0 * jnp.cumsum(more, 0)")
  ),
  "a draft counts at its own place": _history(
    (
      "[jnp.zeros((1, V), jnp.int32), jnp.cumsum(more, 0)]",
      "[jnp.cumsum(more, 0), more.sum(0, keepdims=True)]",
    )
  ),
  "a draft does not count for the minimum": _history(
    (
      "history.generated + jnp.arange(K + 1)",
      "jnp.broadcast_to(history.generated, (K + 1,))",
    )
  ),
  "rejected tokens are counted": _commit(
    ("jnp.where(keep, tokens, target.vocab_size)", "tokens")
  ),
  "a round counts as one token": _commit(
    ("history.generated + emitted", "history.generated + 1")
  ),
}


@contextlib.contextmanager
def planted(mutant):
  """The shipped code with one fault, compiled anew, and whole again after."""

  def forget():
    for jitted in (generate._speculate, generate._advance):
      jitted.clear_cache()
    for programs in (round_test._program, coupling_test._program):
      programs.cache_clear()

  with pytest.MonkeyPatch.context() as patch:
    for place in {mutant.module, generate, rounds}:  # wherever it is imported
      if hasattr(place, mutant.name):
        patch.setattr(place, mutant.name, mutant.broken)
    forget()
    yield
  forget()


CHECKS = list(dict.fromkeys(mutant.check for mutant in MUTANTS.values()))


@pytest.mark.parametrize("check", CHECKS)
def test_shipped_code(check):
  """What kills a mutant passes without it."""
  check()


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(name):
  """B02, B04 to B07, B12, B48, B49, B64: by a check of the shipped code."""
  with planted(MUTANTS[name]), pytest.raises(AssertionError):
    MUTANTS[name].check()


def test_drafts_keyed_by_place_spare_token_verification():
  """What ruins block verification: here no u looks behind a rejection."""
  fault = _noise(None, drafts_keyed_by_place)
  with planted(fault):
    assert keys_test.chi_square("token", 3) > keys_test.LEVEL


# The table of docs/exactness.md

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "exactness.md"


def shown(name):
  """The distance of a mutant's law from the target's, as the table has it."""
  mutant = MUTANTS[name]
  distance = DISTANCE.get(mutant.check)
  if distance is None:
    return "-"
  with planted(mutant):
    x = distance()
  counted = distance.__qualname__.startswith("_counted")
  return f"{x:.2f} counted" if counted else f"{x:.2g}"


def row(name, distance):
  return f"| {name} | {distance} | {MUTANTS[name].check.__name__} |"


def _table():
  """[(name, distance, what kills it)] of the page."""
  text = PAGE.read_text().partition("## Mutants")[2].partition("\n## ")[0]
  cells = re.findall(r"^\| (.+?) \| (.+?) \| (check_\w+) \|$", text, re.M)
  lines = [line for line in text.splitlines() if line.startswith("|")]
  assert len(cells) == len(lines) - 2  # but for its head
  return cells


def test_the_page_lists_the_mutants():
  """All of them, in order, and what kills each."""
  want = [(name, mutant.check.__name__) for name, mutant in MUTANTS.items()]
  assert [(name, check) for name, _, check in _table()] == want
  for name, distance, _ in _table():
    assert (distance == "-") == (MUTANTS[name].check not in DISTANCE)


@pytest.mark.slow  # five minutes
def test_the_page_has_the_distances():
  for name, distance, _ in _table():
    assert distance == shown(name), name


if __name__ == "__main__":
  print("| mutant | distance | killed by |\n|---|---|---|")
  for name in MUTANTS:
    print(row(name, shown(name)), flush=True)
