"""Leaks: a row that holds a question of a prompt set is named; shared instructions are no evidence."""

from __future__ import annotations

import unicodedata

import pytest

from pipeline.corpus.duplicates import words
from pipeline.corpus.leaks import Leaks
from pipeline.corpus.normalise import Skip
from pipeline.corpus.rows import Row

QUESTION = (
    "A farmer has twelve hens and every hen lays three eggs in four days. How many eggs will the farmer collect in a "
    "leap year if two of the hens stop laying after the first of March?"
)
NOTE = "Please reason step by step, and put your final answer within \\boxed{}."


def row(*texts: str, source: str = "s") -> Row:
    roles = ("user", "assistant")
    return Row.of(source=source, messages=[{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)])


def leaks(*prompts: str, ngram: int = 13, exempt: tuple[str, ...] = ()) -> Leaks:
    made = Leaks(ngram, frozenset(exempt))
    made.add_set("set", [(f"p{number}", prompt) for number, prompt in enumerate(prompts)])
    return made


def test_a_quoted_question_is_found_whatever_stands_around_it() -> None:
    made = leaks(
        "Something else entirely that nobody would ask, at any time, in any such words.", f"{QUESTION}\n{NOTE}"
    )
    quoted = f"Hi! {QUESTION.upper().replace(',', ' -')} Thanks."
    for found in (row(quoted), row("Tell me a riddle.", f"Sure: {quoted}")):
        with pytest.raises(Skip) as caught:
            made.check(found)
        assert caught.value.reason == "contaminated"
        assert (caught.value.facts["prompt_set"], caught.value.facts["prompt"]) == ("set", "p1")
        assert 0.5 < caught.value.facts["overlap"] <= 1


def test_however_its_characters_are_composed_a_question_is_found() -> None:
    """Decomposed accents, full-width letters and ligatures are the same words: for leaks and for near copies."""
    question = "Où est le café près de l'hôtel, à Besançon, et que coûte un thé très léger en été, s'il vous plaît?"
    made = leaks(question)
    wide = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in unicodedata.normalize("NFC", question))
    for form in (unicodedata.normalize("NFD", question), wide, question.replace("fé", "fe\u0301")):
        assert words(form) == words(question)
        with pytest.raises(Skip):
            made.check(row(f"Hi! {form}"))
    assert words("ﬁne") == ["fine"]


def test_a_question_written_without_spaces_is_found() -> None:
    assert words("GPT4は大きい") == ["gpt4", "は", "大", "き", "い"]
    question = "一个农夫有十二只母鸡，每只母鸡四天下三个蛋，请问农夫在闰年能收集到多少个鸡蛋？"
    made = leaks(question)
    with pytest.raises(Skip):
        made.check(row(f"你好！{question}谢谢"))
    made.check(row("一个农夫有三头牛，每头牛一天产十升奶，请问一周能收集到多少升牛奶？"))


def test_a_shared_instruction_or_a_changed_number_is_no_leak() -> None:
    made = leaks(f"{QUESTION}\n{NOTE}", f"What is left after the first of March?\n{NOTE}")
    made.check(row(f"Add one and two.\n{NOTE}"))
    changed = QUESTION.replace("twelve", "nine").replace("three", "five").replace("leap", "usual").replace("two", "six")
    made.check(row(changed))


def test_an_instruction_of_the_whole_set_hides_no_short_question() -> None:
    """A question of 16 words under 25 words of instruction would else never reach the share."""
    subjects = ["hens", "cows", "pigs", "boats", "lamps", "trees", "books", "coins", "shoes", "birds", "kites", "maps"]
    questions = [
        f"Tom has twelve {s} and sells {n} of them, so how many {s} has he left?" for n, s in enumerate(subjects)
    ]
    made = leaks(*(f"Solve the problem below and show every step of it.\n{question}\n{NOTE}" for question in questions))
    for number, question in enumerate(questions):
        with pytest.raises(Skip) as caught:
            made.check(row(question))
        assert (caught.value.facts["prompt"], caught.value.facts["overlap"]) == (f"p{number}", 1.0)
    made.check(row(f"Solve the problem below and show every step of it.\nWho?\n{NOTE}"))


def test_short_prompts_must_stand_there_whole_and_very_short_ones_are_counted() -> None:
    made = leaks("Name the seven smallest prime numbers.", "Hello there!")
    assert made.too_short == {"set": 1}
    made.check(row("Hello there! Name the seven smallest odd numbers."))
    with pytest.raises(Skip):
        made.check(row("please name the seven smallest prime numbers now"))


def test_exempt_sources_are_left_alone() -> None:
    made = leaks(QUESTION, exempt=("demo",))
    made.check(row(QUESTION, source="demo"))
    with pytest.raises(Skip):
        made.check(row(QUESTION, source="other"))
