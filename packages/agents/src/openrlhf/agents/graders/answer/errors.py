"""Why an answer cannot be compared. Inside the grader only: outside it such an answer is wrong."""


class UnreadableError(Exception):
    """The text is no answer that we can read."""


class TooLargeError(Exception):
    """The answer can be read, but its value costs more than an answer may cost."""
