"""Plain sentences about everyday things, made up from templates: a haystack without a download."""

from __future__ import annotations

import random
from collections.abc import Callable

_SLOTS = {
    "person": (
        "the baker,the librarian,a neighbour,the captain,an old teacher,the gardener,my uncle,the innkeeper,"
        "a young painter,the postman,the shepherd,a retired engineer,the mayor,the carpenter,a visiting student,"
        "the fisherman,the nurse,a travelling merchant,the ferryman,her grandmother,the clockmaker,a local historian"
    ).split(","),
    "place": (
        "the old mill,the harbour,the village square,the railway station,the upper valley,the northern road,"
        "the town hall,the reading room,the edge of the forest,the covered market,the stone bridge,the school yard,"
        "the long beach,the botanical garden,the hotel by the lake,the workshop behind the church,the foot of the hill,"
        "the east gate"
    ).split(","),
    "thing": (
        "a basket of apples,a worn map,three wooden boxes,a bundle of letters,an iron key,a clay jug,"
        "several wool blankets,a book without a cover,a small brass bell,a sack of flour,two copper lamps,"
        "a set of carved spoons,a faded photograph,a coil of rope,a jar of honey,an umbrella,a folding chair,"
        "a pair of boots"
    ).split(","),
    "time": (
        "in early spring,late in the evening,after the first snow,on market days,before sunrise,"
        "in the middle of summer,during the harvest,every other week,on a quiet Sunday,at the end of the season,"
        "when the rain stopped,shortly before noon,for most of the winter,once the guests had left"
    ).split(","),
    "quality": (
        "quiet,pleasant,uncertain,remarkably simple,much older than it looks,slow but steady,difficult to describe,"
        "well known to travellers,cooler than expected,almost forgotten,carefully kept,rather crowded,"
        "worth the long walk"
    ).split(","),
    "subject": (
        "the weather,the path,the evening meal,the music,the conversation,the view,the work,the journey,the garden,"
        "the story,the river,the light,the custom,the silence,the bread,the repair"
    ).split(","),
    "act": (
        "waited near,walked slowly past,returned to,spoke fondly of,swept the ground before,made a drawing of,"
        "found shelter at,told the children about,looked for work at,kept away from,took the visitors to,"
        "often thought of"
    ).split(","),
    "reason": (
        "because nobody had asked before,although the road was wet,as people there have always done,without saying why,"
        "and nobody seemed surprised,so that everyone could see it,while the others were still talking,"
        "which took longer than planned,and then went home,even though it was getting dark"
    ).split(","),
}
_TEMPLATES = (
    "{time} {person} {act} {place}, {reason}.",
    "{person} {act} {place} {time}.",
    "{subject} at {place} was {quality}, and {person} said so {time}.",
    "{person} left {thing} at {place} {time}, {reason}.",
    "{subject} there is {quality}, {reason}.",
    "Nobody remembers why {person} brought {thing} to {place}.",
    "{time} {subject} became {quality}, {reason}.",
    "It was {person} who {act} {place} and came back with {thing}.",
    "Some say that {subject} near {place} is {quality}.",
    "{person} and {person} carried {thing} from {place} to {place}, {reason}.",
    "If you ask {person} about {place}, the answer is that {subject} is {quality}.",
    "There was {thing} at {place}, left by {person} {time}.",
    "{time}, {subject} around {place} is {quality}.",
    "For years {person} had kept {thing}, {reason}.",
)


def filler_passage(rng: random.Random, words: int, accept: Callable[[str], bool] = lambda sentence: True) -> str:
    """A passage of whole sentences, at least ``words`` words long.

    Args:
        rng: decides on every word.
        words: the passage ends with the sentence that reaches them.
        accept: sentences it refuses are not used.
    """
    chosen: list[str] = []
    while sum(len(sentence.split()) for sentence in chosen) < words:
        sentence = _sentence(rng)
        if accept(sentence):
            chosen.append(sentence)
    return " ".join(chosen)


def _sentence(rng: random.Random) -> str:
    sentence = rng.choice(_TEMPLATES)
    for name, choices in _SLOTS.items():
        for choice in rng.sample(choices, sentence.count(f"{{{name}}}")):  # another one each time
            sentence = sentence.replace(f"{{{name}}}", choice, 1)
    return sentence[0].upper() + sentence[1:]
