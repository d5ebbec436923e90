"""The one exception that a user is meant to read."""


class UserError(Exception):
  """Something that the person at the keyboard can put right.

  The message is one line that says what is wrong and what to type instead.
  Scripts print it on stderr and exit with code 2, without a traceback.
  """
