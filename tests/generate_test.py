"""Plain decoding emits what its definition says, in any company."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from specjax import generate, loop, request, sampling, types
from specjax.models import rope, transformer

V = 11
OPTIONS = [
  dict(temperature=0.0),
  dict(temperature=0.8),
  dict(temperature=1.3, top_k=5, top_p=0.9, min_p=0.02),
]
PROMPTS = [[1], [2, 3, 4, 5, 6, 7, 8], [9] * 30, [3, 1, 4, 1, 5]]


@functools.cache
def _toy():
  return toy.trigram(V), toy.table(V)


@functools.cache
def _tiny():
  config = transformer.Config(
    vocab_size=97,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    hidden=48,
    context=4096,
    inv_freq=rope.inv_freq(8, theta=1e4, kind="default", scaling={}),
  )
  params = transformer.init(config, jax.random.key(0))
  # logits with a spread of about 1, so that laws are neither flat nor one-hot
  params["head"] = params["head"] * 10
  return transformer.make(config), params


PAIRS = pytest.mark.parametrize("pair", [_toy, _tiny])


@functools.partial(jax.jit, static_argnums=0)
def _next_token(target, params, tokens, length, key, row):
  """From scratch: one full causal pass over tokens[:length], no cache."""
  positions = jnp.arange(len(tokens))[None]
  hidden, _, _ = target.apply(params, tokens[None], positions, None)
  logits = target.unembed(params, hidden[0, length - 1])
  p = sampling.probabilities(logits, row)
  return sampling.draw(p, key)


def _by_definition(target, params, prompt, *, n, seed=0, **options):
  """Token t = draw(probabilities(logits of the prefix), key t)."""
  ask = request.make([prompt], max_new=n, seed=seed, **options)
  row = jax.tree.map(lambda x: x[0], ask.sampling)
  tokens = np.zeros(64, np.int32)
  tokens[: len(prompt)] = prompt
  for t in range(n):
    key = jax.random.fold_in(ask.key[0], t)
    length = len(prompt) + t
    tokens[length] = _next_token(target, params, tokens, length, key, row)
  return tokens[len(prompt) : len(prompt) + n].tolist()


def _decode(pair, prompts, *, n=12, **options):
  """n may be a list, one limit a row."""
  target, params = pair()
  ask = request.make(prompts, max_new=n, **options)
  return generate.autoregressive(
    target, params, ask, max_new_tokens=int(np.max(n))
  )


def _answers(out):
  return [
    row[:n].tolist() for row, n in zip(out.tokens, out.length, strict=True)
  ]


@PAIRS
@pytest.mark.parametrize("options", OPTIONS)
def test_equals_its_definition(pair, options):
  """A ragged batch through the loop = each token computed from scratch."""
  target, params = pair()
  got = _answers(_decode(pair, PROMPTS, seed=3, n=8, **options))
  for prompt, row in zip(PROMPTS, got, strict=True):
    want = _by_definition(target, params, prompt, n=8, seed=3, **options)
    assert row == want


@PAIRS
def test_rows_do_not_see_each_other(pair):
  """B15, B08: alone, in any slot, with longer mates, with empty rows."""
  options = dict(
    temperature=[0, 0.8, 1.0, 1.5], top_p=[1, 0.9, 1, 0.5], top_k=[0, 4, 0, 7]
  )
  together = _answers(_decode(pair, PROMPTS, seed=[1, 2, 3, 4], **options))
  backwards = _answers(
    _decode(
      pair,
      PROMPTS[::-1],
      seed=[4, 3, 2, 1],
      batch=6,
      **{key: value[::-1] for key, value in options.items()},
    )
  )
  assert backwards[:4] == together[::-1]
  assert backwards[4:] == [[], []]
  for i, prompt in enumerate(PROMPTS):
    one = {key: value[i] for key, value in options.items()}
    assert _answers(_decode(pair, [prompt], seed=i + 1, **one)) == [together[i]]


def test_seeds():
  """Other seeds differ at T = 1 and do not matter at T = 0."""
  seeds = [7, 7, 8]
  a, b, c = _answers(_decode(_tiny, [[5, 6]] * 3, seed=seeds, temperature=1.0))
  assert a == b != c
  a, b, c = _answers(_decode(_tiny, [[5, 6]] * 3, seed=seeds))
  assert a == b == c


@pytest.mark.parametrize("i", range(12))
def test_stops_at_the_first_stop_id(i):
  """T3, B01: any emitted token declared to be the end cuts right after it."""
  (free,) = _answers(_decode(_tiny, [[4, 2]], temperature=1.0))
  out = _decode(_tiny, [[4, 2]], temperature=1.0, stop_ids=[96, free[i]])
  cut = free.index(free[i]) + 1
  assert _answers(out) == [free[:cut]]
  assert types.FINISH_REASONS[out.finish_reason[0]] == "stop"
  assert (out.tokens[0, cut:] == -1).all() and (out.round[0, cut:] == -1).all()
  assert out.stats.steps == cut


def test_rows_end_on_their_own():
  """B16: at steps 2, 5, never and 0; a prompt may contain the stop id."""
  free = _answers(_decode(_tiny, PROMPTS, temperature=1.0))
  out = _decode(_tiny, PROMPTS, temperature=1.0, n=[2, 5, 12, 0])
  assert _answers(out) == [
    row[:n] for row, n in zip(free, [2, 5, 12, 0], strict=True)
  ]
  assert (out.finish_reason == types.LENGTH).all()
  assert out.stats.steps == 12
  out = _decode(_tiny, [[4, 2, 4]], stop_ids=[4, 2], n=3)
  assert out.length[0] >= 1


def test_x64_changes_nothing():
  """B59: the same tokens with 64-bit types enabled."""
  options = dict(temperature=0.9, top_p=0.95, top_k=20)
  want = _answers(_decode(_tiny, PROMPTS, **options))
  with jax.enable_x64(True):
    assert _answers(_decode(_tiny, PROMPTS, **options)) == want


def test_nothing_asked():
  out = _decode(_tiny, PROMPTS, n=0)
  assert _answers(out) == [[]] * 4
  assert out.stats.steps == 0


@pytest.mark.parametrize("length, n", [(250, 6), (250, 20), (255, 9), (256, 4)])
def test_the_context_ends_a_row(length, n):
  """B03: up to the last slot, the same tokens as with room to spare."""
  table = toy.table(V)
  prompt = np.random.default_rng(0).integers(0, V, length).tolist()
  ask = request.make([prompt], max_new=n, temperature=1.0)
  run = functools.partial(generate.autoregressive, max_new_tokens=n)
  roomy = run(toy.trigram(V), table, ask)
  tight = run(toy.trigram(V, context=256), table, ask)
  emitted = min(n, 256 - length)
  assert _answers(tight) == [_answers(roomy)[0][:emitted]]
  want = types.LENGTH if emitted == n else types.CONTEXT
  assert tight.finish_reason[0] == want


def test_non_finite_logits_end_the_row():
  """B47: nothing is emitted from a NaN, and the neighbour goes on."""
  target, table = _toy()
  free = _decode(_toy, [[1, 2], [3, 4]], temperature=1.0)
  broken = table.at[1, 2].set(jnp.nan)
  ask = request.make([[1, 2], [3, 4]], max_new=12, temperature=1.0)
  out = generate.autoregressive(target, broken, ask, max_new_tokens=12)
  assert out.length[0] == 0
  assert types.FINISH_REASONS[out.finish_reason[0]] == "nonfinite"
  if (1, 2) not in zip(_answers(free)[1], _answers(free)[1][1:], strict=False):
    assert _answers(out)[1] == _answers(free)[1]


@pytest.mark.parametrize("chunk_steps", [1, 3, 8, 100])
def test_streaming_changes_nothing(chunk_steps):
  target, params = _tiny()
  ask = request.make(PROMPTS, max_new=12, temperature=0.9, stop_ids=[7, 20])
  whole = generate.autoregressive(target, params, ask, max_new_tokens=12)
  parts = list(
    generate.stream(
      target, params, ask, max_new_tokens=12, chunk_steps=chunk_steps
    )
  )
  jax.tree.map(np.testing.assert_array_equal, parts[-1], whole)
  for early, late in zip(parts, parts[1:], strict=False):
    for a, b in zip(_answers(early), _answers(late), strict=True):
      assert b[: len(a)] == a


def test_one_compilation_for_a_setting(caplog):
  """B09: not for lengths, temperature, top-p, seeds, stops or limits.

  The call under the log differs from the first in everything that is data;
  not even a helper program may be compiled.
  """
  _decode(_tiny, PROMPTS, n=12)
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    _decode(
      _tiny,
      [[1, 2], [3] * 90, [4] * 17, [5]],
      n=30,
      temperature=[0.5, 1.0, 0.0, 0.7],
      top_p=0.9,
      top_k=[1, 2, 3, 0],
      min_p=0.1,
      seed=[5, 6, 7, 8],
      stop_ids=[1, 2, 3],
    )
  compiled = [r.message for r in caplog.records if "ompil" in r.message]
  assert not compiled
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    _decode(_tiny, [[1] * 300], n=30)  # more slots and another batch: seen
  assert [r.message for r in caplog.records if "ompil" in r.message]


def test_a_prefill_makes_no_logits():
  """B40: the head is not in its program; it is in the loop's."""
  target, params = _tiny()
  ask = request.make([[1] * 70, [2] * 5], max_new=12)
  state = generate.start(target, params, ask, max_new_tokens=12)
  has = lambda lowered: f",{target.vocab_size}]" in lowered.compile().as_text()
  no_head = lambda text: not has(text)
  bare = state._replace(cache=None)
  for features in ((), (0,)):
    assert no_head(loop._prefill.lower(target, features, params, bare))
  assert has(generate._advance.lower(target, params, state, np.int32(4)))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("slots", [64, 640])
