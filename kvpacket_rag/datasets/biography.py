"""Short biographies of invented people, and questions about one of them among several."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta

from kvpacket_rag.datasets.sample import QASample, SourceText, Split
from kvpacket_rag.datasets.splits import draw
from kvpacket_rag.errors import DatasetError

_FIRST = (
    "Adela Alban Amos Anselm Beatrix Benedict Berta Bruno Calista Caspar Cecily Clemens Cora Cyril Daria Dexter Dorian "
    "Edith Elias Elspeth Emeric Esther Fabian Felicia Florian Freya Gideon Greta Gustav Hanna Harold Ida Ignatius "
    "Imogen Isidor Ivo Jasper Joanna Judith Julius Karina Konrad Lavinia Leander Leonie Linus Lorenz Lucinda Magnus "
    "Marcella Matilda Maxim Nadia Nestor Nora Octavia Olaf Ottilie Paloma Percival Philippa Quentin Ramona Roland "
    "Rosalind Rufus Sabina Selma Silas Sybil Tamsin Theodor Ursula Valentin Vera Viktor Wanda Wilfred Xenia Yvonne "
    "Zelda"
).split()
_MIDDLE = (
    "Ash Aspen Blaine Blythe Brook Cole Dale Dawn Drew Elm Faye Finch Flint Gale Glen Grey Hart Hope Hue Jade Jay June "
    "Kay Lake Lane Lark Lee Lyle March Merle Neve Noel Paige Pearl Pine Quill Rain Reed Rhys Ridge Rowe Rue Sage Shea "
    "Skye Sloane Star Stone Tate Teal Thorne Vale Wade West Wren Yale"
).split()
_LAST = (
    "Abernathy Alderton Ashgrove Barlowe Bexley Birchall Blackmoor Bramwell Cardew Carrow Castellan Chilcott Corwin "
    "Cranfield Dalloway Denholm Drummond Dunmore Eastlake Ellery Everhart Fairbourne Farrow Fenwick Garrick Gladwyn "
    "Godolphin Greaves Hadleigh Halloran Harcastle Hathersage Holloway Inglewood Ironside Jessop Kelloway Kestrel "
    "Kingsnorth Lambourn Langdale Larkspur Loxley Maddox Mallory Marchbank Merrivale Moncrieff Nethercott Northcliff "
    "Oakhurst Ormerod Pemberley Pendragon Quarles Ravensworth Redmayne Ridgeway Rookwood Saltmarsh Selwyn Sheridan "
    "Silverton Somerville Stanhope Tennant Thistlewood Tremaine Underhill Vantongeren Verity Wainscott Waverley "
    "Westerby Whitlock Winterbourne Wolverton Wyndham Yardley Zellweger"
).split()
_CITIES = (
    "Aarhus, Denmark;Adelaide, Australia;Antwerp, Belgium;Austin, Texas;Basel, Switzerland;Bergen, Norway;"
    "Bilbao, Spain;Bologna, Italy;Brisbane, Australia;Bristol, England;Calgary, Canada;Cardiff, Wales;Cork, Ireland;"
    "Dayton, Ohio;Denver, Colorado;Dresden, Germany;Dundee, Scotland;Fukuoka, Japan;Gdansk, Poland;Geneva, Switzerland;"
    "Ghent, Belgium;Graz, Austria;Halifax, Canada;Incheon, South Korea;Izmir, Turkey;Krakow, Poland;Lima, Peru;"
    "Lisbon, Portugal;Ljubljana, Slovenia;Lyon, France;Malmo, Sweden;Marseille, France;Mendoza, Argentina;"
    "Montevideo, Uruguay;Nairobi, Kenya;Naples, Italy;Oslo, Norway;Pittsburgh, Pennsylvania;Porto, Portugal;"
    "Portland, Oregon;Quito, Ecuador;Riga, Latvia;Rotterdam, Netherlands;Salzburg, Austria;Santiago, Chile;"
    "Sapporo, Japan;Savannah, Georgia;Seville, Spain;Tampere, Finland;Toledo, Ohio;Tucson, Arizona;Turin, Italy;"
    "Utrecht, Netherlands;Valencia, Spain;Wellington, New Zealand"
).split(";")
_UNIVERSITIES = [
    form.format(name)
    for name in (
        "Alderbrook Bellhaven Carrowmere Dunbridge Eastmoor Fernhill Glenmore Highfield Ivybridge Kingsmere Lakeshore "
        "Marlborough Northgate Oakfield Pinecrest Riverton Stonebridge Thornbury Westbrook"
    ).split()
    for form in ("{} University", "{} College", "University of {}", "{} Institute of Technology")
]
_MONTHS = "January February March April May June July August September October November December".split()
_MAJORS = (
    "Accounting;Anthropology;Applied Mathematics;Archaeology;Architecture;Art History;Astronomy;Biochemistry;Botany;"
    "Chemical Engineering;Chemistry;Civil Engineering;Classics;Computer Science;Dentistry;Economics;Education;"
    "Electrical Engineering;Environmental Science;Fine Arts;Forestry;Geography;Geology;History;Journalism;Law;"
    "Linguistics;Marine Biology;Materials Science;Medicine;Meteorology;Music Theory;Nursing;Nutrition;Philosophy;"
    "Physics;Political Science;Psychology;Sociology;Statistics;Theology;Veterinary Medicine;Zoology"
).split(";")
_COMPANIES = [
    f"{first} {second}"
    for first in (
        "Alder;Beacon;Bluefin;Cobalt;Copperfield;Crestline;Drift;Evergreen;Falconer;Granite;Harvest;Juniper;Keystone;"
        "Lighthouse;Meridian;Northwind;Orchard;Pinnacle;Quarry;Redwood;Silverline;Summit;Tidewater;Vantage;Willow"
    ).split(";")
    for second in (
        "Analytics;Foods;Insurance;Logistics;Materials;Motors;Pharmaceuticals;Press;Robotics;Textiles"
    ).split(";")
]


@dataclass(frozen=True, slots=True)
class _Attribute:
    """What can be known of a person: how it is said and how it is asked for."""

    statements: tuple[str, ...]  # with {who} and {value}
    questions: tuple[str, ...]  # with {who}


_ATTRIBUTES = {
    "birth_date": _Attribute(
        (
            "{who} was born on {value}.",
            "{who} came into the world on {value}.",
            "The birthday of {who} is {value}.",
            "{who}'s life began on {value}.",
            "It was on {value} that {who} was born.",
        ),
        ("When was {who} born?", "What is the birth date of {who}?", "On which date was {who} born?"),
    ),
    "birth_place": _Attribute(
        (
            "{who} was born in {value}.",
            "The birthplace of {who} is {value}.",
            "{who} is a native of {value}.",
            "{who} comes from {value}, where the family had lived for years before the birth.",
            "{value} is where {who} was born.",
        ),
        ("Where was {who} born?", "What is the birthplace of {who}?", "In which city was {who} born?"),
    ),
    "residence": _Attribute(
        (
            "{who} now lives in {value}.",
            "Today {who} has a home in {value}.",
            "{who}'s present home is in {value}.",
            "{who} has since moved to {value}.",
            "The current residence of {who} is in {value}.",
        ),
        (
            "Where does {who} live now?",
            "What is the current residence of {who}?",
            "In which city does {who} live today?",
        ),
    ),
    "university": _Attribute(
        (
            "{who} studied at {value}.",
            "{who} graduated from {value}.",
            "{who} holds a degree from {value}.",
            "The alma mater of {who} is {value}.",
            "{who} spent the student years at {value}.",
        ),
        (
            "Which university did {who} attend?",
            "Where did {who} study?",
            "From which university did {who} graduate?",
        ),
    ),
    "major": _Attribute(
        (
            "{who} majored in {value}.",
            "The field of study of {who} was {value}.",
            "{who} chose {value} as a major.",
            "{who}'s degree is in {value}.",
            "At university, {who}'s main subject was {value}.",
        ),
        ("What did {who} major in?", "What was the field of study of {who}?", "Which subject did {who} study?"),
    ),
    "company": _Attribute(
        (
            "{who} works for {value}.",
            "{who} is employed by {value}.",
            "The employer of {who} is {value}.",
            "{who} has a job at {value}.",
            "{value} counts {who} among its staff.",
        ),
        ("Which company does {who} work for?", "Who employs {who}?", "What is the employer of {who}?"),
    ),
}


def generate_biographies(count: int, seed: int, split: Split = "train") -> list[QASample]:
    """Samples that each ask for one attribute of one of several people.

    A sample has 2, 3, 5 or 7 documents, one a person; the place of the person asked about is uniformly random, and
    in half of the samples some of the others may share part of that name. People of the two splits are disjoint.
    More samples of a seed begin with the same ones.

    Args:
        count: of samples.
        seed: another seed gives other samples.
        split: "train" or "dev".

    Raises:
        DatasetError: ``count`` is below 1.
    """
    if count < 1:
        raise DatasetError(f"count is {count}; give 1 or more")
    return [
        _sample(random.Random(f"biography {split} {seed} {number}"), split, seed, number) for number in range(count)
    ]


def _sample(rng: random.Random, split: Split, seed: int, number: int) -> QASample:
    names = _names(rng, rng.choice((2, 3, 5, 7)), split)
    people = [_person(rng) for _ in names]
    gold = rng.randrange(len(names))
    names[0], names[gold] = names[gold], names[0]  # the one whose name others resemble comes first
    attribute = rng.choice(list(_ATTRIBUTES))
    return QASample(
        sample_id=f"biography-{split}-{seed}-{number}",
        question=rng.choice(_ATTRIBUTES[attribute].questions).format(who=names[gold]),
        answers=(people[gold][attribute],),
        documents=tuple(
            SourceText(name, _biography(rng, name, person), place == gold)
            for place, (name, person) in enumerate(zip(names, people, strict=True))
        ),
        domain="biography",
        meta={"attribute": attribute, "gold_position": gold},
    )


def _names(rng: random.Random, count: int, split: Split) -> list[str]:
    """Different names; half of the time, some resemble the first."""

    def make(rng: random.Random) -> str:
        return f"{rng.choice(_FIRST)} {rng.choice(_MIDDLE)} {rng.choice(_LAST)}"

    def resemble(rng: random.Random) -> str:
        parts = names[0].split()
        for place in rng.sample(range(3), rng.choice((1, 2))):
            parts[place] = rng.choice((_FIRST, _MIDDLE, _LAST)[place])
        return " ".join(parts)

    names = [draw(rng, make, split)]
    similar = rng.random() < 0.5
    while len(names) < count:
        name = draw(rng, resemble if similar and rng.random() < 0.5 else make, split)
        if name not in names:
            names.append(name)
    return names


def _person(rng: random.Random) -> Mapping[str, str]:
    born = date(1950, 1, 1) + timedelta(days=rng.randrange(365 * 55))
    birth_place, residence = rng.sample(_CITIES, 2)
    return {
        "birth_date": f"{_MONTHS[born.month - 1]} {born.day}, {born.year}",
        "birth_place": birth_place,
        "residence": residence,
        "university": rng.choice(_UNIVERSITIES),
        "major": rng.choice(_MAJORS),
        "company": rng.choice(_COMPANIES),
    }


def _biography(rng: random.Random, name: str, person: Mapping[str, str]) -> str:
    """Six sentences in random order: the full name in each, or in the first alone and then the last name."""
    later = rng.choice((name, name.split()[-1]))
    order = rng.sample(list(_ATTRIBUTES), len(_ATTRIBUTES))
    return " ".join(
        rng.choice(_ATTRIBUTES[attribute].statements).format(who=later if place else name, value=person[attribute])
        for place, attribute in enumerate(order)
    )
