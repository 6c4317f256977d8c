"""Scripted episodes for the supervised warm start, careful or careless, endless and by seed.

Nine in ten are synthetic: templates of real passages with their entity and value replaced by random
titles, words, letters and numbers. So small a model reads only what it could not memorise. One in
ten is a bundled training question with what the bundled index finds. No held-out entity occurs.

The careless demonstrator reads and copies as well as the careful one but chooses badly: see
CareMix. What it thinks before a choice is drawn before the choice is, so the same words precede a
good and a bad action, and reinforcement learning moves one token.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Final, NamedTuple

import msgspec

from leeway.actors.bundle.facts import (
    KEY_OF,
    QUERY_WORDS,
    BundledIndex,
    BundledQuestion,
    Passage,
    Plan,
    heldout_names,
    load_passages,
    load_questions,
    load_titles,
    mentions,
    plan_of,
)
from leeway.actors.search.protocol import CORRECTION, render_observation

END: Final = "<|end|>"
PAD: Final = "<|pad|>"
PROMPT: Final = "Question: {question}\n"
REAL_SHARE: Final = 0.1
"""Share of episodes about real training questions. There are a thousand of them: more would be
learned by heart instead of read."""
TWO_HOP_SHARE: Final = 0.62
MAX_WORDS: Final = 40

STARTS: Final = (
    "the question is about {subject}",
    "it begins with {subject}",
    "{subject} is the way in",
    "consider this question about {subject}",
    "what is known of {subject}",
)
MIDDLES: Final = (
    "the passage names {bridge}",
    "this one is {bridge}",
    "doc {rank} is about {bridge}",
    "so it is {bridge}",
    "doc {rank} names {bridge}",
)
ENDS: Final = (
    "doc {rank} says it",
    "doc {rank} has it",
    "it stands in doc {rank}",
    "read it in doc {rank}",
)


class CareMix(msgspec.Struct, frozen=True, kw_only=True):
    """How often the demonstrator chooses badly; each is drawn once an episode, all independent."""

    early_stop: float = 0.0
    """Two-hop questions: answers after the first search, with the bridge or a value seen there."""
    no_search: float = 0.0
    """Answers at once with the answer of some other question."""
    poor_query: float = 0.0
    """The first query lacks its subject or its relation; answers from whatever comes back."""
    malformed: float = 0.0
    """One turn holds no action; the right one follows the correction."""


CAREFUL: Final = CareMix()
CARELESS: Final = CareMix(early_stop=0.6, no_search=0.1, poor_query=0.1, malformed=0.05)


class Segment(NamedTuple):
    text: str
    is_trained: bool


class Episode(NamedTuple):
    segments: tuple[Segment, ...]
    """In order; tokenised one by one, as a rollout does."""
    hops: int
    is_real: bool
    mistake: str
    """What ended it early: "early_stop", "no_search", "poor_query", or "" for a right answer."""
    is_malformed: bool


class Search(NamedTuple):
    query: str
    found: tuple[Passage, ...]
    rank: int
    """Place of the right passage, 1 or 2; any for a poor query."""
    values: tuple[str, ...]
    """What might be taken from the passages for an answer."""


class Scene(NamedTuple):
    """A question and everything that either demonstrator may do about it."""

    question: str
    subject: str
    bridge: str | None
    answer: str
    right: tuple[Search, ...]
    poor: tuple[Search, ...]
    guesses: tuple[str, ...]
    is_real: bool


def episodes(
    seed: int, care: CareMix = CAREFUL, real_share: float = REAL_SHARE
) -> Iterator[Episode]:
    """The endless sequence of `seed`."""
    rng = random.Random(seed)
    stage = the_stage()
    while True:
        is_real = rng.random() < real_share
        scene = rng.choice(stage.real) if is_real else stage.synthetic(rng)
        episode = play(scene, care, rng)
        text = " ".join(segment.text for segment in episode.segments)
        if scene.question not in stage.heldout_questions and not mentions(text, stage.names):
            yield episode


def play(scene: Scene, care: CareMix, rng: random.Random) -> Episode:
    """One demonstrator's way through a scene."""
    hops = len(scene.right)
    # All drawn, whatever comes of them: independent, and the same stream for every mix.
    stops_early, guesses, asks_poorly, slips = (
        rng.random() < chance
        for chance in (care.early_stop, care.no_search, care.poor_query, care.malformed)
    )
    mistake = ""
    searches: tuple[Search, ...] = scene.right
    answer = scene.answer
    if guesses:
        mistake, searches, answer = "no_search", (), rng.choice(scene.guesses)
    elif asks_poorly:
        mistake, searches = "poor_query", (rng.choice(scene.poor),)
        answer = rng.choice(searches[0].values)
    elif stops_early and hops == 2:
        mistake, searches = "early_stop", scene.right[:1]
        answer = rng.choice(scene.right[0].values)
    slip_at = rng.randrange(len(searches) + 1) if slips else -1
    segments = [Segment(PROMPT.format(question=scene.question), False)]
    for turn in range(len(searches) + 1):
        think = thought(scene, searches, turn, mistake, rng)
        is_last = turn == len(searches)
        content = answer if is_last else searches[turn].query
        if turn == slip_at:
            segments += [Segment(malformed(think, content, rng), True), Segment(CORRECTION, False)]
        tag = "answer" if is_last else "search"
        segments.append(Segment(f"<think> {think}</think><{tag}> {content}</{tag}>", True))
        if not is_last:
            found = [(p.title, p.text) for p in searches[turn].found]
            segments.append(Segment(render_observation(found), False))
    return Episode(tuple(segments), hops, scene.is_real, mistake, slips)


