"""Cut the bundled corpus and questions out of the realfacts set, and train the bundled tokenizer.

    python -m leeway.actors.search.build_bundle --source DIR [--out actors/bundle]

DIR holds `corpus.jsonl` (or `.xz`) and `train.jsonl`, `dev.jsonl`, `test.jsonl`. The result depends
on nothing else: no random numbers, no clock. A question is kept only if the careful player
(script.py) answers it with the bundled index; a two-hop question only if its own text does not
already find the answer.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from leeway.actors.bundle.facts import (
    KEY_OF,
    BundledIndex,
    BundledQuestion,
    Passage,
    Plan,
    contains,
    heldout_names,
    mentions,
    plan_of,
    unpacked,
)
from leeway.actors.config import bundled_dir
from leeway.actors.search.protocol import TAGS
from leeway.actors.search.script import END, PAD

MAX_WORDS: Final = 40
"""Words of a passage's text; its title comes on top."""
MAX_CHARACTERS: Final = 280
"""Of a passage's text, so that two make no observation of more than 320 tokens."""
FILL_BELOW: Final = 25
"""A fact shorter than this many words is filled up."""
MAX_ANSWER_WORDS: Final = 6
VOCABULARY: Final = 2048
DISTRACTOR_KEYS: Final = (
    "Location",
    "Climate",
    "Natural resources",
    "Government type",
    "Independence",
    "National holiday",
    "Languages",
    "Exports - partners",
    "Agricultural products",
    "National color(s)",
)
"""Factbook keys that answer no question; they make the facts hard to find."""
NUM_WIKI_DISTRACTORS: Final = 1500
PLACES_PER_FACT: Final = {"train": 8, "held_out": 4}
"""Most place_to questions with one answer document, so that no large country fills a split."""
ONE_HOP_SHARE: Final = {"train": 0.34, "held_out": 0.30}
PERSON_SHARE: Final = 0.4
"""Of the one-hop questions, how many ask for a year of birth or death."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--source", type=Path, required=True, help="folder of the realfacts set")
    arguments.add_argument("--out", type=Path, default=bundled_dir())
    options = arguments.parse_args()
    build(options.source, options.out)


def build(source: Path, out: Path) -> None:
    """Write corpus.jsonl.xz, train.jsonl, held_out.jsonl, titles.txt.xz and the tokenizer."""
    documents = read_documents(source)
    facts = factbook_passages(documents)
    wiki = {p.id: p for p in wiki_passages(documents)}
    asked = {
        "train": list(read_questions(source, ["train"], facts)),
        "held_out": list(read_questions(source, ["dev", "test"], facts)),
    }
    everything = {**facts, **wiki}
    asked = {split: [q for q in qs if answerable(q, everything)] for split, qs in asked.items()}
    passages = choose_passages(facts, wiki, [q for qs in asked.values() for q in qs])
    index = BundledIndex(passages)
    kept: dict[str, list[BundledQuestion]] = {}
    for split, questions in asked.items():
        findable = findable_questions(questions, index)
        kept[split] = balanced(findable, split)
        print(f"{split}: {len(questions)} asked, {len(findable)} findable, {len(kept[split])} kept")
        print("  ", dict(sorted(Counter(q.metadata.kind for q in kept[split]).items())))
    out.mkdir(parents=True, exist_ok=True)
    write_corpus(out / "corpus.jsonl.xz", passages)
    for split, questions in kept.items():
        (out / f"{split}.jsonl").write_bytes(
            b"".join(msgspec.json.encode(q) + b"\n" for q in questions)
        )
    names = heldout_names(kept["held_out"], passages)
    titles = [
        title
        for title in dict.fromkeys(p.title for p in wiki.values())
        if not mentions(title, names)
    ]
    (out / "titles.txt.xz").write_bytes(lzma.compress("\n".join(titles).encode(), preset=9))
    questions = [q.question for qs in kept.values() for q in qs]
    train_tokenizer(out, [f'"{p.title}" {p.text}' for p in passages], questions)
    print(f"{len(passages)} passages, {len(titles)} titles")


def read_documents(source: Path) -> list[tuple[str, str, str]]:
    """(id, title, text) of the realfacts corpus."""
    plain = source / "corpus.jsonl"
    text = plain.read_text() if plain.exists() else unpacked(source / "corpus.jsonl.xz")
    documents = []
    for line in text.splitlines():
        record = json.loads(line)
        title, _, text = record["contents"].partition("\n")
        documents.append((record["id"], title.strip('"'), text))
    return documents


def cut(text: str) -> str:
    """The first forty words or 280 characters, without a dangling separator."""
    words = text.split()[:MAX_WORDS]
    while len(" ".join(words)) > MAX_CHARACTERS:
        words.pop()
    short = " ".join(words)
    return text if short == text else short.rstrip(";,:(- ") + " ..."


def factbook_passages(documents: Iterable[tuple[str, str, str]]) -> dict[str, Passage]:
    """One passage for each `{Country} - {Key}: ...`; its id is `fb-no-capital`.

    A short fact is filled up with the next sentences of its section that answer no question:
    passages of six words would win every search for their country, whatever was asked.
    """
    wanted = {*KEY_OF.values(), *DISTRACTOR_KEYS}
    passages: dict[str, Passage] = {}
    for section in sections(documents).values():
        for i, (code, country, sentence) in enumerate(section):
            id_ = f"fb-{code}-{slug(key_of(sentence))}"
            if key_of(sentence) not in wanted or id_ in passages:
                continue
            text = f"{country} - {sentence}"
            for _, _, filler in section[i + 1 :] + section[:i]:
                if len(text.split()) < FILL_BELOW and key_of(filler) not in wanted:
                    text += f" {country} - {filler}"
            passages[id_] = Passage(id_, country, cut(text))
    return passages


def sections(
    documents: Iterable[tuple[str, str, str]],
) -> dict[str, list[tuple[str, str, str]]]:
    """(code, country, "Capital: name: Oslo; ...") in order, by country and section."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for id_, title, text in documents:
        if id_.startswith("fb-"):
            country = title.rsplit(" (", 1)[0]
            parts = re.split(rf"(?:^|(?<= )){re.escape(country)} - ", text)[1:]
            section = found.setdefault(id_.rsplit("-", 1)[0], [])
            section += [(id_.split("-")[1], country, part.strip()) for part in parts]
    return found