def test_no_copy_of_the_cache_in_the_loop(batch, slots):
  """The compiled step updates the cache in place, for one row too."""
  target, params = _tiny()
  ask = request.make(PROMPTS[:batch], max_new=12)
  sizes = dict(max_new_tokens=12, slots=slots)
  state = generate.start(target, params, ask, **sizes)
  lowered = generate._advance.lower(target, params, state, np.int32(4))
  text = lowered.compile().as_text()
  shapes = {",".join(map(str, x.shape)) for x in jax.tree.leaves(state.cache)}
  assert all(f"f32[{shape}]" in text for shape in shapes)
  copies = [
    line
    for line in text.splitlines()
    if " copy(" in line and any(f"= f32[{s}]" in line for s in shapes)
  ]
  assert not copies, copies[:3]


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(prompts=[[1], []]), "prompt 1 is empty"),
    (
      dict(temperature=-0.1),
      "temperature must be >= 0 and finite, up to 1e+06",
    ),
    (dict(temperature=float("nan")), "temperature"),
    (dict(top_p=0.0), "top_p must be in (0, 1], got 0.0"),
    (dict(top_p=1.1), "top_p"),
    (dict(min_p=-1), "min_p must be in [0, 1]"),
    (dict(stop_ids=range(9)), "at most 8 stop ids"),
    (dict(n=-1), "max_new must be in"),
  ],
)
def test_bad_requests(change, message):
  change = dict(prompts=[[1]]) | change
  with pytest.raises(ValueError) as e:
    _decode(_tiny, change.pop("prompts"), **change)
  assert message in str(e.value)


