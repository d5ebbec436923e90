"""Training data: what was sampled, what is learned of it, found again whole."""

import dataclasses
import functools
import io
import json
import os
import shutil

import jax
import numpy as np
import pytest
import rich.console

from configs import tiny, training
from specjax import data, feed, generate, prompts, request, shards, speak
from specjax import trajectories as tr
from specjax.errors import UserError
from specjax.models import load, matrix, tokenizer, transformer

END = tokenizer.BYTE_END
STOPS = (*range(249, END), END)
TEMPLATE = (  # the end token is in every prompt: B39
  "{% for m in messages %}{{ m.role[0] + ':' + m.content + '<|end|>\n' }}"
  "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
TEXTS = ["a", "To be", "or not", "x" * 40, "yy" * 35, "that", "is", "z" * 33]
PLAN = data.Plan(max_new=12, max_prompt=80, seed=5, batch=3)


@functools.cache
def _model(seed=0):
  """Random weights and a chat template; answers end now and then."""
  architecture = tiny.get_config().architecture
  architecture.update(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=300
  )
  architecture.max_position_embeddings = 512
  model = load.model(load.random(architecture, seed=seed), dtype="float32")
  head = np.array(matrix.whole(model.params["head"])) * 20
  head[:, STOPS] *= 2
  head = matrix.in_blocks(jax.numpy.asarray(head), model.loaded.block)
  tok = model.tokenizer._replace(chat_template=TEMPLATE, stop_ids=STOPS)
  return model._replace(params=model.params | {"head": head}, tokenizer=tok)


def _todo(texts=TEXTS, seeds=None):
  seeds = seeds or [None] * len(texts)
  return [
    prompts.Prompt(str(i), "", (), (text,), seed)
    for i, (text, seed) in enumerate(zip(texts, seeds, strict=True))
  ]


def _sampled(plan=PLAN, texts=TEXTS, **options):
  return data.from_target(_model(), _todo(texts), plan, **options)


def _rows(found):
  """[(prompt ids, answer ids, temperature)]."""
  return [
    (ids[:p].tolist(), ids[p:n].tolist(), float(t))
    for ids, p, n, t in zip(*found, strict=True)
  ]


def _same(a, b):
  for x, y in zip(a, b, strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.fixture
def batches(monkeypatch):
  """A list that grows by the rows of each decoded batch."""
  seen, stream = [], generate.stream

  def counted(target, params, ask, **options):
    seen.append(int((ask.max_new > 0).sum()))
    return stream(target, params, ask, **options)

  monkeypatch.setattr(generate, "stream", counted)
  return seen


# what is sampled


@pytest.mark.parametrize("as_chat", [True, False])
@pytest.mark.parametrize("samples", [1, 2])
def test_equals_plain_decoding(as_chat, samples):
  """Each row = the request alone, whatever batch it was in."""
  model = _model()
  plan = PLAN._replace(samples=samples, top_p=0.95)
  seeds = [None, 9, *[None] * 6]
  found = data.from_target(model, _todo(seeds=seeds), plan, as_chat=as_chat)
  rows = _rows(found)
  assert len(rows) == 8 * samples
  temperatures = speak.mix(plan, 8).ravel()
  ends = 0
  for i, (prompt, answer, temperature) in enumerate(rows):
    talk = [{"role": "user", "content": TEXTS[i // samples]}]
    assert prompt == prompts.encode(model.tokenizer, talk, as_chat=as_chat)
    ask = request.make(
      [prompt],
      max_new=12,
      seed=(5 if seeds[i // samples] is None else 9) + i % samples,
      temperature=temperatures[i],
      top_p=0.95,
      stop_ids=model.tokenizer.stop_ids,
    )
    out = generate.autoregressive(
      model.target, model.params, ask, max_new_tokens=12
    )
    assert answer == out.tokens[0, : out.length[0]].tolist()
    assert temperature == np.float32(temperatures[i])
    ends += answer[-1] in model.tokenizer.stop_ids
  assert 0 < ends < len(rows)  # B38: the end token is there, where there is one


def test_prompts_that_are_dropped():
  notes = []
  watch = shards.QUIET._replace(note=notes.append)
  found = _sampled(texts=["a", "x" * 90, "a", "b"], watch=watch)
  starts = [bytes(p[2:3]) for p, _, _ in _rows(found)]
  assert starts == [b"a", b"b"]
  assert notes == [
    "dropped 1 prompts with none or over 80 tokens",
    "dropped 1 repeated prompts",
  ]
  with pytest.raises(UserError, match="none of 1 prompts has 1 to 80 tokens"):
    _sampled(texts=["x" * 90])


def test_a_prompt_that_nearly_fills_the_context():
  found = _sampled(
    PLAN._replace(max_prompt=10**6), texts=["x" * 505, "y" * 506]
  )
  (row,) = _rows(found)
  assert len(row[0]) == 511 and len(row[1]) == 1


@pytest.mark.parametrize("count", [1, 7, 100])
@pytest.mark.parametrize("samples", [1, 3])
def test_mix_of_temperatures(count, samples):
  """Each has its share, of every sample, and a prompt gets different ones."""
  weights = {0.0: 3, 0.7: 3, 1.0: 4}
  plan = data.Plan(temperatures=tuple(weights.items()), samples=samples, seed=3)
  found = speak.mix(plan, count)
  assert found.shape == (count, samples)
  np.testing.assert_array_equal(found, speak.mix(plan, count))
  for j in range(samples):
    for temperature, weight in weights.items():
      have = (found[:, j] == temperature).sum()
      assert abs(have - count * weight / 10) <= 1
  if samples == 3:  # a greedy answer twice would be the same one
    assert ((found == 0).sum(1) <= 1).all()
  if count == 100:
    assert (speak.mix(plan._replace(seed=4), count) != found).any()


def test_groups_are_of_like_length_and_lose_none():
  asks = [speak.Ask((1,) * (i % 50 + 1), None) for i in range(100)]
  rows = speak.rows(asks, data.Plan())
  groups = speak.groups(rows, 8, 0)
  assert sorted(r.number for g in groups for r in g) == list(range(100))
  bounds = [(len(g[0].ids), len(g[-1].ids)) for g in groups]
  assert all(b - a <= 4 for a, b in bounds) and bounds != sorted(bounds)


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(max_new=0), "max_new must be at least 1, got 0"),
    (dict(batch=0), "batch"),
    (dict(seed=-1), "seed must be in"),
    (dict(top_p=0), "top_p must be in"),
    (dict(temperatures=()), "temperatures must be pairs"),
    (dict(temperatures=((1.0, 0.0),)), "temperatures"),
    (dict(temperatures=((-1.0, 1.0),)), "temperatures"),
    (dict(temperatures=(1.0, 0.7, 0.0)), "temperatures"),
  ],
)
def test_wrong_plans(change, message):
  with pytest.raises(ValueError, match=message):
    _sampled(PLAN._replace(**change))


def test_prompts_of_the_targets_own():
  """Prefix, user's words to the end token, then the answer to these."""
  model, notes = _model(), []
  plan = PLAN._replace(samples=2, max_new=8, max_prompt=120)
  watch = shards.QUIET._replace(note=notes.append)
  found = data.self_started(model, 12, plan, max_user=40, watch=watch)
  rows = _rows(found)
  assert 0 < len(rows) < 24 and len(rows) % 2 == 0
  lost = 12 - len(rows) // 2
  assert notes == [f"dropped {lost} of 12 prompts that did not end well"]
  prefix = list(b"u:")
  users = set()
  for n in range(12):
    ask = request.make(
      [prefix],
      max_new=40,
      seed=5 + n,
      temperature=1.0,
      stop_ids=model.tokenizer.stop_ids,
    )
    out = generate.autoregressive(
      model.target, model.params, ask, max_new_tokens=40
    )
    ids = out.tokens[0, : out.length[0]].tolist()
    if ids[-1] in model.tokenizer.stop_ids:
      users.add(tokenizer.decode(model.tokenizer, ids[:-1]))
  texts = []
  for prompt, answer, temperature in rows:
    assert prompt[:2] == prefix and prompt[-3:] == [*b"\na:"]
    assert END in prompt[:-3] and temperature in (0, np.float32(0.7), 1)
    texts.append(tokenizer.decode(model.tokenizer, prompt[2:-4]))
    assert answer
  assert texts[0::2] == texts[1::2]
  # the template has 6 tokens of its own
  short = {u for u in users if u.strip() and len(u.encode()) + 6 <= 120}
  assert set(texts) == short and len(short) > 1
  _same(found, data.self_started(model, 12, plan, max_user=40))


def test_a_template_without_a_users_words():
  for template in (None, "{{ 'nothing' }}", "{{ messages[0].content }}"):
    tok = _model().tokenizer._replace(chat_template=template)
    with pytest.raises(UserError, match="chat template"):
      data.self_started(_model()._replace(tokenizer=tok), 2, PLAN)


def _from_draft(draft, params, **options):
  asks, _ = data.encode(_model().tokenizer, _todo(), 80, as_chat=True)
  options = dict(refresh=0, count=5, vocab_size=300) | options
  stop_ids = _model().tokenizer.stop_ids
  return data.from_draft(
    draft, params, asks, PLAN, stop_ids=stop_ids, **options
  )


def test_answers_of_the_draft():
  """Its own text, pure in its arguments, other text after a refresh."""
  model = _model()
  part = load.part(model, layers=(0,))
  first = _from_draft(part.target, part.params)
  _same(first, _from_draft(part.target, part.params))
  again = _from_draft(part.target, part.params, refresh=1)
  prompts_of = lambda found: {tuple(p) for p, _, _ in _rows(found)}
  assert len(prompts_of(first)) == 5 == len(prompts_of(again))
  # five and then three of eight, and another walk begins
  assert len(prompts_of(first) | prompts_of(again)) == 8
  target = _from_draft(model.target, model.params)
  assert prompts_of(target) == prompts_of(first)
  assert _rows(target) != _rows(first)
  for i, (prompt, answer, temperature) in enumerate(_rows(target)):
    ask = request.make(
      [prompt],
      max_new=12,
      seed=5 + i,
      temperature=temperature,
      stop_ids=model.tokenizer.stop_ids,
    )
    out = generate.autoregressive(
      model.target, model.params, ask, max_new_tokens=12
    )
    assert answer == out.tokens[0, : out.length[0]].tolist()


def test_a_draft_with_a_trimmed_head():
  """It speaks in the target's ids, and equals the untrimmed one if it can."""
  model = _model()
  ids = (*range(60, 90), END)
  part = load.part(model, layers=(0,), ids=ids)
  rows = _rows(_from_draft(part.target, part.params, ids=ids))
  said = {token for _, answer, _ in rows for token in answer}
  assert said <= set(ids) and len(said) > 3
  everything = tuple(range(300))[::-1]
  part = load.part(model, layers=(0,), ids=everything)
  whole = load.part(model, layers=(0,))
  greedy = lambda found: [r for r in _rows(found) if r[2] == 0]
  got = greedy(_from_draft(part.target, part.params, ids=everything))
  assert got and got == greedy(_from_draft(whole.target, whole.params))


def test_a_draft_that_lacks_ids():
  """Prompts hold ids that it does not know (B11); it is fed its last one."""
  small = transformer.make(
    dataclasses.replace(_model().loaded, vocab_size=250, block=0)
  )
  params = transformer.init(
    dataclasses.replace(_model().loaded, vocab_size=250, block=0),
    jax.random.key(0),
  )
  rows = _rows(_from_draft(small, params))
  assert all(0 <= token < 250 for _, answer, _ in rows for token in answer)


# what is learned


def test_mask_by_hand():
  """B38, B39: by place alone; position t predicts token t + 1."""
  found = tr.make(
    [
      ([7, END, 8], [9, END], 1.0),  # the end in the prompt, and to be learned
      ([END], [END, END, 0, 0], 0.0),  # what also pads
      ([1, 2], [], 0.0),
      ([1, 2, 3, 4, 5], [6], 0.7),
    ]
  )
  assert found.tokens.tolist() == [
    [7, END, 8, 9, END, 0],
    [END, END, END, 0, 0, 0],
    [1, 2, 0, 0, 0, 0],
    [1, 2, 3, 4, 5, 6],
  ]
  assert tr.mask(found).astype(int).tolist() == [
    [0, 0, 1, 1, 0, 0],
    [1, 1, 1, 1, 0, 0],
    [0, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 1, 0],
  ]
  # (position, token, label) of all that is learned
  got = tr.batch(found, [3, 0], 8)
  triples = [
    (int(b), int(got.tokens[b, t]), int(got.labels[b, t]))
    for b, t in np.argwhere(got.mask)
  ]
  assert triples == [(0, 5, 6), (1, 8, 9), (1, 9, END)]
  assert got.tokens.shape == got.labels.shape == got.mask.shape == (2, 8)
  assert got.length.tolist() == [6, 5]
  assert got.temperature.tolist() == [np.float32(0.7), 1]


def test_prompts_are_learned_if_asked_for():
  """Every token but the first, an answer's end included; no padding (B55)."""
  found = tr.make([([7, 8, 9], [4, END], 1.0), ([5], [6], 0.0)])
  got = tr.batch(found, [0, 1], 6, prompts=True)
  assert got.mask.astype(int).tolist() == [
    [1, 1, 1, 1, 0, 0],
    [1, 0, 0, 0, 0, 0],
  ]
  config = training.training()
  config.length, config.data.learn_prompts = 6, True
  fed = feed.Feed(found, found, None)
  config.batch_size = 2
  batch = feed.batch(config, fed, 0)
  assert batch.mask.sum() == 5 and feed.answer(config, fed) == 6
  config.data.learn_prompts = False
  assert feed.batch(config, fed, 0).mask.sum() == 3
  assert feed.answer(config, fed) == 2


@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 9])
def test_a_batch_is_cut(T):
  """The last position's label is the token behind the cut."""
  rows = [([7, END, 8], [9, END], 1.0), ([1], [2], 0.0)]
  found = tr.make(rows)
  got, wide = tr.batch(found, [0, 1], T), tr.batch(found, [0, 1], 9)
  for name in ("tokens", "labels", "mask"):
    np.testing.assert_array_equal(
      getattr(got, name), getattr(wide, name)[:, :T]
    )
  assert wide.labels[0].tolist() == [END, 8, 9, END, 0, 0, 0, 0, 0]
  assert got.length.tolist() == [min(5, T), min(2, T)]


def test_sequences_with_nothing_to_learn():
  """B20: counted and told; all of them are an error."""
  rows = [([1] * 3, [2], 1), ([1] * 5, [2] * 9, 1), ([1], [], 0), ([2], [1], 0)]
  found, notes = tr.make(rows), []
  kept = tr.fit(found, 3, notes.append)
  assert [len(p) for p, _, _ in _rows(kept)] == [3, 1]
  assert notes == [
    "2 of 4 sequences have nothing to learn from: 1 have no answer, 1 have a"
    " prompt of more than 3 tokens"
  ]
  assert tr.batch(kept, [0, 1], 3).mask.any(1).all()
  _same(tr.fit(kept, 3, notes.append), kept)
  assert len(notes) == 1
  with pytest.raises(UserError, match="2 of 2 .* 1 have no answer, 1 have a"):
    tr.fit(tr.take(found, [1, 2]), 4, notes.append)
  with pytest.raises(UserError, match="0 of 0"):
    tr.fit(tr.take(found, []), 4, notes.append)


@pytest.mark.parametrize(
  "size, batch", [(7, 3), (6, 3), (5, 5), (3, 1), (9, 8)]
)
def test_indices(size, batch):
  """B18: a walk through permutations, from any step, epoch 2 as epoch 1."""
  steps = [tr.indices(3, step, size, batch) for step in range(4 * size)]
  walk = np.concatenate(steps)
  assert all(len(rows) == batch for rows in steps)
  epochs = walk[: len(walk) // size * size].reshape(-1, size)
  assert (np.sort(epochs, 1) == np.arange(size)).all()
  assert len({tuple(epoch) for epoch in epochs}) > 1 or size < 4
  for step in (0, size // batch + 1, 4 * size - 1):  # resumed there
    np.testing.assert_array_equal(tr.indices(3, step, size, batch), steps[step])
  other = np.concatenate([tr.indices(4, i, size, batch) for i in range(9)])
  assert (other != walk[: len(other)]).any()


def test_more_rows_than_there_are():
  with pytest.raises(ValueError, match="a batch of 8 .* there are 7"):
    tr.indices(0, 0, 7, 8)


def test_split_by_prompt():
  """All answers of a prompt on one side, wherever its rows stand."""
  rng = np.random.default_rng(0)
  rows = [
    ([i, i // 7], [int(x)], 0)
    for i in range(200)
    for x in rng.integers(9, size=3)
  ]
  train, held = tr.split(tr.make(rows), 0.2, 1)
  sides = [{tuple(p) for p, _, _ in _rows(x)} for x in (train, held)]
  assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 200
  assert 20 <= len(sides[1]) <= 60
  assert len(held.length) == 3 * len(sides[1])
  # others come, wider ones too, rows move: no prompt changes its side
  order = rng.permutation(600)
  more = [rows[i] for i in order] + [([i] * 9, [1], 0) for i in range(50)]
  again = tr.split(tr.make(more), 0.2, 1)
  moved = {tuple(p) for p, _, _ in _rows(again[1])}
  assert {p for p in moved if len(p) == 2} == sides[1]
  other = {tuple(p) for p, _, _ in _rows(tr.split(tr.make(rows), 0.2, 2)[1])}
  assert other != sides[1]


def test_split_of_texts():
  """They all begin alike; each goes by all of it."""
  rows = [([0], [i, 1], np.nan) for i in range(100)]
  train, held = tr.split(tr.make(rows), 0.5, 0)
  assert 30 <= len(held.length) <= 70
  with pytest.raises(UserError, match="the held-out set would be empty: 2"):
    tr.split(tr.make(rows[:1] * 2), 1e-9, 0)
  with pytest.raises(UserError, match="the training set would be empty"):
    tr.split(tr.make(rows[:1] * 2), 1 - 1e-9, 0)
  with pytest.raises(ValueError, match="held_out"):
    tr.split(tr.make(rows), 1.0, 0)


def test_stats():
  rows = [([1] * 4, [2] * 2, 1), ([1] * 2, [2] * 4, 0.7), ([1], [2], np.nan)]
  found = tr.stats(tr.make(rows))
  assert found == tr.Stats(
    3, 14, 7, 0.5, 7 / 3, 7 / 3, {0.7: 1, 1.0: 1, None: 1}
  )
  assert tr.describe(found) == [
    ("sequences", "3: T=0.7 1, T=1 1, given text 1"),
    ("tokens", "14, of them 7 (50%) to learn from"),
    ("mean length", "prompt 2, answer 2"),
  ]
  assert tr.stats(tr.make([])).sequences == 0


# what is given


def _file(tmp_path, *rows):
  path = tmp_path / "rows.jsonl"
  path.write_text("\n".join(map(json.dumps, rows)))
  return str(path)


def test_given_answers(tmp_path):
  """B55: exactly the answer and its end token are learned."""
  path = _file(
    tmp_path,
    {"prompt": "ab", "answer": "cd"},
    {
      "messages": [{"role": "user", "content": "e"}],
      "system": "S",
      "answer": "f",
    },
    {"text": "ghi"},
    {"prompt": "j", "answer": "k" * 90},
  )
  tok = _model().tokenizer
  found = data.given(tok, path, as_chat=True, most=20)
  rows = [(p, a) for p, a, _ in _rows(found)]
  end = [END]
  assert rows[0] == ([*b"u:ab", END, *b"\na:"], [*b"cd", END])
  assert rows[1][0] == [*b"s:S", END, *b"\nu:e", END, *b"\na:"]
  assert rows[1][1] == [*b"f", *end]
  assert rows[2] == ([*b"g"], [*b"hi"])
  assert rows[3] == ([*b"u:j", END, *b"\na:"], [*b"k" * 13])
  assert np.isnan(found.temperature).all()
  raw = _rows(data.given(tok, path, as_chat=False, most=200))
  assert raw[0][:2] == ([*b"ab"], [*b"cd", END])
  assert raw[1][0] == [*b"S\n\ne"]


@pytest.mark.parametrize(
  "row, message",
  [
    ({"prompt": "a"}, 'line 1: needs "text", or "prompt" and "answer"'),
    ({"answer": "a"}, 'line 1: needs one of "prompt"'),
    ({"text": ""}, "line 1: 'text' is empty"),
    ({"prompt": "a", "answer": 3}, "line 1: 'answer' must be text, got 3"),
    ([], "line 1: needs"),
  ],
)
def test_wrong_rows(tmp_path, row, message):
  with pytest.raises(UserError) as e:
    data.given(_model().tokenizer, _file(tmp_path, row), as_chat=True, most=9)
  assert message in str(e.value)


def test_given_prompts_alone(tmp_path):
  """A prompt without an answer is a text, if that is what is asked for."""
  tok = _model().tokenizer
  rows = [{"prompt": "Who?"}, {"prompt": "Why?", "answer": "So."}]
  path = _file(tmp_path, *rows)
  with pytest.raises(UserError, match='line 1: needs "text", or "prompt" and'):
    data.given(tok, path, as_chat=True, most=99)
  how = dict(as_chat=True, most=99, prompts_alone=True)
  found = data.given(tok, path, **how)
  talk = [{"role": "user", "content": "Who?"}]
  asked = prompts.encode(tok, talk, as_chat=True)
  assert found.tokens[0, : found.length[0]].tolist() == asked
  assert found.prompt_length.tolist()[0] == 1 < found.prompt_length[1]
  assert np.isnan(found.temperature).all()
  assert len(data.given(tok, path, limit=1, **how).length) == 1
  with pytest.raises(UserError, match="line 1"):
    data.given(tok, _file(tmp_path, {"question": "Who?"}), **how)


def test_given_prompts_that_are_too_long(tmp_path):
  """They are counted as such, not as rows without an answer."""
  rows = [{"prompt": "a" * n, "answer": "bc"} for n in (3, 8, 9, 10, 30)]
  path, told = _file(tmp_path, *rows, {"text": "d"}), []
  most = 8
  tok = _model().tokenizer
  found = data.given(tok, path, as_chat=False, most=most + 1)
  kept = tr.fit(found, most, told.append)
  assert kept.prompt_length.tolist() == [3, 8]
  (line,) = told
  assert "1 have no answer, 3 have a prompt of more than 8 tokens" in line


def test_given_nothing_or_an_odd_template(tmp_path):
  tok = _model().tokenizer
  with pytest.raises(UserError, match="holds no sequences"):
    data.given(tok, _file(tmp_path), as_chat=True, most=9)
  tok = tok._replace(chat_template="{{ messages | length }}")
  path = _file(tmp_path, {"prompt": "a", "answer": "b"})
  with pytest.raises(UserError, match='line 1: the chat .* as "text"'):
    data.given(tok, path, as_chat=True, most=9)


# what is kept


def _folder(root):
  (folder,) = root.iterdir()
  return folder


def _files(root):
  return {p.name: p.read_bytes() for p in _folder(root).glob("shard-*")}


def test_the_cache_is_found_again(tmp_path, batches):
  found = _sampled(root=tmp_path)
  assert sorted(batches) == [2, 3, 3]
  batches.clear()
  _same(_sampled(root=tmp_path), found)
  assert not batches
  assert not [p for p in _folder(tmp_path).iterdir() if "part" in p.name]


def test_the_same_without_a_cache(tmp_path):
  _same(_sampled(root=tmp_path), _sampled())


@pytest.mark.parametrize(
  "change",
  [
    dict(max_new=11),
    dict(temperatures=((1.0, 1.0),)),
    dict(samples=2),
    dict(top_k=3),
    dict(top_p=0.9),
    dict(min_p=0.1),
    dict(seed=6),
    dict(batch=2),
  ],
)
def test_another_plan_is_another_cache(tmp_path, batches, change):
  _sampled(root=tmp_path)
  batches.clear()
  _sampled(PLAN._replace(**change), root=tmp_path)
  assert batches and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("what", ["texts", "seed", "chat", "weights", "stops"])
def test_another_source_is_another_cache(tmp_path, batches, what):
  _sampled(root=tmp_path)
  batches.clear()
  model, todo, as_chat = _model(), _todo(), True
  if what == "texts":
    todo = _todo(TEXTS[:-1] + ["q"])
  if what == "seed":
    todo = _todo(seeds=[8, *[None] * 7])
  if what == "chat":
    as_chat = False
  if what == "weights":
    scale = model.params["norm"]["scale"].at[3].add(1e-6)
    model = model._replace(params=model.params | {"norm": {"scale": scale}})
  if what == "stops":
    tok = model.tokenizer._replace(stop_ids=(END,))
    model = model._replace(tokenizer=tok)
  data.from_target(model, todo, PLAN, as_chat=as_chat, root=tmp_path)
  assert batches and len(list(tmp_path.iterdir())) == 2


def test_self_started_cache(tmp_path, batches):
  run = lambda n=7, **options: data.self_started(
    _model(), n, PLAN, max_user=40, root=tmp_path, **options
  )
  found = run()
  batches.clear()
  _same(run(), found)
  assert not batches
  run(8)
  assert batches


def test_the_fingerprint_is_of_the_weights_not_of_their_layout():
  model = _model()
  whole = load.part(model, layers=(0, 1), ids=tuple(range(300)))
  assert whole.params["head"].shape == model.params["head"].shape
  opened = load.random(tiny.get_config().architecture)
  prints = set()
  for block in (0, 64):
    for untie in (False, True):
      params, config = opened.read(
        dtype="float32", untie=untie, block=block, track=None
      )
      target = transformer.make(config)
      prints.add(
        data.fingerprint(
          load.Model(target, params, None, opened.config, config)
        )
      )
  assert len(prints) == 1
  config = dataclasses.replace(model.config, norm_eps=1e-6)
  assert data.fingerprint(model) != data.fingerprint(
    model._replace(config=config)
  )


@pytest.mark.parametrize("after", [0, 1, 2])
def test_stopped_between_shards(tmp_path, batches, after):
  """Resumed = uninterrupted, to the bit, and only the rest is decoded."""
  want = _sampled(root=tmp_path / "whole")
  batches.clear()

  def step(now):
    if now.made == after:
      raise KeyboardInterrupt

  root, notes = tmp_path / "stopped", []
  with pytest.raises(KeyboardInterrupt):
    _sampled(root=root, watch=shards.Watch(notes.append, step))
  assert f"{after} of 3 shards are in {root}" in notes[0]
  assert len(batches) == after
  if after:
    rows = _rows(data.load_cache(_folder(root)))
    assert len(rows) == sum(batches) and all(r in _rows(want) for r in rows)
    meta = json.loads((_folder(root) / "meta.json").read_text())
    assert (meta["done"], meta["shards"]) == (after, 3)
  told = []
  _same(
    _sampled(root=root, watch=shards.QUIET._replace(step=told.append)), want
  )
  assert len(batches) == 3
  assert [(p.done, p.made) for p in told] == [
    (after + i, i) for i in range(4 - after)
  ]
  assert _files(root) == _files(tmp_path / "whole")


def test_killed_while_a_shard_is_written(tmp_path, monkeypatch, batches):
  """What is half there is not taken for a shard."""
  want, replace = _sampled(), os.replace

  def killed(source, path):
    if "shard-00001" in str(path):
      shutil.copy(source, f"{source}.copy")  # what SIGKILL would leave
      raise KeyboardInterrupt
    replace(source, path)

  with monkeypatch.context() as patch:
    patch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
      _sampled(root=tmp_path)
  batches.clear()
  assert set(_files(tmp_path)) == {"shard-00000.npz"}
  _same(_sampled(root=tmp_path), want)
  assert len(batches) == 2


@pytest.mark.parametrize(
  "how", ["cut", "empty", "flip", "noise", "swap", "key"]
)
def test_a_damaged_shard_is_made_again(tmp_path, batches, how):
  want = _sampled(root=tmp_path)
  whole = _files(tmp_path)
  path = _folder(tmp_path) / "shard-00001.npz"
  content = path.read_bytes()
  middle = content.index(np.array([*b"u:"], np.int32).tobytes())
  if how == "swap":
    shutil.copy(path.with_name("shard-00000.npz"), path)
  elif how == "key":
    np.savez(path, tokens=np.zeros(3))
  else:
    changed = {
      "cut": content[:middle],
      "empty": b"",
      "flip": content[:middle]
      + bytes([content[middle] ^ 1])
      + content[middle + 1 :],
      "noise": b"\x93NUMPY" + content,
    }
    path.write_bytes(changed[how])
  with pytest.raises(UserError, match="shard-00001.npz is damaged .*delete it"):
    shards.load(_folder(tmp_path))
  batches.clear()
  notes = []
  _same(
    _sampled(root=tmp_path, watch=shards.QUIET._replace(note=notes.append)),
    want,
  )
  assert len(batches) == 1
  (note,) = notes
  assert "shard-00001.npz is damaged" in note and "making it again" in note
  assert "\n" not in note
  assert _files(tmp_path) == whole


def test_what_people_read_of_it(tmp_path):
  found = _sampled(texts=[*TEXTS, "a", "x" * 99], root=tmp_path)
  path = _folder(tmp_path) / "meta.json"
  meta = json.loads(path.read_text())
  assert meta["settings"]["temperatures"] == [
    [0.0, 0.3],
    [0.7, 0.3],
    [1.0, 0.4],
  ]
  assert meta["settings"]["source"] == "prompts" == path.parent.name[:7]
  assert meta["sequences"] == 8
  assert meta["sampled_tokens"] == tr.mask(found).sum()
  assert sum(meta["ended"].values()) == 8 and set(meta["ended"]) <= {
    "stop",
    "length",
  }
  assert meta["dropped"] == {
    "repeated prompts": 1,
    "prompts with none or over 80 tokens": 1,
  }
  assert meta["seconds"] > 0
  path.write_text("[]")  # it decides nothing
  _same(_sampled(texts=[*TEXTS, "a", "x" * 99], root=tmp_path), found)


def test_folders_that_cannot_be_used(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match="cannot write .*; free space there"):
    _sampled(root=tmp_path / "file")
  with pytest.raises(UserError, match="holds no sampled data"):
    shards.load(tmp_path)


def test_progress_without_a_terminal():
  """Plain lines on the console: how far, how fast, how long."""
  out = rich.console.Console(file=io.StringIO(), force_terminal=False, width=20)
  with shards.shown(out, "sampling") as watch:
    watch.note("a note that is longer than the width")
    watch.step(shards.Progress(1, 4, 0, 0, 0.0))
    watch.step(shards.Progress(2, 4, 1, 100, 2.0))  # within the same minute
    watch.step(shards.Progress(4, 4, 3, 300, 6.0))
  assert out.file.getvalue().splitlines() == [
    "a note that is longer than the width",
    "sampling: 4 of 4 shards, 50 tokens/s, 0:00:00 left",
  ]
  assert shards.Progress(2, 4, 1, 100, 2.0).left == 4
