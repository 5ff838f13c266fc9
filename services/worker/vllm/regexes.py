"""How much of one regex, pattern or grammar a compiler can take in a second or two. Times are as in `amounts.py`."""

from __future__ import annotations

import re

from services.worker.vllm.schemas import refuse_beyond

MOST_BYTES = 64 * 1024
"""Of choices, of a regex or a grammar, and of one enumeration, constant or pattern of a schema. A constant or an
enumeration of 100 KB takes 2 s, one of 1 MB more than 40 s."""

MOST_ALTERNATIVES = 10_000
"""Choices, values of enumerations and alternatives of a regex or a grammar, in all; some 0.1 s where they are short."""

MOST_OPTIONAL = 128
"""Parts of one regex, pattern or grammar that may be left out. 100 letters in a row take 0.1 s with the small
vocabulary and 3 s with the large one, 300 take 1.5 s with the small one, and 1,000, in 2 KB, more than 25 s. 128
`[a-z]?` take 17 s with the large one, two seconds of eight cores."""

MOST_REPEATED = 250
"""Stars and question marks of one regex, pattern or grammar: 100 stars in a row take 0.5 s with the large vocabulary,
500 more than 12 s, and 2,000 take 0.8 s with the small one."""

MOST_COUNTED_SQUARES = 4000**2
"""Sum of the squares of all to which repetitions count, `{1,2000}` for example, in one regex or grammar, and in all
patterns of a schema: in vLLM's check, which is on the worker's event loop, one of 4,000 takes 0.9 s, ten of 1,000 take
0.8 s, ten of 2,000 take 2.9 s, and one of 10,000 takes 13 s. Those are of letters; of classes as `[^<>]`, `\\S` and `.`
one of 4,000 takes 5 s, and one of 2,000 takes 1 s."""

LONGEST = 256
"""A longer repetition, `minLength` or `maxLength` costs the compiler no more than that."""

MOST_LENGTHS = 4000
"""Sum over all different pairs of `minLength` and `maxLength` and all counted repetitions, those within each other
multiplied, of each up to 256. A `maxLength` of 50 takes 0.9 s with the large vocabulary, one of 255 takes 4.8 s, each
other one near it takes 1.8 s more, and 60 times 60 characters take 26 s; all of that is spread over eight cores."""

OPTIONAL = re.compile(r"(?<!\()\?|\|\s*\)|\((?:\?:)?\s*\||\|\s*\||\{\s*(?:0+\s*)?,|\"\"|''")
"""What makes a part optional: a question mark that does not open a group, a count that begins at nothing, and an
alternative that is empty."""

ALONE = re.compile(r'(?<!\()\?(?=[A-Za-z0-9":,](?![?*+{]))')
"""A question mark of a regex that a letter follows which must be there: what makes optional parts dear, that each may
be the next after any before it, ends there. In a grammar such a letter may begin the name of what is empty."""

REPEATED = re.compile(r"(?<!\()[?*]")

COUNTED = r"\{(\d*)(?:,(\d*))?\}"
GROUPS = re.compile(rf"[()]|{COUNTED}")
CLASS = re.compile(r"\[[^\[\]]*\]")
SPACE = re.compile(r"\s+")

COUNT_DIGITS = 10
"""More than a count has; Python refuses to read numbers of thousands of digits."""

ESCAPED = re.compile(r"\\.", re.DOTALL)


def check_regex(pattern: str, what: str, is_grammar: bool = False) -> None:
    """Raise RequestRefusedError for a regex or a grammar that is too long, or has too many alternatives or quantifiers.

    What is in its texts counts as well: readers differ in what a text is.
    """
    refuse_beyond(MOST_BYTES, size(pattern), f"{what} has {{}} bytes")
    refuse_beyond(MOST_ALTERNATIVES, pattern.count("|"), f"{what} has {{}} alternatives")
    refuse_beyond(MOST_OPTIONAL, optional(pattern, is_grammar), f"{what} has {{}} parts that may be left out")
    refuse_beyond(MOST_REPEATED, repeated(pattern), f"{what} has {{}} quantifiers")
    text = f"the squares of what the repetitions of {what} count to add up to {{}}"
    refuse_beyond(MOST_COUNTED_SQUARES, counted_squares(pattern), text)
    refuse_beyond(MOST_LENGTHS, length(pattern), f"the repetitions of {what} are {{}} long in all")


def optional(pattern: str, is_grammar: bool = False) -> int:
    """Return how many parts may be left out, but for those of a regex of which none follows the other."""
    plain = ESCAPED.sub("_", pattern)
    return len(OPTIONAL.findall(plain if is_grammar else ALONE.sub("", plain)))


def repeated(pattern: str) -> int:
    """Return the stars and question marks."""
    return len(REPEATED.findall(ESCAPED.sub("_", pattern)))


def counted_squares(pattern: str) -> int:
    """Return the sum of the squares of all to which repetitions count."""
    return sum(_count(*found) ** 2 for found in re.findall(COUNTED, _solid(pattern)))


def length(pattern: str) -> int:
    """Return how long all counted repetitions are that take their time, those within each other multiplied."""
    sums = [0]
    group = 1  # how long the group is that was just closed
    end = 0
    for found in GROUPS.finditer(CLASS.sub("_", _solid(pattern))):
        if found.start() != end:
            group = 1
        end = found.end()
        if found[0] == "(":
            sums.append(0)
            group = 1
        elif found[0] == ")":
            group = max(1, sums.pop() if len(sums) > 1 else sums[0])
            sums[-1] += group if group > 1 else 0
        else:
            count = min(LONGEST, _count(found[1], found[2]))
            sums[-1] += group * count - (group if group > 1 else 0)
            group = 1
    return sum(sums)


def _solid(pattern: str) -> str:
    """Return a pattern without what is escaped, and without white space, which may be within the braces of a count."""
    return SPACE.sub("", ESCAPED.sub("_", pattern))


def _count(lowest: str, highest: str | None) -> int:
    """Return to what a repetition counts; what is beyond all bounds counts as just that."""
    digits = (highest or lowest or "0").lstrip("0")
    return int(digits or "0") if len(digits) < COUNT_DIGITS else MOST_COUNTED_SQUARES


def size(text: str) -> int:
    """Return the bytes of a text, whatever is in it."""
    return len(text.encode(errors="replace"))
