"""Claims: exact ids, exact round trips, and streams that never break text."""

import json
import random
import unicodedata

import pytest
import tokenizers
from absl.testing import parameterized

from specjax.errors import UserError
from specjax.models import tokenizer

BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "' s", "S x"]
MERGES += ["' S", "Ġ Ġ", ". Ċ"]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = (
  "",
  " ",
  "hello hello\n\n  hello's  12 345\t\r\n",
  "naïve 你好，世界 👩‍👩‍👧🎉 e\u0301 \u00a0\u3000",
  "a\0b",
  "def f(x):\n    return x ** 2  # 1/2\n\n\n",
  "<|im_start|>user\nhello<|im_end|>\n",
)
# Made by transformers 5.24 from the same file, after its GGUF conversion was
# given the Digits(individual_digits=True) that SmolLM2's tokenizer.json has.
SMOLLM2 = (
  ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
  ("  many   spaces   ", [216, 800, 256, 5600, 333]),
  ("I'm THEY'LL don't", [57, 5248, 6462, 73, 23, 16421, 1326, 982]),
  ("你好 한 🎉", [18645, 250, 48392, 138, 216, 33085, 246, 15107, 232, 227]),
  (
    "x = 3.14\n\n\n\tif y:\r\n",
    [104, 446, 216, 35, 30, 33, 36, 16506, 197, 342, 329, 42, 2738],
  ),
  ("naïve ½ ²", [3546, 46494, 216, 16738, 216, 19133]),
  ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
)


def gguf_fields(pre="smollm", **changes):
  """A small GGUF: 3 control tokens, 256 bytes, the merges, one user token."""
  merged = [merge.replace(" ", "") for merge in MERGES]
  tokens = [*CONTROL, *BYTES, *merged, "<tool call>"]
  fields = {
    "model": "gpt2",
    "pre": pre,
    "tokens": tokens,
    "token_type": [3] * 3 + [1] * (len(tokens) - 4) + [4],
    "merges": MERGES,
    "bos_token_id": 1,
    "eos_token_id": 2,
  }
  fields = {**fields, **changes}
  return {f"tokenizer.ggml.{k}": v for k, v in fields.items() if v is not None}


def pieces(tok, text):
  return [tok.backend.id_to_token(i) for i in tokenizer.encode(tok, text)]


def write_folder(folder, *, bos=False, config=(), generation=(), model=()):
  backend = tokenizer.from_gguf(gguf_fields(add_bos_token=bos)).backend
  backend.save(str(folder / "tokenizer.json"))
  files = {"tokenizer_config": config, "generation_config": generation}
  for name, content in {**files, "config": model}.items():
    (folder / f"{name}.json").write_text(json.dumps(dict(content)))


