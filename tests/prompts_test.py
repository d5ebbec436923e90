"""Prompts come as they were written, or a line says which one is wrong."""

import io
import json
import sys

import pytest

from configs import common
from specjax import prompts
from specjax.errors import UserError

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]


def _read(tmp_path, data, limit=0):
  """Read a file of these bytes, or of these rows."""
  path = tmp_path / "p.jsonl"
  if not isinstance(data, bytes):
    data = "\n".join(map(json.dumps, data)).encode()
  path.write_bytes(data)
  config = common.decoding()
  config.prompts = dict(path=str(path), limit=limit)
  return prompts.read(config)


def _stdin(monkeypatch, data):
  # an encoding that would mangle the text if it were used
  stdin = io.TextIOWrapper(io.BytesIO(data), encoding="latin-1")
  monkeypatch.setattr(sys, "stdin", stdin)


def test_rows(tmp_path):
  rows = [
    dict(prompt="one", system="Be brief.", id=7, kind="chat", seed=2**32 - 1),
    dict(turns=["one", "two"], question_id=81, category="math", other=[1]),
    dict(messages=[*ASKED, dict(role="user", content="b", name="x")], seed=0),
  ]
  assert _read(tmp_path, rows) == [
    prompts.Prompt("7", "chat", (SYSTEM,), ("one",), 2**32 - 1),
    prompts.Prompt("81", "math", (), ("one", "two"), None),
    prompts.Prompt("3", "", tuple(ASKED), ("b",), 0),
  ]
  assert [p.id for p in _read(tmp_path, rows, limit=2)] == ["7", "81"]


def test_what_editors_do_to_a_file(tmp_path):
  """A byte-order mark, CRLF, blank lines, no last newline, a raw U+2028."""
  data = '\ufeff{"prompt": "a"}\r\n\r\n  \n{"prompt": "b\u2028c"}'.encode()
  read = _read(tmp_path, data)
  assert [(p.id, p.turns) for p in read] == [
    ("1", ("a",)),
    ("4", ("b\u2028c",)),
  ]


@pytest.mark.parametrize(
  "row, why",
  [
    (b"{", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'"prompt"', "needs one of"),
    (b"3", "needs one of"),
    (b"null", "needs one of"),
    (b"{}", "needs one of"),
    (b'{"prompt": "a", "turns": ["b"]}', "needs one of"),
    (b'{"prompt": null}', "must be text, got null"),
    (b'{"prompt": ["a"]}', "must be text"),
    (b'{"prompt": " \\n"}', "is empty"),
    (b'{"prompt": "\\ud800"}', "no character"),
    (b'{"turns": "abc"}', "must be a list"),
    (b'{"turns": []}', "must be a list"),
    (b'{"turns": ["a", 1]}', "must be text, got 1"),
    (b'{"turns": ["a", ""]}', "is empty"),
    (b'{"prompt": "a", "system": {"b": 1}}', '"system" must be text'),
    (b'{"prompt": "a", "system": null}', '"system" must be text'),
    (b'{"messages": []}', "must be a list"),
    (b'{"messages": ["a"]}', "role out of system, user, assistant"),
    (b'{"messages": [{"role": "tool", "content": "a"}]}', "role out of"),
    (b'{"messages": [{"role": "assistant", "content": "a"}]}', "last message"),
    (b'{"messages": [{"role": "user", "content": null}]}', "must be text"),
    (b'{"messages": [{"role": "user"}]}', "must be text"),
    (b'{"prompt": "a", "seed": true}', "seed must be"),
    (b'{"prompt": "a", "seed": -1}', "seed must be"),
    (b'{"prompt": "a", "seed": 4294967296}', "seed must be"),
    (b'{"prompt": "a", "seed": 1.0}', "seed must be"),
    (b'{"prompt": "a", "seed": "1"}', "seed must be"),
  ],
)
def test_wrong_row(tmp_path, row, why):
  with pytest.raises(UserError, match="p.jsonl, line 2: ") as error:
    _read(tmp_path, b'{"prompt": "fine"}\n' + row + b"\n")
  assert why in str(error.value)


@pytest.mark.parametrize(
  "data, why", [(b"\xff\xfe{", "not UTF-8"), (b"\n \n", "holds no prompts")]
)
def test_wrong_file(tmp_path, data, why):
  with pytest.raises(UserError, match=why):
    _read(tmp_path, data)


def test_no_file(tmp_path):
  config = common.decoding()
  for path in (tmp_path, tmp_path / "none"):
    config.prompts.path = str(path)
    with pytest.raises(UserError, match="cannot read prompts from"):
      prompts.read(config)


def test_one_text():
  config = common.decoding()
  config.prompt = " Twas é\n"
  assert prompts.read(config)[0].turns == (" Twas é\n",)
  for text, why in ((" ", "is empty"), ("a\udcff", "no character")):
    config.prompt = text
    with pytest.raises(UserError, match=why):
      prompts.read(config)


def test_standard_input(monkeypatch):
  config = common.decoding()
  config.prompt = "-"
  _stdin(monkeypatch, "two\nlines é\n".encode())
  assert prompts.read(config)[0].turns == ("two\nlines é",)
  for data, why in ((b"", "is empty"), (b"a\xe9", "standard input is not UTF")):
    _stdin(monkeypatch, data)
    with pytest.raises(UserError, match=why):
      prompts.read(config)
  config.prompts.path = "-"
  _stdin(monkeypatch, b'{"prompt": "a"}\n{"prompt": "b"}\n')
  assert [p.turns for p in prompts.read(config)] == [("a",), ("b",)]
  _stdin(monkeypatch, b"{")
  with pytest.raises(UserError, match="standard input, line 1"):
    prompts.read(config)
