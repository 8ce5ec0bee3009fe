"""Errors that a user can cause and fix: one sentence each, never a traceback (no torch here)."""

import difflib
from collections.abc import Iterable, Sequence


class UserError(ValueError):
    """Wrong input from a user: the message says what is wrong, what was expected and what to type.

    Commands print the message on one line and exit with code 2; libraries raise it as a
    `ValueError`.
    """


def require(condition: object, message: str, error: type[UserError] = UserError) -> None:
    """Raise `error` with the message unless the condition holds."""
    if not condition:
        raise error(message)


def suggest(word: str, options: Iterable[str]) -> str:
    """Return `"; did you mean X?"` for the options closest to `word`, or an empty string."""
    ranks = {str(option): _likeness(str(word).lower(), str(option).lower()) for option in options}
    best = max(ranks.values(), default=0.0)
    close = [option for option, rank in ranks.items() if rank == best >= 0.55]
    return f"; did you mean {' or '.join(close[:3])}?" if close else ""


def _likeness(word: str, option: str) -> float:
    """Return the similarity of two keys or values, 0 to 1: by letters, start, end or initials.

    `backbon` resembles `backbone`, `train.learning_rate` resembles `train.lr`, and `max_steps`
    resembles `steps`.
    """
    (group, _, typed), (other, _, name) = word.rpartition("."), option.rpartition(".")
    similarity = difflib.SequenceMatcher(None, name, typed).ratio()
    short, long = sorted((typed, name), key=len)
    if len(short) > 1 and short == "".join(part[:1] for part in long.split("_")):
        similarity = 0.9
    elif len(short) > 2 and long.startswith(short):
        similarity = max(similarity, 0.87)
    elif len(short) > 2 and long.endswith(f"_{short}"):
        similarity = max(similarity, 0.83)
    if group == other:
        return similarity
    # A bare name may mean a key of any group, less likely than one without a group.
    letters = difflib.SequenceMatcher(None, option, word).ratio()
    return max(letters, similarity - (0.3 if group else 0.02))


def one_of(
    key: str, value: str, options: Sequence[str], error: type[UserError] = UserError
) -> None:
    """Raise `error` unless `value`, given for `key`, is one of the options."""
    if value not in options:
        raise error(
            f"{key} {value!r}: expected one of {', '.join(options)}{suggest(value, options)}"
        )
