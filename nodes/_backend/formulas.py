"""Where the answer of a text stands, and how it is written for a library that reads LaTeX."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

BRACE = re.compile(r"(\\(?:boxed|fbox)\s*)?\{|\}")
"""One that opens, perhaps a box, or one that closes."""
TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}"
COMMAND = rf"{TEXT}|\\(?:begin|end)\s*\{{[^{{}}]*\}}|\\[A-Za-z]+"
WORD = re.compile(rf"{COMMAND}|(?<![^\W\d_])([^\W\d_]{{2,}})")
"""A command of LaTeX, with the words that it holds, or else a word, as the last group."""
BEFORE_PROSE = {"and", "or", "sqrt", "inf", "infinity", "percent", "percentage", "pct"}
"""Words that the library knows."""
FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "log", "ln", "exp", "pi"}
"""Commands whose backslash people leave out."""
SHORT_WORDS = {"is", "it", "so", "to", "of", "in", "at", "we", "no", "be", "if", "as", "by", "on", "an"}
"""Of two letters, which otherwise are a product."""
MARKS = re.compile(r"(?<!\\)\$|\\\(|\\\[|\n")
"""Of a formula inside a text; or a second line."""
DELIMITED = re.compile(r"(\$\$?|\\\(|\\\[)([^$]+)(?:\$\$?|\\\)|\\\])")
EMPHASIS = re.compile(r"(?<![\w*`])(\*\*|\*|__|_|`)(?=\S)([^*_`\n\\${}]+)(?<=\S)\1(?![\w*`])")
"""Of Markdown."""
SCIENTIFIC = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[eE][+-]?\d{1,2}(?!\w)")
"""A number such as 1.5e-3, of which the library reads no more than 1.5."""
MIXED = re.compile(r"(?<![\w.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\w.])")
THOUSANDS = re.compile(r"(?<![\w.,])\d{1,3}(?: \d{3})+(?![\w ])")
REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}")
TWO_NUMBERS = re.compile(r"(?<![_^\d.])\d+(?:\.\d+)?\s+\d")
"""Beside each other, of which the library makes a sum."""
SIGNS = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}", "√": r"\sqrt", "²": "^2", "³": "^3", "°": r"^\circ", "∞": r"\infty ", "π": r"\pi ",
    "≤": r"\le ", "≥": r"\ge ", "±": r"\pm ",
})  # fmt: skip
LAYOUT = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[,;:! ]|~|(?<!\\)\$|\\[()\[\]]")
"""What changes no meaning."""
MAX_FORMULA, MAX_MARKED = 200, 1000
"""Characters of an answer that looks like a formula, and of one that is marked as one."""
MAX_WORDS = 3
"""Of an answer that is a text, and not marked as one."""


class Answer(NamedTuple):
    """The part of a text that holds its last answer."""

    content: str
    is_formula: bool
    """It is one and nothing else; otherwise the last one in it counts."""
    is_marked: bool = False
    """The text says that it is one; otherwise it looks like one."""


def last_answer(text: str) -> Answer:
    """What the last complete box holds, else what follows the last `####`, else the text."""
    text = text.encode(errors="ignore").decode()  # no half of a character
    if (content := _boxed(text)) is not None:
        return Answer(_without_full_stop(content), True, True)
    bare = text.rpartition("####")[2].strip()
    first, *more = bare.split("\n", 1)
    if more and "####" in text and _is_result(first):
        bare = first
    bare = EMPHASIS.sub(r"\2", bare).strip("*_` \n")
    if (whole := DELIMITED.fullmatch(bare)) is not None:
        return Answer(_without_full_stop(whole[2]), True, True)
    if _is_prose(bare) or len(bare) > MAX_FORMULA:
        return Answer(SCIENTIFIC.sub(_plain_number, bare), False)
    return Answer(_without_full_stop(bare), True)


def as_formula(content: str) -> str:
    """An answer that is a formula, as the library reads it; empty where it would read something else."""
    content = content.translate(SIGNS) if len(content) <= MAX_MARKED else ""
    content = MIXED.sub(r"\1\\frac{\2}{\3}", THOUSANDS.sub(lambda match: match[0].replace(" ", ""), content))
    if _has_two_units(content) or (TWO_NUMBERS.search(content) and "matrix" not in content):
        return ""
    return WORD.sub(_marked, REPEATING.sub(_fraction, SCIENTIFIC.sub(_plain_number, content)))


def as_text(answer: Answer) -> Answer:
    """What only looks like a formula, and is none, such as `=> 5`, as a text; empty where that would mean nothing."""
    return Answer("" if answer.is_marked or "\\" in answer.content else answer.content, False)


def plain(answer: Answer) -> str:
    """An answer as letters and signs, by which texts are compared. Empty for what is no answer."""
    content = re.sub(TEXT, r"\1", answer.content)
    if content.count("{") != content.count("}") or (not answer.is_formula and len(content.split()) > MAX_WORDS):
        return ""
    content = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", LAYOUT.sub(" ", content)).casefold().rstrip(".")
    return content if re.search(r"\w", content) else ""


def base_of(answer: Answer) -> str:
    """The base of a number such as 11_2, which the library does not read; empty for anything else."""
    found = re.fullmatch(r"\s*[\dA-Fa-f]+_\{?(\d+)\}?\s*", answer.content)
    return found[1] if found else ""


def _boxed(text: str) -> str | None:
    """What the last box holds whose brace closes: that of a response that was cut off does not."""
    opened: list[tuple[int, bool]] = []
    start, end = -1, -1
    for brace in BRACE.finditer(text):
        if brace[0] != "}":
            opened.append((brace.end(), brace[1] is not None))
        elif opened:
            begins, is_box = opened.pop()
            if is_box and begins > start:
                start, end = begins, brace.start()
    return text[start:end] if start >= 0 else None


def _has_two_units(content: str) -> bool:
    """Whether it is such as 3 hours 20 minutes, of which the library reads 3."""
    texts = [text for text in re.finditer(TEXT, content) if text[1].strip() not in ("and", "or", ",")]
    if len(texts) < 2:
        return False
    between = content[texts[0].end() : texts[-1].start()]
    return bool(re.search(r"\d", content[: texts[0].start()]) and re.search(r"\d", between))


def _is_result(line: str) -> bool:
    """Whether a line after `####` is an answer, and not the heading of what follows, such as `2. Add them`."""
    starts = re.match(r"[-+−(\[{\\$*_`]*[\d.]|\\", line.strip())
    return bool(starts and not re.match(r"\d+[.)]\s", line.strip())) or not _is_prose(line)


def _is_prose(text: str) -> bool:
    if MARKS.search(text):
        return True
    words = [match[2].lower() for match in WORD.finditer(text) if match[2]]
    return any((len(word) > 2 or word in SHORT_WORDS) and word not in BEFORE_PROSE | FUNCTIONS for word in words)


def _marked(match: re.Match[str]) -> str:
    """A word as LaTeX wants it: as a command, or as a text and not as a product of letters."""
    word = match[2]
    if word is None or (len(word) == 2 and word not in FUNCTIONS) or word.lower() in BEFORE_PROSE:
        return match[0]
    return f"\\{word} " if word in FUNCTIONS else f"\\text{{{word}}}"


def _without_full_stop(content: str) -> str:
    stripped = content.strip().rstrip(" .,;:")
    return content.strip() if stripped.endswith("\\") else stripped


def _plain_number(match: re.Match[str]) -> str:
    return f"{Decimal(match[0]):f}"


def _fraction(match: re.Match[str]) -> str:
    """A decimal whose last digits repeat for ever."""
    whole, once, again = match[1] or "0", match[2], match[3]
    value = Fraction(int(whole + once + again) - int(whole + once), 10 ** len(once + again) - 10 ** len(once))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
