"""The joint law of three tokens under every sampling option, by counting.

Equality with plain decoding (`coupled_test`) says nothing of the verifiers that
draw: here the shipped loop decodes many rows with a draft far from the target,
and chi-square compares them with the law computed from the options' own words.
An option that reaches only some places of a block (B12), or a history that
advances by the round (B49), moves that law: such faults are planted.
"""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import toy
from scipy import stats

from specjax import generate, request, rounds, sampling, types
from specjax.drafters import lm

V, T = 4, 3  # ids, tokens of an answer
PROMPT = [3]
STOP = 2
LEVEL = 1e-4
QUICK = 4096  # rows of an option
CALL, CALLS = 2**15, 8  # rows of a call; calls of an option in the slow tests
# Verifiers and K: a block ends behind the first token, the second, the answer.
JUDGES = [("token", 1), ("block", 2), ("token", 2), ("block", 3)]


@functools.cache
def _tables():
  """Logits [V, V, V] of target and draft, as float32 has them.

  Seldom alike, yet so that drafts are accepted under every option: a place that
  is never reached hides a fault there.
  """
  p = np.asarray(toy.table(V, seed=3, scale=1.5))
  return p, np.asarray(toy.table(V, seed=4)) / 2 + p / 2


BIAS = (1.5, -np.inf, 0.0, -0.7)
OPTIONS = {
  "cold": dict(temperature=0.3),
  "hot": dict(temperature=1.7),
  "top_k": dict(temperature=1.4, top_k=2),
  "top_p": dict(temperature=0.8, top_p=0.75),
  "min_p": dict(temperature=1.5, min_p=0.4),
  "bias": dict(temperature=0.8, bias=BIAS),
  "repetition": dict(temperature=0.7, repetition_penalty=2.5),
  "presence": dict(temperature=0.7, presence_penalty=1.0),
  "frequency": dict(temperature=1.4, frequency_penalty=2.0),
  "minimum": dict(temperature=1.3, min_new_tokens=2),
  "greedy": dict(temperature=0.0),
  "all": dict(
    temperature=1.3,
    top_k=3,
    top_p=0.9,
    min_p=0.05,
    bias=BIAS,
    repetition_penalty=1.3,
    presence_penalty=-0.4,
    frequency_penalty=0.5,
    min_new_tokens=1,
  ),
}
# what one batch holds: an option alone, as it has a program of its own
# without the others, and greedy rows beside sampled ones
CASES = {name: (name,) for name in OPTIONS if name != "greedy"}
CASES["greedy beside sampled"] = ("greedy", "hot", "top_p")
OFF = dict(
  temperature=1.0,
  top_k=0,
  top_p=1.0,
  min_p=0.0,
  repetition_penalty=1.0,
  presence_penalty=0.0,
  frequency_penalty=0.0,
  min_new_tokens=0,
)


def _law(logits, answer, asked):
  """p [V] behind an answer, by the words of `sampling.probabilities`."""
  o = {**OFF, "bias": np.zeros(V), **asked}
  x = logits.astype(np.float64) + o["bias"]
  if len(answer) < o["min_new_tokens"]:
    x[STOP] = -np.inf
  for token in set(PROMPT) | set(answer):
    x[token] *= o["repetition_penalty"] ** (-1 if x[token] > 0 else 1)
  for token in set(answer):
    x[token] -= o["presence_penalty"]
    x[token] -= o["frequency_penalty"] * answer.count(token)
  if o["temperature"] == 0:
    return np.eye(V)[np.argmax(x)]
  p = np.exp((x - x.max()) / o["temperature"])
  p /= p.sum()
  order = np.argsort(-p)
  order = order[: o["top_k"] or V]
  mass = p[order].cumsum() / p[order].sum()
  order = order[: 1 + np.sum(mass < o["top_p"])]
  order = [i for i in order if p[i] >= o["min_p"] * p.max()]
  kept = np.zeros(V)
  kept[order] = p[order]
  return kept / kept.sum()


@functools.cache
def _target_law(name):
  """{answer: probability}; one ends behind its stop token."""
  table, asked = _tables()[0], OPTIONS[name]
  done, open_ = {}, {(): 1.0}
  for _ in range(T):
    longer = {}
    for answer, weight in open_.items():
      a, b = (0, *PROMPT, *answer)[-2:]
      for token, p in enumerate(_law(table[a, b], answer, asked)):
        into = done if token == STOP else longer
        into[(*answer, token)] = weight * p
    open_ = longer
  return done | open_