class GGUFTest(parameterized.TestCase):
  @parameterized.product(
    pre=("smollm", "gpt-2", "llama-bpe", "qwen2"), text=TEXTS
  )
  def test_round_trip_is_exact(self, pre, text):
    tok = tokenizer.from_gguf(gguf_fields(pre))
    ids = tokenizer.encode(tok, text, special=False)
    # Qwen's tokenizer composes accents first; nothing else changes the text.
    want = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    self.assertEqual(tokenizer.decode(tok, ids, skip_special=False), want)

  @parameterized.parameters(
    ("smollm", "12", ["1", "2"]),
    ("gpt-2", "12", ["12"]),
    ("llama-bpe", "0012", ["0", "0", "1", "2"]),  # cut as 001|2
    ("llama-bpe", "012", ["0", "12"]),
    ("qwen2", "12", ["1", "2"]),
    ("smollm", "hello hello", ["hello", "Ġhello"]),
    ("smollm", "'Sx", ["'", "Sx"]),  # GPT-2 knows lower-case 's only
    ("llama-bpe", "'Sx", ["'S", "x"]),
    ("smollm", ".\n", [".", "Ċ"]),
    ("llama-bpe", ".\n", [".Ċ"]),
    ("smollm", "'s", ["'s"]),
    ("smollm", "   hello", ["ĠĠ", "Ġhello"]),
  )
  def test_words_are_cut_as_the_model_was_trained(self, pre, text, want):
    tok = tokenizer.from_gguf(gguf_fields(pre, add_bos_token=False))
    self.assertEqual(pieces(tok, text), want)

  def test_llama3_looks_up_whole_words_before_merging(self):
    fields = gguf_fields("llama-bpe", add_bos_token=False)
    fields["tokenizer.ggml.tokens"].append("zq")  # no merge makes it
    fields["tokenizer.ggml.token_type"].append(1)
    self.assertEqual(pieces(tokenizer.from_gguf(fields), "zq"), ["zq"])
    fields["tokenizer.ggml.pre"] = "smollm"
    self.assertEqual(pieces(tokenizer.from_gguf(fields), "zq"), ["z", "q"])

  def test_control_tokens_are_special_and_user_tokens_are_text(self):
    tok = tokenizer.from_gguf(gguf_fields())
    text = "hello<|im_end|><tool call>"
    user = len(gguf_fields()["tokenizer.ggml.tokens"]) - 1
    ids = tokenizer.encode(tok, text)
    self.assertEqual(ids[-2:], [2, user])
    self.assertEqual(tokenizer.decode(tok, ids), "hello<tool call>")
    self.assertEqual(tokenizer.decode(tok, ids, skip_special=False), text)
    self.assertEqual(tok.vocab_size, user + 1)

  def test_stop_ids_join_keys_and_known_names(self):
    """B28: the union of all sources of a GGUF."""
    # <|endoftext|> (0) is in no key; "hello" (by eot) is no control token.
    hello = gguf_fields()["tokenizer.ggml.tokens"].index("hello")
    tok = tokenizer.from_gguf(gguf_fields(eot_token_id=hello, eom_token_id=-1))
    self.assertEqual(tok.stop_ids, (0, 2, hello))
    self.assertEqual((tok.bos, tok.eos), ("<|im_start|>", "<|im_end|>"))
    self.assertEqual(tokenizer.decode(tok, [hello]), "")

  @parameterized.parameters(
    ("smollm", None, False),
    ("smollm", True, True),
    ("llama-bpe", None, True),
    ("llama-bpe", False, False),
  )
  def test_bos_goes_before_raw_text_only(self, pre, key, want):
    tok = tokenizer.from_gguf(gguf_fields(pre, add_bos_token=key))
    self.assertEqual(tok.add_bos, want)
    self.assertEqual(tokenizer.encode(tok, "hello")[0] == 1, want)
    self.assertNotIn(1, tokenizer.encode(tok, "hello", special=False))

  @parameterized.parameters(
    ({"model": "t5"}, "'t5'.*gpt2, llama"),
    ({"model": "llama"}, "no tokenizer.ggml.scores"),
    ({"model": "llama", "scores": [0.0]}, "scores is not one a token"),
    ({"pre": "tekken"}, "'tekken'.*smollm"),
    ({"pre": "default"}, "'default'"),  # llama.cpp's guess, not GPT-2's rule
    ({"pre": None}, "no tokenizer.ggml.pre"),
    ({"tokens": None}, "no tokenizer.ggml.tokens"),
    ({"merges": ["q zz"]}, "merges"),
    ({"tokens": ["a", "a"], "merges": []}, "twice"),
  )
  def test_what_it_cannot_build_is_refused_by_name(self, changes, message):
    with self.assertRaisesRegex(UserError, message):
      tokenizer.from_gguf(gguf_fields(**{"pre": "smollm", **changes}))