def key_of(sentence: str) -> str:
    return sentence.partition(":")[0]


def slug(key: str) -> str:
    return re.sub(r"\W+", "-", key.lower()).strip("-")


def wiki_passages(documents: Iterable[tuple[str, str, str]]) -> Iterator[Passage]:
    for id_, title, text in documents:
        if id_.startswith("wiki-"):
            yield Passage(id_, title, cut(" ".join(text.split())))


def read_questions(
    source: Path, splits: list[str], facts: dict[str, Passage]
) -> Iterator[BundledQuestion]:
    """The kinds the demo asks, with their support pointed at the bundled passages."""
    for split in splits:
        for line in (source / f"{split}.jsonl").read_text().splitlines():
            question = msgspec.json.decode(line, type=BundledQuestion)
            kind = question.metadata.kind
            if not re.match(r"country_|bridge_|place_to_|creator_|person_", kind):
                continue
            support = [
                f"fb-{id_.split('-')[1]}-{slug(KEY_OF[relation])}" if id_.startswith("fb-") else id_
                for id_, relation in zip(question.metadata.support, relations_of(kind), strict=True)
            ]
            if any(id_.startswith("fb-") and id_ not in facts for id_ in support):
                continue
            metadata = msgspec.structs.replace(question.metadata, support=tuple(support))
            yield msgspec.structs.replace(question, metadata=metadata)