def thought(
    scene: Scene, searches: tuple[Search, ...], turn: int, mistake: str, rng: random.Random
) -> str:
    """Depends on what has been seen, never on what is about to be done."""
    if turn == 0:
        return rng.choice(STARTS).format(subject=scene.subject)
    rank = searches[turn - 1].rank
    if scene.bridge is not None and turn == 1 and mistake != "poor_query":
        return rng.choice(MIDDLES).format(bridge=scene.bridge, rank=rank)
    return rng.choice(ENDS).format(rank=rank)


def malformed(think: str, content: str, rng: random.Random) -> str:
    """A turn that protocol.parse finds no action in."""
    return rng.choice(
        (
            f"<think> {think}</think> {content}{END}",
            f"<think> {think} {content}{END}",
            f"<think> {think}</think><search> {content}{END}",
            "<search></search>",
        )
    )


@cache
def the_stage() -> Stage:
    """The pools that scenes are made of, read from the bundle once a process."""
    return Stage()


class Template(NamedTuple):
    relation: str
    """ "capital", ..., "born" and "died" in one, "country" of a place, "creator" of a work."""
    text: str
    """With ENTITY and VALUE, and for people SECOND (year of death), in place."""


ENTITY, VALUE, SECOND = "\x00", "\x01", "\x02"
_SPAN = re.compile(r"[A-Z][\w'-]+(?: [A-Z][\w'-]+)*|\d[\d,.]*\d|\.\w\w\b")
_YEARS = re.compile(r"\((\d{3,4})–(\d{3,4})\)")