class TextTest(parameterized.TestCase):
  def test_lone_surrogate_is_a_user_error(self):
    tok = tokenizer.byte_level(300)
    with self.assertRaisesRegex(UserError, "character 2 .*udc80"):
      tokenizer.encode(tok, "ab\udc80")

  @parameterized.parameters(*TEXTS)
  def test_byte_level_ids_are_the_bytes(self, text):
    tok = tokenizer.byte_level(300)
    self.assertEqual(tokenizer.encode(tok, text), list(text.encode()))
    self.assertEqual(tokenizer.decode(tok, text.encode()), text)

  def test_byte_level_ends_at_256_and_shows_the_ids_above(self):
    tok = tokenizer.byte_level(49_152)
    self.assertEqual((tok.stop_ids, tok.vocab_size), ((256,), 49_152))
    self.assertEqual((tok.bos, tok.add_bos), (None, False))
    self.assertEqual(
      tokenizer.decode(tok, [72, 300, 49151, 256]), "H⟨300⟩⟨49151⟩"
    )
    self.assertEqual(tokenizer.encode(tok, "⟨300⟩"), list("⟨300⟩".encode()))
    self.assertEqual(tokenizer.encode(tok, "a<|end|>"), [97, 256])

  def test_byte_level_needs_257_ids(self):
    self.assertEqual(tokenizer.byte_level(257).vocab_size, 257)
    with self.assertRaisesRegex(UserError, "256"):
      tokenizer.byte_level(256)


