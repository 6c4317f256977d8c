"""The bundled tokenizer holds no token that the warm start hardly ever showed the policy."""

from tokenizers import Tokenizer

from leeway.actors.config import bundled_dir
from leeway.actors.search.prune_tokenizer import count_tokens, prune
from leeway.actors.search.questions import load_questions

MERGES = [("a", "b"), ("ab", "c"), ("x", "y")]


def test_a_rare_token_takes_those_that_are_built_from_it_with_it():
    assert prune(MERGES, {"ab": 0, "abc": 9, "xy": 5}, 5) == [("x", "y")]


def test_a_rare_token_stays_where_a_common_one_is_built_from_it():
    assert prune(MERGES, {"ab": 0, "abc": 50, "xy": 4}, 5) == [("a", "b"), ("ab", "c")]


def test_held_out_names_are_spelled_in_tokens_that_were_trained():
    bundle = bundled_dir()
    share = {t: n / 4_000 for t, n in count_tokens(bundle / "tokenizer.json", 4_000).items()}
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    held_out = " ".join(q.question for q in load_questions(bundle / "held_out.jsonl"))
    for name in ("Japan", "China", "India", "Greece", "Turkey", "Guinea"):
        assert name in held_out
        pieces = tokenizer.encode(f" {name}").tokens
        assert len(pieces) > 1
        assert min(share.get(piece, 0) for piece in pieces) > 0.001, pieces


def test_the_model_and_the_bundle_have_one_tokenizer():
    bundle = bundled_dir()
    tokenizer = (bundle / "tokenizer.json").read_bytes()
    assert tokenizer == (bundle / "model" / "tokenizer.json").read_bytes()