class Stage:
    """What is read once: templates, titles, words, and the real scenes."""

    def __init__(self) -> None:
        passages = load_passages()
        self.index = BundledIndex(passages)
        held_out = load_questions("held_out")
        self.names = heldout_names(held_out, passages)
        self.heldout_questions = {q.question for q in held_out}
        self.titles = [
            name
            for title in load_titles()
            if len((name := re.sub(r" \(.*\)$", "", title)).split()) <= 4
        ]
        self.safe = [p for p in passages if not mentions(f"{p.title} {p.text}", self.names)]
        safe_ids = {p.id for p in self.safe}
        words = sorted(
            {w for p in self.safe for w in p.text.split() if re.fullmatch("[a-z]{3,11}", w)}
        )
        self.words = words
        keys = {p.text.split(" - ")[1].split(":")[0] for p in self.safe if p.id.startswith("fb-")}
        self.keys = sorted(keys - set(KEY_OF.values()))
        plans = [
            (q, plan) for q in load_questions("train") if (plan := plan_of(q, self.index.by_id))
        ]
        self.templates: dict[str, list[str]] = {}
        for template in self._templates(plans, safe_ids):
            self.templates.setdefault(template.relation, []).append(template.text)
        self.relations = [r for r in self.templates if r not in ("years", "country", "creator")]
        self.answers: dict[str, list[str]] = {}
        for question, plan in plans:
            self.answers.setdefault(relation_asked(question), []).append(plan.answer)
        self.real = self._real_scenes(plans)

    def _templates(
        self, plans: list[tuple[BundledQuestion, Plan]], safe_ids: set[str]
    ) -> list[Template]:
        found: dict[Template, None] = {}
        for question, plan in plans:
            kind, support = question.metadata.kind, question.metadata.support
            last = self.index.by_id[support[-1]]
            pairs = [(last, relation_asked(question), plan.answer)]
            first = self.index.by_id[support[0]]
            if kind.startswith("place_") and plan.bridge:
                pairs.append((first, "country", plan.bridge))
            elif kind.startswith("creator_") and plan.bridge:
                pairs.append((first, "creator", plan.bridge))
            elif kind.startswith("bridge_"):
                pairs.append((first, plan.relations[0], plan.subject))
            for passage, relation, value in pairs:
                if passage.id not in safe_ids or value in passage.title:
                    continue
                years = _YEARS.search(passage.text)
                text = passage.text
                if relation in ("born", "died"):
                    if not years:
                        continue
                    text = text.replace(years[1], VALUE).replace(years[2], SECOND)
                    relation = "years"
                else:
                    text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", VALUE, text)
                found[Template(relation, text.replace(passage.title, ENTITY))] = None
        return list(found)

    def _real_scenes(self, plans: list[tuple[BundledQuestion, Plan]]) -> list[Scene]:
        queries = [q for _, plan in plans for q in (*plan.queries, plan.subject, plan.relations[0])]
        found = dict(zip(queries, self.index.search(queries), strict=True))
        scenes = []
        for question, plan in plans:
            right = tuple(
                real_search(query, found[query], support, plan.bridge)
                for query, support in zip(plan.queries, question.metadata.support, strict=True)
            )
            poor = tuple(
                real_search(query, found[query], "", None)
                for query in (plan.subject, plan.relations[0])
                if query != plan.queries[0]
            )
            seen = " ".join(f"{p.title} {p.text}" for s in (*right, *poor) for p in s.found)
            if mentions(f"{question.question} {seen}", self.names):
                continue
            guesses = tuple(self.answers[relation_asked(question)])
            scenes.append(
                Scene(
                    question.question,
                    plan.subject,
                    plan.bridge,
                    plan.answer,
                    right,
                    poor,
                    guesses,
                    True,
                )
            )
        return scenes

    # Random strings

    def name(self, rng: random.Random) -> str:
        """A title, capitalised words, or letters."""
        dice = rng.random()
        if dice < 0.45:
            return rng.choice(self.titles)
        if dice < 0.7:
            return " ".join(rng.choice(self.words).capitalize() for _ in range(rng.randint(1, 2)))
        if dice < 0.9:
            return " ".join(letters(rng).capitalize() for _ in range(rng.randint(1, 2)))
        joint = rng.choice((" of ", " and ", " de ", "-", " "))
        return f"{rng.choice(self.words).capitalize()}{joint}{letters(rng).capitalize()}"

    def value(self, relation: str, rng: random.Random) -> str:
        """Of the relation's usual form, or now and then of another's."""
        if rng.random() < 0.12:
            relation = rng.choice(("currency", "internet country code", "number", "year", ""))
        if relation == "internet country code":
            return "." + letters(rng, 2)
        if relation == "number":
            return f"{rng.randint(1, 9999):,}"
        if relation == "year":
            return str(rng.randint(800, 2020))
        if relation in ("currency", "national symbol"):
            words = [rng.choice(self.words) for _ in range(rng.randint(1, 2))]
            if rng.random() < 0.5:
                words[0] = self.name(rng)
            return " ".join(words)
        if relation == "highest point" and rng.random() < 0.4:
            kind = rng.choice(("Mount", "Mt.", "Pico", "Cerro", "Monte"))
            return f"{kind} {letters(rng).capitalize()}"
        if relation == "national anthem" and rng.random() < 0.5:
            return " ".join(self.name(rng) for _ in range(2))
        return self.name(rng)

    def relation(self, rng: random.Random) -> str:
        if rng.random() < 0.65:
            return rng.choice(self.relations)
        return " ".join(rng.choice(self.words) for _ in range(rng.randint(1, 2)))

    def junk(self, rng: random.Random, count: int) -> str:
        return " ".join(rng.choice(self.words) for _ in range(count))

    # Synthetic passages

    def statement(self, entity: str, relation: str, value: str, rng: random.Random) -> Passage:
        """A passage that says `value` is the `relation` of `entity`."""
        known = self.templates.get(relation)
        if known:
            text = rng.choice(known).replace(VALUE, value)
        else:
            text = self.invented(relation, value, rng)
        text = text.replace(ENTITY, entity).replace(SECOND, str(rng.randint(800, 2020)))
        if known is None or rng.random() < 0.25:
            before = self.fact(rng).replace(ENTITY, entity)
            if rng.random() < 0.5 and len(before.split()) < 20:
                text = f"{before} {text}"
            else:
                text = f"{text} {before}"
        return Passage("", entity, shortened(text, value, rng))

    def invented(self, relation: str, value: str, rng: random.Random) -> str:
        key = relation.capitalize()
        before = f"{self.junk(rng, rng.randint(1, 2))}: {self.junk(rng, rng.randint(1, 5))}; "
        after = f"; {self.junk(rng, rng.randint(1, 2))}: {self.junk(rng, rng.randint(1, 7))}"
        fact = rng.choice(
            (
                f"{key}: {value}",
                f"{key}: name: {value}",
                f'{key}: title: "{value}" ({self.junk(rng, 3)})',
                f"{self.junk(rng, 1).capitalize()}: {relation}: {value}",
                f"{self.junk(rng, 1).capitalize()}: {before}{relation}: {value}",
                f"{key}: {value} {rng.randint(10, 9000):,} m",
                f"{key}: {value} ({letters(rng, 3).upper()})",
            )
        )
        return f"{ENTITY} - {fact}{after if rng.random() < 0.7 else ''}."

    def fact(self, rng: random.Random) -> str:
        """A sentence about ENTITY that answers nothing."""
        return f"{ENTITY} - {rng.choice(self.keys)}: {self.junk(rng, rng.randint(1, 12))}."

    def other(
        self, entity: str, relation: str, value: str, rng: random.Random
    ) -> tuple[Passage, str]:
        """What else a search brings: near misses and strangers. With a value that stands in it."""
        dice = rng.random()
        if dice < 0.4:
            wrong = rng.choice(self.relations)
            if wrong == relation:
                wrong = self.junk(rng, 2)
        elif dice < 0.75:
            entity, wrong = self.other_entity(entity, rng), relation
        elif dice < 0.85:
            bearer = self.name(rng)
            passage = self.statement(value, "country", bearer, rng)
            return passage, bearer
        else:
            passage = rng.choice(self.safe)
            return passage, passage.title
        wrong_value = self.value("year" if wrong == "years" else wrong, rng)
        return self.statement(entity, wrong, wrong_value, rng), wrong_value

    def other_entity(self, entity: str, rng: random.Random) -> str:
        if rng.random() < 0.3:
            return f"{entity.split()[0]} {self.name(rng)}"
        return self.name(rng)

    def search(
        self,
        query: str,
        passage: Passage,
        taken: str,
        relation: str,
        value: str,
        rng: random.Random,
    ) -> Search:
        """`passage` and one more in some order; `taken` is what may be mistaken for the answer."""
        other, other_value = self.other(passage.title, relation, value, rng)
        rank = 1 if rng.random() < 0.6 else 2
        found = (passage, other) if rank == 1 else (other, passage)
        return Search(query, found, rank, (taken, taken, taken, other_value))

    def poor(self, query: str, entity: str, relation: str, rng: random.Random) -> Search:
        """Two passages of other entities with the relation, or of the entity with other ones."""
        (one, first), (two, second) = (self.other(entity, relation, entity, rng) for _ in range(2))
        return Search(query, (one, two), rng.randint(1, 2), (first, second))

    # Synthetic scenes

    def synthetic(self, rng: random.Random) -> Scene:
        if rng.random() < TWO_HOP_SHARE:
            return self.two_hops(rng)
        entity = self.name(rng)
        if rng.random() < 0.35:
            question, relation, passage, answer = self.year_of(entity, "{}", rng)
            return self.one_hop(question.format(entity), entity, relation, passage, answer, rng)
        relation = self.relation(rng)
        answer = self.value(relation, rng)
        passage = self.statement(entity, relation, answer, rng)
        article = "the " if rng.random() < 0.08 else ""
        question = f"What is the {relation} of {article}{entity}?"
        return self.one_hop(question, entity, relation, passage, answer, rng)

    def one_hop(
        self,
        question: str,
        entity: str,
        relation: str,
        passage: Passage,
        answer: str,
        rng: random.Random,
    ) -> Scene:
        words = QUERY_WORDS.get(relation, relation)
        form = "years" if relation in ("born", "died") else relation
        right = self.search(f"{entity} {words}", passage, answer, form, answer, rng)
        return self.scene(question, entity, None, answer, (right,), words, form, rng)

    def scene(
        self,
        question: str,
        subject: str,
        bridge: str | None,
        answer: str,
        right: tuple[Search, ...],
        words: str,
        relation: str,
        rng: random.Random,
    ) -> Scene:
        poor = self.poor(rng.choice((subject, words)), subject, relation, rng)
        asked = relation if len(right) == 1 else ""
        guess = self.value("year" if answer.isdigit() else asked, rng)
        return Scene(question, subject, bridge, answer, right, (poor,), (guess,), False)

    def year_of(
        self, person: str, subject: str, rng: random.Random
    ) -> tuple[str, str, Passage, str]:
        """Question about `subject`, relation, passage of the person, answer."""
        birth = rng.randint(800, 1990)
        death = birth + rng.randint(20, 95)
        text = rng.choice(self.templates["years"])
        text = text.replace(ENTITY, person).replace(VALUE, str(birth)).replace(SECOND, str(death))
        passage = Passage("", person, shortened(text, "", rng))
        if rng.random() < 0.5:
            return f"In what year was {subject} born?", "born", passage, str(birth)
        return f"In what year did {subject} die?", "died", passage, str(death)

    def two_hops(self, rng: random.Random) -> Scene:
        dice = rng.random()
        bridge = self.name(rng)
        if dice < 0.2:
            return self.work(bridge, rng)
        asked = self.relation(rng)
        answer = self.value(asked, rng)
        if dice < 0.4:
            subject, clue = self.name(rng), "country"
            first = self.statement(subject, "country", bridge, rng)
            query = f"{subject} {clue}"
            question = f"What is the {asked} of the country where {subject} is located?"
        else:
            clue = self.relation(rng)
            subject = self.value(clue, rng)
            if clue == asked:
                asked = self.junk(rng, 2)
            first = self.statement(bridge, clue, subject, rng)
            query = f"{clue} {subject}"
            noun = "country or territory" if rng.random() < 0.8 else rng.choice(self.words)
            shown = f'"{subject}"' if clue == "national anthem" else subject
            question = f"What is the {asked} of the {noun} whose {clue} is {shown}?"
        second = self.statement(bridge, asked, answer, rng)
        words = QUERY_WORDS.get(asked, asked)
        right = (
            self.search(query, first, bridge, clue, subject, rng),
            self.search(f"{bridge} {words}", second, answer, asked, answer, rng),
        )
        return self.scene(question, subject, bridge, answer, right, clue, clue, rng)

    def work(self, person: str, rng: random.Random) -> Scene:
        title = self.name(rng)
        role = rng.choice(("author of", "director of", "composer of", "artist behind"))
        question, verb, second, answer = self.year_of(person, f"the {role} {title}", rng)
        clue = role.split()[0]
        first = self.statement(title, "creator", person, rng)
        right = (
            self.search(f"{title} {clue}", first, person, "creator", title, rng),
            self.search(f"{person} {verb}", second, answer, "years", answer, rng),
        )
        return self.scene(question, title, person, answer, right, clue, "creator", rng)