class StreamTest(parameterized.TestCase):
  @parameterized.parameters(1, 3, 7)
  def test_joins_to_decode_and_never_shows_half_a_character(self, chunk):
    tok = tokenizer.byte_level(300)
    text = "naïve 你好，世界 👩‍👩‍👧🎉 é 한국어 tail" * 20
    ids = tokenizer.encode(tok, text)
    stream = tokenizer.stream(tok)
    parts = [stream.step(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]
    self.assertEqual("".join(parts), text)
    self.assertNotIn("\ufffd", "".join(parts))
    self.assertEqual(stream.flush(), "")
    self.assertGreater(sum(map(bool, parts)), len(parts) // 4)  # it streams

  def test_a_chunk_holds_back_only_its_last_character(self):
    stream = tokenizer.stream(tokenizer.byte_level(300))
    self.assertEqual(stream.step("hi é".encode()[:-1]), "hi ")
    self.assertEqual(stream.step("é".encode()[-1:]), "é")

  def test_flush_shows_what_never_became_a_character(self):
    stream = tokenizer.stream(tokenizer.byte_level(300))
    self.assertEqual(stream.step([72, *"🎉".encode()[:2]]), "H")
    self.assertEqual(stream.flush(), "\ufffd")
    self.assertEqual(stream.flush(), "")

  @parameterized.parameters(*range(10))
  def test_random_ids_join_to_decode(self, seed):
    rng = random.Random(seed)
    tok = tokenizer.byte_level(300)
    ids = [rng.randrange(300) for _ in range(400)]
    stream = tokenizer.stream(tok)
    text = "".join(stream.step([i]) for i in ids) + stream.flush()
    self.assertEqual(text, tokenizer.decode(tok, ids))


@pytest.mark.parametrize("text", TEXTS)
def test_folder_gives_the_ids_of_the_gguf(tmp_path, text):
  write_folder(tmp_path)
  a = tokenizer.from_folder(tmp_path)
  b = tokenizer.from_gguf(gguf_fields())
  assert tokenizer.encode(a, text) == tokenizer.encode(b, text)
  assert a.vocab_size == b.vocab_size


def test_folder_joins_the_stop_ids_of_all_files(tmp_path):
  """B28: the union, whatever says it and as what."""
  write_folder(
    tmp_path,
    config={"eos_token": {"content": "<|im_end|>"}, "bos_token": None},
    generation={"eos_token_id": [0, 7]},
    model={"eos_token_id": 9},
  )
  tok = tokenizer.from_folder(tmp_path)
  assert tok.stop_ids == (0, 2, 7, 9)
  assert (tok.bos, tok.eos) == (None, "<|im_end|>")


@pytest.mark.parametrize("in_json", [False, True])
def test_folder_bos_is_decided_by_tokenizer_json(tmp_path, in_json):
  config = {"bos_token": "<|im_start|>", "add_bos_token": not in_json}
  write_folder(tmp_path, bos=in_json, config=config)
  tok = tokenizer.from_folder(tmp_path)
  assert tok.add_bos == in_json
  assert (tokenizer.encode(tok, "hello")[0] == 1) == in_json
  assert tokenizer.encode(tok, "hello", special=False)[0] != 1


def test_folder_template_comes_from_the_most_specific_file(tmp_path):
  named = [{"name": n, "template": n[0]} for n in ("tool_use", "default")]
  for config, want in (({}, None), ({"chat_template": "S"}, "S")):
    write_folder(tmp_path, config=config)
    assert tokenizer.from_folder(tmp_path).chat_template == want
  write_folder(tmp_path, config={"chat_template": named})
  assert tokenizer.from_folder(tmp_path).chat_template == "d"
  (tmp_path / "chat_template.jinja").write_text("J")
  assert tokenizer.from_folder(tmp_path).chat_template == "J"


def test_folder_ignores_saved_truncation_and_padding(tmp_path):
  backend = tokenizer.from_gguf(gguf_fields()).backend
  backend.enable_truncation(3)
  backend.enable_padding(length=30)
  backend.save(str(tmp_path / "tokenizer.json"))
  tok = tokenizer.from_folder(tmp_path)
  assert len(tokenizer.encode(tok, "abcdefgh")) == 8


def test_folder_errors_are_for_the_user(tmp_path):
  (tmp_path / "tokenizer.model").write_bytes(b"spm")
  with pytest.raises(UserError, match="no tokenizer.json.*save_pretrained"):
    tokenizer.from_folder(tmp_path)
  write_folder(tmp_path, config={"eos_token": "</s>"})
  with pytest.raises(UserError, match="eos_token '</s>'"):
    tokenizer.from_folder(tmp_path)
  (tmp_path / "config.json").write_text("{")
  write_folder(tmp_path)
  (tmp_path / "tokenizer_config.json").write_text("{")
  with pytest.raises(UserError, match="cannot read .*tokenizer_config.json"):
    tokenizer.from_folder(tmp_path)
  (tmp_path / "tokenizer.json").write_text("{}")
  with pytest.raises(UserError, match="cannot read .*tokenizer.json"):
    tokenizer.from_folder(tmp_path)


def test_real_tokenizer(smollm2_gguf):
  import gguf  # slow to import, and needed by this test only

  fields = gguf.GGUFReader(smollm2_gguf).fields.items()
  tok = tokenizer.from_gguf({key: field.contents() for key, field in fields})
  assert (tok.vocab_size, tok.stop_ids, tok.add_bos) == (49_152, (0, 2), False)
  for text, ids in SMOLLM2:
    assert tokenizer.encode(tok, text) == ids, text
    assert tokenizer.decode(tok, ids, skip_special=False) == text


def test_byte_fallback_streams_what_it_decodes():
  """Llama 2's tokenizers decode a run of byte tokens as a whole."""
  names = ["a", "b", "▁c", *(f"<0x{i:02X}>" for i in (0x0A, 0xC3, 0xA9, 0xE4))]
  vocab = {name: i for i, name in enumerate(names)}
  backend = tokenizers.Tokenizer(
    tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True)
  )
  backend.decoder = tokenizers.decoders.Sequence(
    [
      tokenizers.decoders.Replace("▁", " "),
      tokenizers.decoders.ByteFallback(),
      tokenizers.decoders.Fuse(),
    ]
  )
  tok = tokenizer.Tokenizer(backend, (), None, None, False, None, len(vocab))
  rng = random.Random(0)
  for _ in range(300):
    ids = [rng.randrange(len(vocab)) for _ in range(rng.randrange(1, 12))]
    stream = tokenizer.stream(tok)
    text = "".join(stream.step([i]) for i in ids) + stream.flush()
    assert text == tokenizer.decode(tok, ids), ids