def _decode(names, judge, rows, *, seed=0, target=None):
  """Tokens [rows / G, G, T] of the options of each name, side by side."""
  target = target or _target()
  asked = [OPTIONS[name] for name in names]
  count = rows // len(names)
  given = {key for o in asked for key in o}
  values = {
    key: np.tile([o.get(key, OFF[key]) for o in asked], count)
    for key in given - {"bias"}
  }
  if "bias" in given:
    bias = [o.get("bias", np.zeros(V)) for o in asked]
    values["bias"] = np.tile(bias, (count, 1))
  seeds = seed * 2**20 + np.arange(count * len(names))
  prompts = [PROMPT] * len(seeds)
  ask = request.make(prompts, max_new=T, seed=seeds, stop_ids=[STOP], **values)
  table, q = _tables()
  verifier, num_draft = judge
  out = generate.speculative(
    target,
    lm.make(target, V),
    table,
    q,
    ask,
    num_draft=num_draft,
    max_new_tokens=T,
    verifier=verifier,
    slots=64,
  )
  assert out.accepted.any() and not out.accepted.all()
  return out.tokens.reshape(count, len(names), T)


@functools.cache
def _target():
  return toy.trigram(V)


def _count(tokens):
  """{answer: how often} of tokens [n, T], -1 behind an end."""
  texts, counts = np.unique(tokens, axis=0, return_counts=True)
  texts = [tuple(x for x in row.tolist() if x >= 0) for row in texts]
  return dict(zip(texts, counts.tolist(), strict=True))


def _p_value(counts, name):
  """Of chi-square against the exact law; 0 if the impossible was seen."""
  law, n = _target_law(name), sum(counts.values())
  if any(law.get(text, 0) == 0 for text in counts):
    return 0.0
  want = n * np.array([w for w in law.values() if w])
  got = np.array([counts.get(text, 0) for text, w in law.items() if w])
  rare = want < 5  # pooled, and with the next rarest cell
  rare |= want <= want[~rare].min() if rare.any() else False
  if rare.any():
    want = np.append(want[~rare], want[rare].sum())
    got = np.append(got[~rare], got[rare].sum())
  gap = ((got - want) ** 2 / want).sum()
  return stats.chi2.sf(gap, len(want) - 1) if len(want) > 1 else 1.0


@pytest.mark.parametrize("judge", JUDGES[:2], ids=str)
def test_law_of_rows_of_every_option(judge):
  """B12, B49, B51: all of them side by side in one batch, 4096 rows each."""
  names = list(OPTIONS)
  tokens = _decode(names, judge, QUICK * len(names))
  for i, name in enumerate(names):
    assert _p_value(_count(tokens[:, i]), name) > LEVEL, name


def _small_blocks(monkeypatch):
  """A target that meets nothing compiled; a draw's blocks hold two tokens.

  So both levels of a draw are used, and little noise is made in vain.
  """
  monkeypatch.setattr(sampling, "_BLOCK", 2)
  return toy.trigram(V)