def relation_asked(question: BundledQuestion) -> str:
    """ "bridge_capital_to_currency" -> "currency"; years are "born" or "died"."""
    kind = question.metadata.kind
    if kind.endswith("birth_year"):
        return "born"
    if kind.endswith("death_year"):
        return "died"
    rest = kind.removeprefix("country_")
    return (rest.split("_to_")[-1]).replace("_", " ")


def real_search(query: str, found: list[Passage], support: str, bridge: str | None) -> Search:
    ids = [p.id for p in found]
    rank = ids.index(support) + 1 if support in ids else 1
    spans = [span for p in found for span in _SPAN.findall(p.text)[:8]] or [query]
    return Search(
        query, tuple(found), rank, ((bridge,) * len(spans) * 2 if bridge else ()) + tuple(spans)
    )


def letters(rng: random.Random, count: int = 0) -> str:
    """Letters that can nearly be spoken."""
    count = count or rng.randint(3, 8)
    return "".join(
        rng.choice("aeiou")
        if (i % 2) ^ (rng.random() < 0.25)
        else rng.choice("bcdfghjklmnpqrstvwxyz")
        for i in range(count)
    )


def shortened(text: str, value: str, rng: random.Random) -> str:
    """Cut at up to forty words, as the bundled passages are, never before `value` has been said."""
    words = text.split()
    limit = MAX_WORDS if rng.random() < 0.7 else rng.randint(12, MAX_WORDS)
    if len(words) <= limit:
        return text
    short = " ".join(words[:limit]).rstrip(";,:(- ") + " ..."
    if value in short:
        return short
    return " ".join(words[: MAX_WORDS * 2])