def relations_of(kind: str) -> list[str]:
    """What each support passage states: "bridge_capital_to_currency" -> ["capital", "currency"]."""
    family, _, rest = kind.partition("_")
    if family == "bridge":
        return [part.replace("_", " ") for part in rest.split("_to_")]
    if family == "place":
        return ["", rest.removeprefix("to_").replace("_", " ")]
    if family == "creator":
        return ["", ""]
    return [rest.replace("_", " ")]


def answerable(question: BundledQuestion, passages: dict[str, Passage]) -> bool:
    """Short answer, literally in the last support passage; every hop readable from its passage."""
    plan = plan_of(question, passages)
    return plan is not None and len(plan.answer.split()) <= MAX_ANSWER_WORDS


def choose_passages(
    facts: dict[str, Passage], wiki: dict[str, Passage], questions: list[BundledQuestion]
) -> list[Passage]:
    """Every fact, every supporting article, and articles spread evenly over the rest."""
    supporting = {id_ for q in questions for id_ in q.metadata.support}
    others = [p for id_, p in wiki.items() if id_ not in supporting]
    stride = len(others) / NUM_WIKI_DISTRACTORS
    chosen = {others[int(i * stride)].id for i in range(NUM_WIKI_DISTRACTORS)}
    chosen |= supporting
    return [*facts.values(), *(p for id_, p in wiki.items() if id_ in chosen)]


def findable_questions(
    questions: list[BundledQuestion], index: BundledIndex
) -> list[BundledQuestion]:
    """Those the careful player answers with the bundled index."""
    kept = []
    for question in questions:
        plan = plan_of(question, index.by_id)
        if plan is not None:
            own, *hops = index.search([question.question, *plan.queries])
            if is_findable(question, plan, own, hops):
                kept.append(question)
    return kept


def is_findable(
    question: BundledQuestion, plan: Plan, own: list[Passage], hops: list[list[Passage]]
) -> bool:
    if plan.bridge is not None:
        seen = own + hops[0]
        if any(contains(p, answer) for p in seen for answer in question.golden_answers):
            return False
    return all(
        support in [p.id for p in found]
        for support, found in zip(question.metadata.support, hops, strict=True)
    )


def balanced(questions: list[BundledQuestion], split: str) -> list[BundledQuestion]:
    """Two-hop questions with places capped, and one-hop ones thinned to their share."""
    places: Counter[str] = Counter()
    two_hop = []
    for question in questions:
        if question.metadata.hops != 2:
            continue
        if question.metadata.kind.startswith("place_to_"):
            places[question.metadata.support[-1]] += 1
            if places[question.metadata.support[-1]] > PLACES_PER_FACT[split]:
                continue
        two_hop.append(question)
    share = ONE_HOP_SHARE[split]
    num_one_hop = round(len(two_hop) * share / (1 - share))
    persons = [q for q in questions if q.metadata.kind.startswith("person_")]
    countries = [q for q in questions if q.metadata.kind.startswith("country_")]
    chosen = thinned(persons, round(PERSON_SHARE * num_one_hop))
    chosen += thinned(countries, num_one_hop - len(chosen))
    order = {q.id: i for i, q in enumerate(questions)}
    return sorted(two_hop + chosen, key=lambda q: order[q.id])


def thinned(questions: list[BundledQuestion], count: int) -> list[BundledQuestion]:
    """`count` of them, evenly spread; all if there are fewer."""
    if count >= len(questions):
        return questions
    return [questions[int(i * len(questions) / count)] for i in range(count)]


def write_corpus(path: Path, passages: list[Passage]) -> None:
    lines = [
        json.dumps({"id": p.id, "contents": f'"{p.title}"\n{p.text}'}, ensure_ascii=False)
        for p in passages
    ]
    path.write_bytes(lzma.compress(("\n".join(lines) + "\n").encode(), preset=9))


def train_tokenizer(out: Path, passages: list[str], questions: list[str]) -> None:
    """Byte-level BPE; digits stand alone, the protocol's tags are one token each.

    The tags are added tokens but not `special` ones: an engine that skips special tokens when it
    makes text would otherwise drop them, and no stop string would ever be seen.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*passages, *questions], trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