def test_a_prompt_longer_than_the_context():
  target = toy.trigram(V, context=8)
  ask = request.make([[1] * 3, [1] * 9], max_new=2)
  with pytest.raises(ValueError, match="row 1 has 9 tokens.* holds 8"):
    generate.autoregressive(target, toy.table(V), ask, max_new_tokens=2)


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(prompts=[[1, 97]]), "token id 97 is outside .* vocabulary of 97"),
    (dict(prompts=[[-1]]), "token id -1"),
    (dict(prompts=[]), "0 prompts do not fit"),
    (dict(prompts=[[1]], seed=2**32), "seed must be in"),
    (dict(prompts=[[1]], seed=np.array([-1])), "seed must be in"),
    (dict(prompts=[[1, 2]], width=1), "does not fit width 1"),
  ],
)
def test_what_jax_would_clamp_or_wrap(change, message):
  with pytest.raises(ValueError, match=message):
    _decode(_tiny, change.pop("prompts"), **change)


def test_shapes_of_a_request_by_hand():
  target, params = _tiny()
  ask = request.make([[1], [2]], max_new=2)
  for wrong in (
    ask._replace(stop_ids=np.full((2, 8), -1)),
    ask._replace(max_new=np.array([2])),
  ):
    with pytest.raises(ValueError):
      generate.autoregressive(target, params, wrong, max_new_tokens=2)
  with pytest.raises(ValueError, match="chunk_steps"):
    next(generate.stream(target, params, ask, max_new_tokens=2, chunk_steps=0))


def test_steps_do_not_overflow():
  """After a chunk, "to the end" still runs to the end."""
  target, params = _tiny()
  ask = request.make([[1]], max_new=9)
  state = generate.start(target, params, ask, max_new_tokens=9)
  state = generate.advance(target, params, state, steps=4)
  state = generate.advance(target, params, state, steps=2**40)
  assert generate.output(state, 9).length[0] == 9


def test_padding_is_not_stored():
  """B15: a token that only pads may be NaN and no row notices."""
  target, params = _tiny()
  want = _answers(_decode(_tiny, [[5, 6, 7], [9]], stop_ids=[0], n=4))
  broken = {**params, "embed": params["embed"].at[0].set(jnp.nan)}
  ask = request.make([[5, 6, 7], [9]], stop_ids=[0], max_new=4)
  out = generate.autoregressive(target, broken, ask, max_new_tokens=4)
  assert not any(0 in row for row in want)
  assert _answers(out) == want


def test_a_request_survives_its_decoding():
  """B32: nothing of a request or of the parameters is donated."""
  target, params = _tiny()
  ask = request.make(PROMPTS, max_new=5, temperature=1.0)
  ask = jax.tree.map(jnp.asarray, ask)
  run = lambda: generate.autoregressive(target, params, ask, max_new_tokens=5)
  jax.tree.map(np.testing.assert_array_equal, run(), run())
  assert not any(x.is_deleted() for x in jax.tree.leaves((ask, params)))
