"""Text that a tiny model's tokenizer is trained on: made from word lists, the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    """
    answer book bridge bread café child city cloud coast code company country court day desk door engine
    evening farm field fire flower forest friend game garden glass group hand harbour history home hour house
    idea island journey key kitchen lake language letter library light line machine map market message meeting
    mill moment morning mountain music name night number ocean office paper park pipe plan plant power problem
    queue question reader result river road room school science sea season ship shop signal sky song sound
    square station stone story storm street student summer sun system table teacher tower town train tree
    turbine valley village voice wall water week wheel wind window winter word work world writer year
    """
)

VERBS = _words(
    """
    add agree answer appear ask begin believe bring build call carry change check choose clean climb close
    come compare consider continue count cover cross cut decide describe draw drive drop eat enter explain
    fall feed feel fill find finish follow gather give grow guess happen hear help hold hope join jump keep
    know laugh learn leave lift listen look make mark mean measure meet mix move need offer open order pass
    pay plan play point prepare print pull push reach read receive remember repeat reply rest return run save
    see sell send serve settle share show sing sit sleep speak stand start stay stop study suggest take talk
    teach tell think touch travel try turn understand use visit wait walk want warm wash watch wear win wonder
    write
    """
)

ADJECTIVES = _words(
    """
    able bright broad calm careful certain cheap clear clever cold common complete cool correct dark deep
    different dry early easy empty equal fair famous fast final fine fresh full general gentle good great
    green happy hard heavy high hot important kind large late light little local long loud low modern narrow
    near new nice old open plain pleasant poor possible public quick quiet ready real red rich right round
    safe serious sharp short silent simple slow small smooth soft solid special steady strange strong sudden
    sure sweet tall thick thin tidy tired true useful usual warm weak well white whole wide wild wise wooden
    yellow young
    """
)

ENDINGS = ("", "", "s", "ed", "ing", "er", "ly", "ness", "ful", "less", "able", "ment")

SYLLABLES = _words(
    """
    ba be bo ca co da de di do fa fe fi ga go ha he ho ja ka ke ki la le li lo ma me mi mo na ne ni no pa pe
    pi po ra re ri ro sa se si so ta te ti to tu va ve vi vo wa we ya za zo an ar el en er in ir on or ul un
    ast end ight ound stra tion pre con per
    """
)

SENTENCES = (
    "The {a} {n} {v} the {n} and the {n}.",
    "Why does a {n} {v} when the {n} is {a}?",
    "{p} and {p} {v} in the {a} {n}; then they {v} again.",
    "Write a {a} {n} about {p}, who {v} {d} {n}.",
    "def {n}_{v}({n}: int) -> str:\n    return {n}[{d}] + '{a}'\n",
    '{{"{n}": {d}, "{v}": "{a} {n}", "name": "{p}"}}',
    "User: what is the {n} of {p}? Assistant: it is {a}, I {v}.",
    "{d} + {d} = {d}; {p} said: “{v} the {a} {n}!”",
)

_MULTIPLIER = 6364136223846793005
_INCREMENT = 1442695040888963407
_MASK = (1 << 64) - 1


class Picker:
    """Draws from sequences by a linear congruential generator, the same for a seed everywhere."""

    def __init__(self, seed: int) -> None:
        """Start the sequence of `seed`."""
        self._state = (seed * 2 + 1) & _MASK

    def number(self, below: int) -> int:
        """Return the next number in [0, below)."""
        self._state = (self._state * _MULTIPLIER + _INCREMENT) & _MASK
        return (self._state >> 33) % below

    def pick(self, choices: Sequence[str]) -> str:
        """Return the next choice."""
        return choices[self.number(len(choices))]


def sentences(count: int, names: int, seed: int = 0) -> Iterator[str]:
    """Yield `count` sentences that use `names` invented names beside the word lists.

    More names make room for more merges, so a larger vocabulary needs more of them.
    """
    picker = Picker(seed)
    people = [_name(picker) for _ in range(names)]
    for _ in range(count):
        words = picker.pick(SENTENCES)
        for kind, choices in (("{n}", NOUNS), ("{v}", VERBS), ("{a}", ADJECTIVES), ("{p}", people)):
            while kind in words:
                ending = "" if kind == "{p}" else picker.pick(ENDINGS)
                words = words.replace(kind, picker.pick(choices) + ending, 1)
        while "{d}" in words:
            words = words.replace("{d}", str(picker.number(10 ** (1 + picker.number(5)))), 1)
        yield words.replace("{{", "{").replace("}}", "}")


def _name(picker: Picker) -> str:
    return "".join(picker.pick(SYLLABLES) for _ in range(2 + picker.number(3))).capitalize()
