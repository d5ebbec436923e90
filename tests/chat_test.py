"""Claims: templates render as transformers renders them, and fail in a line."""

import datetime

from absl.testing import parameterized

from specjax.errors import UserError
from specjax.models import chat, tokenizer

SMOLLM2 = (  # the template in SmolLM2-135M-Instruct's GGUF
  "{% for message in messages %}{% if loop.first and messages[0]['role'] != "
  "'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named "
  "SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
  "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
  "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
  "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = {"role": "user", "content": "Hi"}
TURNS = [
  {"role": "system", "content": "Be terse."},
  USER,
  {"role": "assistant", "content": "你好 🎉"},
  {"role": "user", "content": " again\n"},
]


def with_template(template, **changes):
  tok = tokenizer.byte_level(300)
  return tok._replace(chat_template=template, **changes)


def render(template, messages=(USER,), **changes):
  return chat.render(with_template(template, **changes), messages)


class ChatTest(parameterized.TestCase):
  # What transformers 5.24 rendered from the same messages.
  @parameterized.parameters(
    (
      [USER],
      True,
      "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained"
      " by Hugging Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
      "<|im_start|>assistant\n",
    ),
    (
      TURNS,
      False,
      "<|im_start|>system\nBe terse.<|im_end|>\n"
      "<|im_start|>user\nHi<|im_end|>\n"
      "<|im_start|>assistant\n你好 🎉<|im_end|>\n<|im_start|>user\n again\n"
      "<|im_end|>\n",
    ),
  )
  def test_smollm2(self, messages, prompt, want):
    tok = with_template(SMOLLM2)
    got = chat.render(tok, messages, add_generation_prompt=prompt)
    self.assertEqual(got, want)

  @parameterized.parameters(
    # Block tags take their line with them, as template authors assume.
    ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
    ("{% for i in 'abc' %}{{ i }}{% if i == 'b' %}{% break %}{% endif %}"
     "{% endfor %}", "ab"),
    ("{{ {'a': 'é<'} | tojson }}", '{"a": "é<"}'),
    ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hi"),
    ("{{ eos_token }}|{{ bos_token }}", "<|end|>|"),  # no BOS prints nothing
    ("{{ bos_token is defined }} {{ tools is none }}", "False True"),
    ("{{ strftime_now('%Y') }}", str(datetime.date.today().year)),
    ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
  )  # fmt: skip
  def test_environment_is_that_of_transformers(self, template, want):
    self.assertEqual(render(template), want)

  def test_bos_is_given_to_the_template(self):
    self.assertEqual(render("{{ bos_token }}", bos="<s>"), "<s>")

  @parameterized.parameters(
    ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
    ("{{ ().__class__.__bases__ }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe|not safely callable"),
    ("{% if %}", "Expected"),
    ("{{ 1 + none }}", "unsupported operand"),
    ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
    ("{{ messages[9].content }}", "no element 9"),
  )
  def test_a_failing_template_is_one_line_for_the_user(self, template, why):
    with self.assertRaisesRegex(UserError, why) as caught:
      render(template, [USER])
    self.assertNotIn("\n", str(caught.exception))

  def test_no_template_says_what_to_type(self):
    with self.assertRaisesRegex(UserError, "no chat template.*chat=False"):
      render(None)

  @parameterized.parameters(
    ([], "at least one"),
    ([{"role": "tool", "content": "x"}], "message 0 .*'tool'"),
    ([USER, {"content": "x"}], "message 1 "),
    (["Hi"], "message 0 "),
    ([{"role": "user"}], "user.*None"),
    ([{"role": "user", "content": ["x"]}], "user.*\\['x'\\]"),
  )
  def test_bad_messages_are_refused(self, messages, message):
    with self.assertRaisesRegex(UserError, message):
      render("x", messages)