@pytest.mark.slow
@pytest.mark.parametrize("judge", JUDGES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_law_of_every_option(case, judge, monkeypatch):
  """B12, B14, B49, B64: 262,144 rows see a bias of 0.01."""
  target = _small_blocks(monkeypatch)
  names = CASES[case]
  calls = [
    _decode(names, judge, CALL * len(names), seed=seed, target=target)
    for seed in range(1, CALLS + 1)
  ]
  tokens = np.concatenate(calls)
  assert len(tokens) == CALL * CALLS
  for i, name in enumerate(names):
    assert _p_value(_count(tokens[:, i]), name) > LEVEL, name


def test_so_many_rows_see_a_bias_of_one_percent():
  """Spread evenly over 64 cells, it is missed once in a hundred times."""
  n, cells, shift = CALL * CALLS, V**T, 0.01
  limit = stats.chi2.isf(LEVEL, cells - 1)
  seen = stats.ncx2.sf(limit, cells - 1, n * (2 * shift) ** 2)
  assert seen > 0.99


# Planted faults: an option that reaches only some places of a block.

_LAWS = rounds._laws


def _without(sampling, field):
  """The sampling values of a batch with one of them off."""
  like = jnp.zeros_like(sampling.temperature)
  off = dict(temperature=like + 1, top_k=like, top_p=like + 1, min_p=like)
  off |= dict(bias=None)
  if sampling.penalties is not None:
    penalties = types.Penalties(like + 1, like, like)._asdict()
    off |= {
      key: sampling.penalties._replace(**{key: value})
      for key, value in penalties.items()
    }
  if sampling.minimum is not None:
    off["minimum"] = sampling.minimum._replace(tokens=like)
  key = "penalties" if field in types.Penalties._fields else field
  return sampling._replace(**{key: off[field]})


def _dropped(field, *, bonus):
  """B12: off at the drafted places, or at the last place alone."""

  def laws(logits, state, drafted):
    whole = _LAWS(logits, state, drafted)
    off = state._replace(sampling=_without(state.sampling, field))
    raw = _LAWS(logits, off, drafted)
    last = jnp.arange(logits.shape[1])[:, None] == drafted.shape[1]
    return jnp.where(last == bonus, raw, whole)

  return laws


def _blind(logits, state, drafted):
  """B49: at every place of a block the history is that of its first one."""
  places = range(logits.shape[1])
  first = [_LAWS(logits[:, i, None], state, drafted[:, :0]) for i in places]
  return jnp.concatenate(first, 1)


FIELDS = {
  "hot": "temperature",
  "top_k": "top_k",
  "top_p": "top_p",
  "min_p": "min_p",
  "bias": "bias",
  "repetition": "repetition",
  "presence": "presence",
  "frequency": "frequency",
  "minimum": "minimum",
}
FAULTS = {
  f"{name} {where}": (name, _dropped(field, bonus=where == "at the bonus"))
  for (name, field), where in itertools.product(
    FIELDS.items(), ("at the drafts", "at the bonus")
  )
}
FAULTS |= {
  f"{name} blind": (name, _blind)
  for name in ("repetition", "presence", "frequency", "minimum")
}
QUICKLY = ("min_p at the drafts", "bias at the bonus", "frequency blind")


@pytest.mark.parametrize(
  "fault",
  [
    pytest.param(name, marks=[] if name in QUICKLY else pytest.mark.slow)
    for name in FAULTS
  ],
)
def test_planted_faults_are_seen(fault, monkeypatch):
  """B12, B49: by an eighth of the rows that the slow test has."""
  name, laws = FAULTS[fault]
  monkeypatch.setattr(rounds, "_laws", laws)
  judge = JUDGES[0 if "bonus" in fault else 2]
  tokens = _decode((name,), judge, CALL, target=_small_blocks(monkeypatch))
  assert _p_value(_count(tokens[:, 0]), name) < LEVEL


BANNED = BIAS.index(-np.inf)


def _places_of_the_banned(verifier, target):
  """By place in a block [K + 1]: tokens emitted, and banned ones of them.

  Both like the banned token best; else the draft is the target, so that blocks
  are long.
  """
  K, rows, n = 4, 4096, 32
  like = np.zeros(V, np.float32)
  like[BANNED] = 1.5
  table = _tables()[0] + like
  ask = request.make(
    [PROMPT] * rows, max_new=n, seed=np.arange(rows), temperature=1.2, bias=BIAS
  )
  out = generate.speculative(
    target,
    lm.make(target, V),
    table,
    table,
    ask,
    num_draft=K,
    max_new_tokens=n,
    verifier=verifier,
    slots=64,
  )
  assert out.tokens.size > 1e5 and (out.length == n).all()
  first = np.apply_along_axis(lambda r: np.searchsorted(r, r), 1, out.round)
  place = np.arange(n) - first
  banned = out.tokens == BANNED
  return np.bincount(place.ravel()), np.bincount(place[banned], minlength=K + 1)


@pytest.mark.parametrize(
  "verifier",
  [
    "block",
    pytest.param("token", marks=pytest.mark.slow),
    pytest.param("coupled", marks=pytest.mark.slow),
  ],
)
def test_a_banned_token_never_appears(verifier):
  """B12: in 131,072 tokens, at no place of a block."""
  tokens, banned = _places_of_the_banned(verifier, _target())
  assert (tokens > 2000).all() and len(tokens) == 5
  assert not banned.any()


@pytest.mark.slow
@pytest.mark.parametrize("bonus", [False, True])
def test_a_ban_dropped_somewhere_is_seen(bonus, monkeypatch):
  """B12: where it is dropped, the token appears."""
  monkeypatch.setattr(rounds, "_laws", _dropped("bias", bonus=bonus))
  _, banned = _places_of_the_banned("block", toy.trigram(V))
  assert banned[-1 if bonus else 0] > 100
