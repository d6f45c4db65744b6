"""The one exception for bad input: its message is a sentence that names what was found and what is allowed."""


class InputError(ValueError):
    """Something the user gave is wrong; the command line prints the message and ends with exit code 2."""
